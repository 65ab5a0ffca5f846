"""`python -m training_core SPEC_JSON`: run one stage of the core by hand or as a child process."""

import sys

from training_core.protocol.child import main
from training_core.stages import STAGES

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], STAGES))
