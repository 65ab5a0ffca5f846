"""Data checks: what a preference data set holds, what will be trained on, what will not, and why.

Great Expectations lives in this package and nowhere else. Importing the package imports neither it nor transformers:
the stage's modules load in the stage process.
"""

from training_core.protocol.child import StageEntry

STAGES: dict[str, StageEntry] = {
    "check_data": StageEntry("data_checks.stage", version=3),
}
