"""`python -m scripted_stages SPEC_JSON`: all stages of the chain, without models: quick, and as told by a script."""

import sys

from scripted_stages.table import STAGES

from training_core.protocol.child import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], STAGES))
