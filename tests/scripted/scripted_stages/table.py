"""The scripted stages, under the names and versions of the real ones. Imports little: every stage process does it."""

import data_checks
import tasks
import training_core.stages
from training_core.protocol.child import StageEntry

REAL = {**training_core.stages.STAGES, **data_checks.STAGES, **tasks.STAGES}
STAGES = {name: StageEntry("scripted_stages.stage", entry.version) for name, entry in REAL.items()}
