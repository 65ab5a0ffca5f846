"""Prefect and MLflow live here: stages as child processes, tracking, the registry.

Also the table of stages whose process is `python -m tasks`. Imports here stay light.
"""

from __future__ import annotations

from training_core.protocol.child import StageEntry

STAGES: dict[str, StageEntry] = {"register": StageEntry("tasks.registration", 1)}
"""Stage name -> where it lives; read by the planner and by `python -m tasks`."""
