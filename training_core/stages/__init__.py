"""The stages of the core. Importing this package imports no torch: modules load in the stage process."""

from training_core.protocol.child import StageEntry

STAGES: dict[str, StageEntry] = {
    "sft_intake": StageEntry("training_core.stages.sft_intake", version=1),
    "reward_model": StageEntry("training_core.stages.reward_model", version=4),
    "policy": StageEntry("training_core.stages.policy", version=1),
    "evaluate": StageEntry("training_core.stages.evaluate", version=3),
    "gate": StageEntry("training_core.stages.gate", version=2),
}
