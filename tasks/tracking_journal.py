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

from tasks.runs import RunState
from training_core.errors import ArtifactError
from training_core.protocol.atomic import read_json, write_json
from training_core.protocol.directory import StageDirectory
from training_core.records import Record

FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"
LEFT = "@"


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
    store: str = ""
    """`StoreLocation.store_id` of the store that has the run; empty in a journal of a version that did not note it."""
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
    """By stage; a directory that the run left for another one stands under `<stage>@<spec hash>`."""
    mlflow_run_id: str | None = None
    mlflow_stage_ids: dict[str, str] = Field(default_factory=dict)
    """Stage -> MLflow run id, as far as MLflow has answered."""
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

    def create(self, run_id: str, name: str, experiment: str, store: str) -> Journal:
        """Return the journal on disk, or a new one with an id of its own, written."""
        if (found := self.read()) is not None:
            return found
        uid, now = uuid.uuid4().hex, time.time()
        journal = Journal(uid=uid, run_id=run_id, name=name, experiment=experiment, store=store, started=now)
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


def with_stage(journal: Journal, name: str, note: StageNote) -> Journal:
    """Return the journal with a note about a stage; one about another directory is kept, ended, under its own key."""
    stages, before = dict(journal.stages), journal.stages.get(name)
    if before is not None and before.directory != note.directory:
        stages[_left_key(name, before)] = ended_note(before, time.time())
    stages.pop(_left_key(name, note), None)  # It came back to this one.
    return journal.model_copy(update={"stages": stages | {name: note}})


def stage_of(key: str) -> str:
    """Return the stage of a key of `Journal.stages`."""
    return key.partition(LEFT)[0]


def _left_key(name: str, note: StageNote) -> str:
    return f"{name}{LEFT}{Path(note.directory).name}"


def ended_note(note: StageNote, now: float) -> StageNote:
    """Return the note of a stage that no process runs any more: its result is there, or it was killed."""
    if note.status is not None:
        return note
    try:
        done = StageDirectory(Path(note.directory)).result() is not None
    except ArtifactError:  # A damaged result is none.
        done = False
    update = {"status": FINISHED if done else KILLED, "ended": now}
    return note.model_copy(update=update | {"error": "" if done else "the process that ran this stage was killed"})


def close_abandoned(journal: Journal, now: float) -> Journal:
    """Return the journal of a run whose process is gone, with an end for everything that has none."""
    update: dict[str, Any] = {"stages": {key: ended_note(note, now) for key, note in journal.stages.items()}}
    if journal.status is None:
        update |= {"status": KILLED, "ended": now, "state": RunState.INTERRUPTED.value}
    return journal.model_copy(update=update)


def unsettled(root: Path, except_run: str, store: str) -> list[JournalFile]:
    """Return the journals of other runs below `root` of which the MLflow store `store` may not know everything."""
    found = []
    for path in sorted((root / "runs").glob("*/tracking.json")):
        file = JournalFile(root, path.parent.name)
        journal = file.read()
        is_open = journal is not None and not journal.settled and journal.store == store
        if is_open and path.parent.name != except_run:
            found.append(file)
    return found
