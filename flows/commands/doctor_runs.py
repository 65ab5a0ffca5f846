"""What `tidegate doctor` finds below a root: databases, runs, stages, locks, tracebacks."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from flows.commands.errors import CRASHES
from tasks.runs import DamagedRun, RunState, load_runs, run_directory
from training_core.errors import EXIT_ARTIFACT, EXIT_OK, ArtifactError
from training_core.protocol.directory import StageDirectory
from training_core.protocol.lock import is_locked, read_owner

Found = tuple[str, bool, str, int]
"""What was looked at, whether it is in order, what there is to say, the exit code when it is not in order."""

LOST = {
    "prefect.db": "Prefect's history of runs; move it away and the next run makes a new one",
    "mlflow.db": "MLflow's runs and the registry of models; restore it from a backup before the next run",
}


def look_at_databases(root: Path) -> Iterator[Found]:
    """Yield the local databases that cannot be read."""
    prefect_home = Path(os.environ.get("PREFECT_HOME", str(root / "prefect")))
    for path in (prefect_home / "prefect.db", root / "mlflow.db"):
        if not path.is_file():
            continue
        try:
            with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
                database.execute("select count(*) from sqlite_master").fetchone()
        except sqlite3.DatabaseError as error:
            text = f"{path} cannot be read ({error}). It holds {LOST[path.name]}"
            yield "database", False, text, EXIT_ARTIFACT


def look_at_runs(root: Path) -> Iterator[Found]:
    """Yield the runs under the root, and what was damaged, killed or left behind."""
    runs = load_runs(root)
    going_on: list[str] = []
    killed: list[str] = []
    for run in runs:
        if not isinstance(run, DamagedRun) and run.state is RunState.RUNNING:
            (going_on if is_locked(run_directory(root, run.run_id)) else killed).append(run.run_id)
    yield "runs", True, f"{len(runs)} under the root, going on: {', '.join(going_on) or 'none'}", EXIT_OK
    if killed:
        yield "killed runs", True, f"{', '.join(killed)}: the same `tidegate run` continues each", EXIT_OK
    for run in runs:
        if isinstance(run, DamagedRun):
            yield "damaged run", False, str(run.error), EXIT_ARTIFACT
    yield from _stages(root)
    if crashes := sorted((root / CRASHES).glob("*.txt")):
        text = f"{len(crashes)} of bugs in {root / CRASHES}, the newest {crashes[-1].name}"
        yield "tracebacks", True, text, EXIT_OK


def _stages(root: Path) -> Iterator[Found]:
    for path in sorted((root / "stages").glob("*/*")):
        try:
            StageDirectory(path).result()
        except (ArtifactError, OSError) as error:
            yield "damaged stage", False, str(error), EXIT_ARTIFACT
        if (path / "lock.json").exists() and not is_locked(path):
            owner = read_owner(path) or {}
            text = f"{path}: process {owner.get('pid')} on {owner.get('host')} is gone; the next run takes over"
            yield "stale lock", True, text, EXIT_OK
