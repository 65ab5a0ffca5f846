"""`<root>/runs/<run id>/tracking.json`: what MLflow has to be told about one pipeline run.

Metrics stay in the stages' files; the journal only says which directories belong to the run and how each ended. With
it any later process can tell MLflow the rest, when the server was down or the process was killed.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import Field

from training_core.protocol.atomic import read_json, write_json
from training_core.records import Record

FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"


class StageNote(Record):
    """One stage of the run."""

    directory: str
    started: float
    """Unix time."""
    ended: float | None = None
    cached: bool = False
    """The result was there before this run asked for it."""
    status: str | None = None
    """FINISHED, FAILED or KILLED; null while the stage runs."""
    error: str = ""


class Journal(Record):
    """The content of tracking.json."""

    uid: str
    """Names the run in MLflow, also where many roots share one server."""
    run_id: str
    name: str
    experiment: str
    started: float
    ended: float | None = None
    status: str | None = None
    """Null while the run goes on, and for one whose process was killed."""
    state: str = ""
    """The state as the pipeline names it: Completed, Rejected, Pre-empted and so on."""
    params: dict[str, str] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    artifacts: list[str] = Field(default_factory=list)
    stages: dict[str, StageNote] = Field(default_factory=dict)
    settled: bool = False
    """MLflow knows everything: nothing to do for a later process."""


class JournalFile:
    """Reads and writes one run's journal, and holds the lock that says that a process is at work on it."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.directory = root / "runs" / run_id
        self.path = self.directory / "tracking.json"
        self._lock = FileLock(str(self.directory / "tracking.lock"), thread_local=False)

    def read(self) -> Journal | None:
        """Return the journal, or None when there is none that can be read."""
        try:
            return Journal.model_validate(read_json(self.path))
        except (OSError, ValueError):
            return None

    def write(self, journal: Journal) -> None:
        write_json(self.path, journal.model_dump(mode="json"))

    def create(self, run_id: str, name: str, experiment: str, **values: Any) -> Journal:
        """Return the journal on disk, or a new one with an id of its own, written."""
        if (found := self.read()) is not None:
            return found
        journal = Journal(
            uid=uuid.uuid4().hex, run_id=run_id, name=name, experiment=experiment, started=time.time(), **values
        )
        self.write(journal)
        return journal

    def try_lock(self) -> bool:
        """Take the lock if no live process holds it; the OS drops it when its owner dies."""
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        return True

    def unlock(self) -> None:
        self._lock.release(force=True)


def unsettled(root: Path, except_run: str) -> list[JournalFile]:
    """Return the journals of other runs below `root` of which MLflow may not know everything."""
    found = []
    for path in sorted((root / "runs").glob("*/tracking.json")):
        file = JournalFile(root, path.parent.name)
        journal = file.read()
        if journal is not None and not journal.settled and path.parent.name != except_run:
            found.append(file)
    return found
