"""A run as one object for machines: what `run --json` and `show --json` print and the report is made of."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tasks.alarms import ALARMS_FILE, read_alarms, summarise_alarms
from tasks.runs import DamagedRun, RunRecord, RunStage, RunState, StageState, run_directory
from training_core.protocol.lock import is_locked

DAMAGED = "Damaged"
"""State of a run whose run.json cannot be read."""


def run_view(record: RunRecord, root: Path) -> dict[str, Any]:
    """Return `{run_id, state, stages: [...], gate, model}` of a run."""
    state = live_state(record, root)
    return {
        "run_id": record.run_id,
        "state": state.value,
        "stages": [
            {
                "name": name,
                "state": _stage_state(entry, state).value,
                "spec_hash": entry.spec_hash,
                "seconds": entry.seconds,
                "directory": None if entry.directory is None else str(root / entry.directory),
                "peak_rss_bytes": entry.peak_rss_bytes,
                "why": entry.why,
                "error": entry.error,
                "alarms": _alarms(entry, root),
            }
            for name, entry in record.stages.items()
        ],
        "gate": record.gate,
        "model": _model_view(record.model),
    }


def _alarms(entry: RunStage, root: Path) -> list[dict[str, Any]]:
    """Return what the sentinels of a stage said, one entry a sentinel and action."""
    return [] if entry.directory is None else summarise_alarms(read_alarms(root / entry.directory / ALARMS_FILE))


def run_row(run: RunRecord | DamagedRun, root: Path) -> dict[str, Any]:
    """Return one line about a run: what `list` prints."""
    row: dict[str, Any] = {
        "run_id": run.run_id,
        "state": DAMAGED,
        "verdict": None,
        "model": None,
        "changed": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.updated)),
        "directory": str(run_directory(root, run.run_id)),
        "error": None,
    }
    if isinstance(run, DamagedRun):
        return {**row, "error": str(run.error)}
    model = f"{run.model['model_name']} {run.model['version']}" if run.model else None
    return {**row, "state": live_state(run, root).value, "verdict": (run.gate or {}).get("verdict"), "model": model}


def empty_view() -> dict[str, Any]:
    """Return the object of a run that never came to be."""
    return {"run_id": None, "state": RunState.FAILED.value, "stages": [], "gate": None, "model": None}


def live_state(record: RunRecord, root: Path) -> RunState:
    """Return a run's state; one that says Running while no process holds it was killed."""
    if record.state is RunState.RUNNING and not is_locked(run_directory(root, record.run_id)):
        return RunState.INTERRUPTED
    return record.state


def _stage_state(entry: RunStage, run_state: RunState) -> StageState:
    """Return a stage's state; one that ran when its run was killed runs no more."""
    if run_state is RunState.INTERRUPTED and entry.state is StageState.RUNNING:
        return StageState.INTERRUPTED
    return entry.state


def _model_view(registration: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what was registered; `aliases` are those that the version had then, the registry knows those of now."""
    if registration is None:
        return None
    keys = {"name": "model_name", "version": "version", "weights_sha256": "weights_sha256", "aliases": "aliases"}
    return {key: registration.get(source) for key, source in keys.items()}
