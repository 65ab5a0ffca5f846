"""`python -m data_checks SPEC_JSON`: run the data check by hand or as a child process."""

import sys

from data_checks import STAGES
from training_core.protocol.child import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], STAGES))
