"""Tells MLflow about a pipeline run while it goes on, without ever holding it up.

The run's thread only writes a small journal; a thread of its own talks to MLflow. When MLflow is down, that is said
once, training goes on, and what is missing is sent when MLflow is back: by this process, or by any later one that
works below the same root.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.artifacts import flow_run_id
from tasks.mlflow_store import StoreLocation, connect, locate_store, redact
from tasks.progress import observer
from tasks.runs import RunState, report_path
from tasks.showing import flatten
from tasks.tracking_journal import (
    FAILED,
    FINISHED,
    KILLED,
    Journal,
    JournalFile,
    StageNote,
    close_abandoned,
    unsettled,
    with_stage,
)
from tasks.tracking_sync import RunSync, param_text
from training_core.errors import PreemptedError, StageTimeoutError
from training_core.protocol.environment import git_commit
from training_core.records import StageResult

if TYPE_CHECKING:
    from tasks.config import PipelineConfig

logger = logging.getLogger(__name__)

POLL_SECONDS = 3.0
RETRY_FACTOR = 3
CLOSE_SECONDS = 30.0
STATUS_OF_STATE = {
    RunState.RUNNING: KILLED,  # Nobody ends a run with it: it is what a killed process leaves.
    RunState.COMPLETED: FINISHED,
    RunState.REJECTED: FINISHED,
    RunState.GATE_ERROR: FAILED,
    RunState.FAILED: FAILED,
    RunState.PREEMPTED: KILLED,
    RunState.CANCELLED: KILLED,
    RunState.INTERRUPTED: KILLED,
    RunState.INCOMPLETE: FINISHED,  # Stages were run on their own, and did what was asked.
}
"""State of a run -> its status in MLflow."""


def status_of_error(error: BaseException) -> str:
    stopped = (PreemptedError, StageTimeoutError, KeyboardInterrupt, SystemExit)
    # Prefect's signal for a cancelled run is a BaseException too; a bug is an Exception.
    is_stop = isinstance(error, stopped) or not isinstance(error, Exception)
    return KILLED if is_stop else FAILED


class PipelineTracker:
    """One pipeline run in MLflow. No method raises or waits for a server; only `close` waits, for a bounded time.

    Args:
        run_id: the pipeline run, `<root>/runs/<run id>`.
        config: `tracking` is read, and what says what to compute becomes params.
        root: the pipeline's root.
        config_sha256: digest of the config, a tag; the same as on a model version of this run.
        poll_seconds: how often new rows are sent.
        close_seconds: the longest time that `close` waits.
    """

    def __init__(
        self,
        run_id: str,
        config: PipelineConfig,
        root: Path,
        *,
        config_sha256: str,
        poll_seconds: float = POLL_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self.run_id = run_id
        self.root = Path(root).absolute()
        self._poll_seconds = poll_seconds
        self._close_seconds = close_seconds
        self._file = JournalFile(self.root, run_id)
        self._guard = threading.RLock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._down = False
        self._recovered = False
        self._location: StoreLocation | None = None
        self._sync: RunSync | None = None
        self._journal: Journal | None = None
        self._thread: threading.Thread | None = None
        with self._never_raising("start"):
            self._open(config, config_sha256)

    def stage_started(self, name: str, directory: Path, *, cached: bool = False) -> None:
        """A stage begins, or its result was there already (`cached`)."""
        with self._never_raising(f"note the start of {name}"):
            note = StageNote(directory=str(Path(directory).absolute()), started=time.time(), cached=cached)
            self._update_stage(name, note)

    def stage_finished(self, name: str, outcome: StageResult | BaseException) -> None:
        """A stage ended with a result, or with an error."""
        with self._never_raising(f"note the end of {name}"):
            note = self._journal.stages.get(name) if self._journal else None
            if note is None:
                return
            failed = isinstance(outcome, BaseException)
            update = {
                "ended": time.time(),
                "status": status_of_error(outcome) if isinstance(outcome, BaseException) else FINISHED,
                "error": redact(f"{type(outcome).__name__}: {outcome}")[:2000] if failed else "",
            }
            self._update_stage(name, note.model_copy(update=update))
            if isinstance(outcome, StageResult) and name == "gate" and (verdict := outcome.summary.get("verdict")):
                self.add_tags({"tidegate.gate_verdict": str(verdict)})

    def poll(self) -> None:
        """Something may be new. Cheap; the tracker also looks by itself every few seconds."""
        self._wake.set()

    def add_tags(self, tags: dict[str, str]) -> None:
        """Tags for the pipeline's MLflow run; sent with its end at the latest."""
        with self._never_raising("note tags"), self._guard:
            if self._journal is not None:
                self._write(self._journal.model_copy(update={"tags": self._journal.tags | tags}))

    def add_artifact(self, path: Path) -> None:
        """A file for the pipeline's MLflow run, such as the report; sent at the end."""
        with self._never_raising("note an artifact"), self._guard:
            if self._journal is not None and str(path) not in self._journal.artifacts:
                files = [*self._journal.artifacts, str(Path(path).absolute())]
                self._write(self._journal.model_copy(update={"artifacts": files}))

    def mlflow_ids(self) -> dict[str, Any]:
        """Return `{"run_id", "stages": {name: run id}}` as far as MLflow has answered, now or to an earlier process."""
        journal = self._journal_with_ids(self._sync)
        if journal is None:
            return {"run_id": None, "stages": {}}
        return {"run_id": journal.mlflow_run_id, "stages": journal.mlflow_stage_ids}

    def close(self, state: str) -> None:
        """The run ended in `state`. Waits until MLflow knows, but not longer than `close_seconds`."""
        with self._never_raising("close"):
            report = report_path(self.root, self.run_id)
            if report.is_file():
                self.add_artifact(report)
            with self._guard:
                if self._journal is None:
                    return
                ended = close_abandoned(self._journal, time.time())
                update = {"status": STATUS_OF_STATE[RunState(state)], "state": state, "ended": time.time()}
                self._write(ended.model_copy(update=update))
                self._closing.set()
            self._wake.set()
            if self._thread is not None:
                self._thread.join(self._close_seconds)
                if self._thread.is_alive():
                    observer().note(f"MLflow is slow; the next run below {self.root} sends what it does not know yet")
                    return
            self._file.unlock()

    def _open(self, config: PipelineConfig, config_sha256: str) -> None:
        if not self._file.try_lock():
            observer().note(f"another process tracks run {self.run_id} in MLflow; this one leaves it to that")
            return
        experiment = config.tracking.experiment
        self._location = locate_store(config.tracking, self.root)
        store = self._location.store_id
        # What an earlier process left open was ended with it.
        journal = close_abandoned(self._file.create(self.run_id, self.run_id, experiment, store), time.time())
        fresh: dict[str, Any] = {"status": None, "ended": None, "state": RunState.RUNNING.value, "settled": False}
        fresh |= {"experiment": experiment, "store": store, "params": run_params(config) | journal.params}
        fresh["tags"] = journal.tags | run_tags(self.run_id, config, config_sha256)
        if (store, experiment) != (journal.store, journal.experiment):
            fresh |= {"mlflow_run_id": None, "mlflow_stage_ids": {}}  # There it is known by others.
        self._write(journal.model_copy(update=fresh))
        self._thread = threading.Thread(target=self._loop, name=f"mlflow-{self.run_id}", daemon=True)
        self._thread.start()

    def _update_stage(self, name: str, note: StageNote) -> None:
        with self._guard:
            if self._journal is not None:
                self._write(with_stage(self._journal, name, note))
        self._wake.set()

    def _write(self, journal: Journal) -> None:
        self._journal = journal
        self._file.write(journal)

    def _loop(self) -> None:
        try:
            while True:
                self._wake.wait(self._poll_seconds)
                self._wake.clear()
                last = self._closing.is_set()
                went_well = self._try_sync()
                if last:
                    return
                # Polls come several times a second; a request for each would be a load without use.
                self._closing.wait(self._poll_seconds if went_well else self._poll_seconds * RETRY_FACTOR)
        finally:
            self._file.unlock()

    def _try_sync(self) -> bool:
        """Send what is new; on any failure say so once and keep everything for the next try."""
        try:
            assert self._location is not None
            if self._sync is None:
                self._sync = RunSync(connect(self._location), self._location)
            with self._guard:
                journal = self._journal
            assert journal is not None
            self._sync.sync(journal)
            self._note_sent(journal)
            if self._down:
                observer().note("MLflow answers again; it has been told everything so far")
                self._down = False
            if not self._recovered:
                self._recovered = True
                self._finish_others()
        except Exception as error:  # Observability must not stop training.
            if not self._down:
                why = redact(str(error)) or type(error).__name__
                observer().note(
                    f"MLflow is not told about this run for now ({why}). Training goes on; the rest is sent later"
                )
            self._down = True
            with self._never_raising("note the ids of MLflow"):
                self._note_ids()
            self._sync = None
            return False
        return True

    def _note_sent(self, journal: Journal) -> None:
        """MLflow knows all of `journal`."""
        with self._guard:
            self._note_ids()
            if journal.status is not None and self._journal is not None:
                self._write(self._journal.model_copy(update={"settled": True}))

    def _note_ids(self) -> None:
        with self._guard:
            journal = self._journal_with_ids(self._sync)
            if journal is not None and journal != self._journal:
                self._write(journal)

    def _journal_with_ids(self, sync: RunSync | None) -> Journal | None:
        if self._journal is None or sync is None:
            return self._journal
        ids = {
            "mlflow_run_id": sync.pipeline_id or self._journal.mlflow_run_id,
            "mlflow_stage_ids": self._journal.mlflow_stage_ids | sync.stage_ids,
        }
        return self._journal.model_copy(update=ids)

    def _finish_others(self) -> None:
        """Tell MLflow the rest of runs whose process is gone, so that none stays RUNNING and no metric is missing."""
        assert self._location is not None
        for file in unsettled(self.root, self.run_id, self._location.store_id):
            if self._closing.is_set() or not file.try_lock():
                continue
            try:
                self._finish(file)
            except Exception as error:  # One run's trouble, such as a deleted directory, is not the others'.
                logger.warning("MLflow could not be told the rest of %s: %s", file.path, redact(str(error)))
            finally:
                file.unlock()

    def _finish(self, file: JournalFile) -> None:
        journal = file.read()
        if journal is None or journal.settled or self._sync is None:
            return
        journal = close_abandoned(journal, time.time())
        RunSync(self._sync.client, self._sync.location).sync(journal)
        file.write(journal.model_copy(update={"settled": True}))
        logger.info("MLflow was told the rest of run %s", journal.run_id)

    @contextlib.contextmanager
    def _never_raising(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Observability must not stop training.
            logger.warning("tracking could not %s: %s", doing, redact(str(error)))


def run_params(config: PipelineConfig) -> dict[str, str]:
    """Return what a run computes, field by field: the columns by which people compare runs."""
    return {name: param_text(value) for name, value in flatten(config.identity()).items() if value is not None}


def run_tags(run_id: str, config: PipelineConfig, config_sha256: str) -> dict[str, str]:
    """Return the tags of the pipeline's MLflow run that are known at its start."""
    tags = {"tidegate.run_id": run_id, "tidegate.algorithm": run_params(config).get("algorithm.name", "")}
    tags["tidegate.config_sha256"] = config_sha256
    if commit := git_commit():
        tags["tidegate.git_commit"] = commit
    if prefect_id := flow_run_id():
        tags["prefect.flow_run_id"] = prefect_id
    return tags
