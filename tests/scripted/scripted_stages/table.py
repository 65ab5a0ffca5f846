"""The scripted stages, under the names and versions of the real ones."""

from tasks.planning import BY_NAME
from training_core.protocol.child import StageEntry

STAGES = {name: StageEntry("scripted_stages.stage", stage.version) for name, stage in BY_NAME.items()}
