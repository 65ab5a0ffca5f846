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
from typing import Any

from tasks.artifacts import flow_run_id
from tasks.mlflow_store import DEFAULT_EXPERIMENT, connect, locate_store, redact
from tasks.tracking_journal import FAILED, FINISHED, KILLED, Journal, JournalFile, StageNote, unsettled
from tasks.tracking_rows import flatten
from tasks.tracking_sync import RunSync, close_abandoned, param_text
from training_core.errors import PreemptedError, StageTimeoutError
from training_core.protocol.digests import config_digest
from training_core.protocol.environment import git_commit
from training_core.records import StageResult

logger = logging.getLogger(__name__)

POLL_SECONDS = 3.0
RETRY_FACTOR = 3
CLOSE_SECONDS = 30.0
FINISHED_STATES = ("completed", "rejected", "cached", "finished")
KILLED_STATES = ("cancelled", "cancelling", "pre-empted", "preempted", "interrupted", "killed")


def status_of_state(state: str) -> str:
    """Return the MLflow status for the name of a pipeline state."""
    name = state.lower()
    if name in FINISHED_STATES:
        return FINISHED
    return KILLED if name in KILLED_STATES else FAILED


def status_of_error(error: BaseException) -> str:
    stopped = (PreemptedError, StageTimeoutError, KeyboardInterrupt, SystemExit)
    # Prefect's signal for a cancelled run is a BaseException too; a bug is an Exception.
    is_stop = isinstance(error, stopped) or not isinstance(error, Exception)
    return KILLED if is_stop else FAILED


class PipelineTracker:
    """One pipeline run in MLflow. No method raises or waits for a server; only `close` waits, for a bounded time.

    Args:
        run_id: the pipeline run, `<root>/runs/<run id>`.
        config: a pipeline config; `tracking` is read, and what says what to compute becomes params.
        root: the pipeline's root.
        poll_seconds: how often new rows are sent.
        close_seconds: the longest time that `close` waits.
    """

    def __init__(
        self,
        run_id: str,
        config: Any,
        root: Path,
        *,
        poll_seconds: float = POLL_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self.run_id = run_id
        self.root = Path(root).absolute()
        self._tracking = getattr(config, "tracking", None)
        self._poll_seconds = poll_seconds
        self._close_seconds = close_seconds
        self._file = JournalFile(self.root, run_id)
        self._guard = threading.RLock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._down = False
        self._recovered = False
        self._sync: RunSync | None = None
        self._journal: Journal | None = None
        self._thread: threading.Thread | None = None
        with self._never_raising("start"):
            self._open(config)

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
        """Return `{"run_id", "stages": {name: run id}}` as far as MLflow has answered."""
        sync = self._sync
        return {"run_id": sync.pipeline_id if sync else None, "stages": sync.stage_ids() if sync else {}}

    def close(self, state: str) -> None:
        """The run ended in `state`. Waits until MLflow knows, but not longer than `close_seconds`."""
        with self._never_raising("close"):
            report = self._file.directory / "report.html"
            if report.is_file():
                self.add_artifact(report)
            with self._guard:
                if self._journal is None:
                    return
                ended = close_abandoned(self._journal, time.time())
                update = {"status": status_of_state(state), "state": state, "ended": time.time()}
                self._write(ended.model_copy(update=update))
                self._closing.set()
            self._wake.set()
            if self._thread is not None:
                self._thread.join(self._close_seconds)
                if self._thread.is_alive():
                    logger.warning(
                        "MLflow is slow; what it does not know yet is sent by the next run below %s", self.root
                    )
                    return
            self._file.unlock()

    def _open(self, config: Any) -> None:
        if not self._file.try_lock():
            logger.warning("another process tracks run %s in MLflow; this one leaves it to that", self.run_id)
            return
        experiment = getattr(self._tracking, "experiment", DEFAULT_EXPERIMENT)
        journal = self._file.create(self.run_id, self.run_id, experiment)
        self._journal = journal
        tags = journal.tags | run_tags(self.run_id, config)
        params = run_params(config) | journal.params
        fresh = {"status": None, "ended": None, "state": "Running", "settled": False, "experiment": experiment}
        self._write(journal.model_copy(update=fresh | {"tags": tags, "params": params}))
        self._thread = threading.Thread(target=self._loop, name=f"mlflow-{self.run_id}", daemon=True)
        self._thread.start()

    def _update_stage(self, name: str, note: StageNote) -> None:
        with self._guard:
            if self._journal is not None:
                self._write(self._journal.model_copy(update={"stages": self._journal.stages | {name: note}}))
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
            if self._sync is None:
                location = locate_store(self._tracking, self.root)
                self._sync = RunSync(connect(location), location)
            with self._guard:
                journal = self._journal
            assert journal is not None
            self._sync.sync(journal)
            if self._down:
                logger.info("MLflow answers again; it has been told everything so far")
                self._down = False
            if journal.status is not None:
                with self._guard:
                    self._file.write(journal.model_copy(update={"settled": True}))
            if not self._recovered:
                self._recovered = True
                self._finish_others()
        except Exception as error:  # Observability must not stop training.
            if not self._down:
                logger.warning(
                    "MLflow is not told about this run for now (%s). Training goes on; the rest is sent later",
                    redact(str(error)) or type(error).__name__,
                )
            self._down = True
            self._sync = None
            return False
        return True

    def _finish_others(self) -> None:
        """Tell MLflow the rest of runs whose process is gone, so that none stays RUNNING and no metric is missing."""
        for file in unsettled(self.root, except_run=self.run_id):
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


def run_params(config: Any) -> dict[str, str]:
    """Return what a run computes, field by field: the columns by which people compare runs."""
    fields = flatten(config.identity()) if hasattr(config, "identity") else {}
    return {name: param_text(value) for name, value in fields.items() if value is not None}


def run_tags(run_id: str, config: Any) -> dict[str, str]:
    """Return the tags of the pipeline's MLflow run that are known at its start."""
    tags = {"tidegate.run_id": run_id, "tidegate.algorithm": run_params(config).get("algorithm.name", "")}
    if hasattr(config, "identity"):
        tags["tidegate.config_sha256"] = config_digest(config.identity())
    if commit := git_commit():
        tags["tidegate.git_commit"] = commit
    if prefect_id := flow_run_id():
        tags["prefect.flow_run_id"] = prefect_id
    return tags
