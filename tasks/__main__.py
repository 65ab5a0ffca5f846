"""`python -m tasks SPEC_JSON`: run the stage `register` by hand or as a child process."""

import sys

from tasks import STAGES
from training_core.protocol.child import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], STAGES))
