"""A run of the chain: its record, its lock, its tracker, and one stage after the other.

`PipelineRun` is a context: leaving it writes how the run ended. Being stopped (Ctrl-C, SIGTERM, a pre-empted stage) is
an outcome, not a failure: the context swallows it and `final_state` names it. Errors go on to the caller.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tasks.artifacts import publish_progress
from tasks.config import PipelineConfig
from tasks.dispatch import run_stage
from tasks.planning import BY_NAME, ChainState, FinishedStage, StageDefinition, chain_of, is_rejected
from tasks.plans import LOST_VERSION, PlanState, StagePlan, assess, is_complete, require_finished
from tasks.policies import policy_for, should_retry
from tasks.progress import Progress, observer
from tasks.rivals import adopt_champion, ask_for_champion, is_registered
from tasks.roots import prepare_root
from tasks.runs import RunRecord, RunStage, RunState, StageState, load_run, report_path, run_directory
from tasks.stopping import ending_text, is_cancelled_by_server, is_sigterm
from tasks.views import run_view
from training_core.errors import EvaluationError, PreemptedError, StageLockedError
from training_core.protocol.context import STOPPED
from training_core.protocol.directory import StageDirectory
from training_core.protocol.lock import directory_lock
from training_core.records import StageResult, Verdict

if TYPE_CHECKING:
    from tasks.tracking import PipelineTracker

PUBLISH_EVERY_SECONDS = 10.0
"""Between two updates of a progress bar in Prefect: each is a request."""


class PipelineRun(AbstractContextManager["PipelineRun"]):
    """One attempt at a run; the same config and files are the same run, so an attempt continues the one before.

    Args:
        config: the whole pipeline's.
        whole: False when single stages are run on their own: the run is then never marked complete.

    Raises:
        ConfigurationError, DataError, ArtifactError, DigestMismatchError: as `ChainState.begin`.
        StageLockedError: on entering: a live process works on this run.
        DiskFullError: on entering: the root has no room for a run's records.
    """

    def __init__(self, config: PipelineConfig, *, whole: bool = True) -> None:
        self.config = config
        self.whole = whole
        self.state = ChainState.begun(config)
        self.run_id = self.state.run_id
        self.root = self.state.root
        self.stopped: BaseException | None = None
        self._attempts: dict[str, int] = {}
        self._retry: dict[str, bool] = {}
        self.errors: dict[str, BaseException] = {}
        """How the last attempt at a stage ended, if it did not succeed."""
        self._published = time.monotonic()
        self._champion_asked = False
        self._cancelled: bool | None = None
        """Whether the server cancelled this flow run; None before it was asked."""

    def __enter__(self) -> PipelineRun:
        directory = run_directory(self.root, self.run_id)
        prepare_root(self.root)
        with ExitStack() as stack:
            try:
                stack.enter_context(directory_lock(directory))
            except StageLockedError as error:
                raise StageLockedError(f"run {self.run_id} is already going on: {error}") from None
            self.record = self._begin_record()
            self.record.save(self.root)
            self.tracker = self._begin_tracker()
            observer().run_started(self.run_id, [stage.name for stage in chain_of(self.config)])
            self._stack = stack.pop_all()  # Until here, whatever goes wrong gives the lock back.
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        with self._stack:
            self.record.state = self._state_after(error)
            self._note_mlflow()
            self._write_report()  # Before the tracker closes: it sends the report, too.
            self.tracker.close(self.record.state.value)
            self._note_mlflow()
        if isinstance(error, PreemptedError | KeyboardInterrupt) or (is_sigterm(error) and not self._is_cancelled()):
            self.stopped = error
            return True
        return False

    def run_stage(self, name: str) -> RunStage:
        """Run one stage, or find it cached, and note everything about it. Called again for another attempt.

        Raises:
            TidegateError: of the type that the stage reported.
        """
        stage, entry = BY_NAME[name], self.record.stages[name]
        self._attempts[name] = self._attempts.get(name, 0) + 1
        self._retry[name] = False
        self.errors.pop(name, None)
        if name == "register" and is_rejected(self.state):
            entry.state, entry.why = StageState.SKIPPED, "the gate did not say pass"
            self.record.model = None
            self.record.save(self.root)
            return entry
        try:
            if not self.whole:
                require_finished(stage, self.state)
            if name == "evaluate":
                self.resolve_champion()
            plan = self._assess(stage)
            self._run_planned(stage, plan, entry)
        except BaseException as error:
            self.errors[name] = error
            self._retry[name] = should_retry(error, self._attempts[name], self.config.launch.retries)
            entry.state, entry.error = self._stage_state_after(error), ending_text(error)
            self.record.save(self.root)
            if self._retry[name]:
                observer().note(f"stage {name} is tried again: {policy_for(error).reason}")
            raise
        self._note_outcome(name)
        self.record.save(self.root)
        return entry

    def wants_retry(self, name: str) -> bool:
        """Return whether the last attempt at a stage ended in a way that is tried again at once."""
        return self._retry.get(name, False)

    def resolve_champion(self) -> None:
        """Ask the registry whom the candidate has to beat: once an attempt.

        A complete run keeps the one it was told, as long as its evaluation against that one is there. A policy that was
        trained anew (another version of a stage, a directory deleted) is compared with the champion of now.

        Raises:
            ServerUnreachableError: the registry does not answer.
        """
        if self._champion_asked:
            return
        if self.state.champion_known and self._was_complete and is_complete(BY_NAME["evaluate"], self.state):
            return
        self.record.champion = ask_for_champion(self.state)
        self.record.champion_known = self._champion_asked = True
        self.record.save(self.root)
        adopt_champion(self.state, self.record)

    def _begin_record(self) -> RunRecord:
        config = self.config.model_dump(mode="json")
        record = load_run(self.root, self.run_id)
        if record is None:
            record = RunRecord(run_id=self.run_id, config=config, inputs=self.state.external)
        self._state_before, self._was_complete = record.state, record.state.is_complete
        if self._was_complete or not self.whole:
            adopt_champion(self.state, record)
        else:
            record.champion, record.champion_known = None, False
        record.config, record.inputs = config, self.state.external
        # A stage on its own says nothing new about the others.
        self._hashes_before = {name: entry.spec_hash for name, entry in record.stages.items()}
        known = {} if self.whole else record.stages
        record.stages = {stage.name: known.get(stage.name, RunStage()) for stage in chain_of(self.config)}
        record.attempts += 1
        record.state = RunState.RUNNING
        return record

    def _begin_tracker(self) -> PipelineTracker:
        from tasks.tracking import PipelineTracker

        tracking = self.config.tracking
        return PipelineTracker(
            self.run_id,
            self.config,
            self.root,
            config_sha256=self.state.config_sha256,
            poll_seconds=tracking.poll_seconds,
            close_seconds=tracking.flush_seconds,
        )

    def _assess(self, stage: StageDefinition) -> StagePlan:
        plan = assess(stage, self.state)
        if plan.state is PlanState.CACHED and stage.name == "register" and not is_registered(self.state):
            # Someone deleted the version: what is cached is a claim about a registry that no longer holds.
            finished = self.state.finished.pop("register")
            finished.directory.result_path.unlink()
            plan = StagePlan(stage.name, PlanState.RUNS, LOST_VERSION, plan.spec, plan.directory)
        return plan

    def _run_planned(self, stage: StageDefinition, plan: StagePlan, entry: RunStage) -> None:
        assert plan.spec is not None
        assert plan.directory is not None
        directory = StageDirectory(plan.directory)
        cached = plan.state is PlanState.CACHED
        entry.spec_hash, entry.directory = plan.spec.spec_hash, str(plan.directory.relative_to(self.root))
        entry.why, entry.error = plan.why, None
        if self.whole and not (cached and entry.spec_hash == self._hashes_before.get(stage.name)):
            # Verdict and model of the attempt before are about other weights now, or soon.
            self.record.model = None
            self.record.gate = self.record.gate if stage.name == "register" else None
        self.tracker.stage_started(stage.name, plan.directory, cached=cached)
        if cached:
            result = self.state.finished[stage.name].result
        else:
            entry.state = StageState.RUNNING
            self.record.save(self.root)
            observer().stage_started(stage.name, plan.state.value, plan.why)
            result = self._run_tracked(stage, plan, directory)
            self.state.finished[stage.name] = FinishedStage(directory, result)
        self.tracker.stage_finished(stage.name, result)
        entry.state = StageState.CACHED if cached else StageState.COMPLETED
        entry.seconds, entry.peak_rss_bytes, entry.attempts = result.seconds, result.peak_rss_bytes, result.attempts
        observer().stage_finished(stage.name, entry.state.value, result.seconds)

    def _run_tracked(self, stage: StageDefinition, plan: StagePlan, directory: StageDirectory) -> StageResult:
        assert plan.spec is not None
        key = f"{self.run_id}:{stage.name}:{plan.spec.spec_hash}:{self.record.attempts}.{self._attempts[stage.name]}"
        try:
            return run_stage(stage, plan.spec, directory, self.config, self.run_id, key, self._poll)
        except BaseException as error:
            self.tracker.stage_finished(stage.name, error)
            raise

    def _poll(self, progress: Progress | None) -> None:
        self.tracker.poll()
        now = time.monotonic()
        if progress is not None and now - self._published >= PUBLISH_EVERY_SECONDS:
            self._published = now
            publish_progress(progress.stage, progress.step, progress.total)

    def _note_outcome(self, name: str) -> None:
        if name == "gate":
            self.record.gate = self.state.finished[name].result.summary
        if name == "register":
            self.record.model = self.state.finished[name].result.summary

    def _note_mlflow(self) -> None:
        """Note the ids that MLflow gave; a store that was silent takes none away."""
        found, known = self.tracker.mlflow_ids(), self.record.mlflow
        stages = {**known.get("stages", {}), **found.get("stages", {})}
        self.record.mlflow = {"run_id": found.get("run_id") or known.get("run_id"), "stages": stages}
        self.record.save(self.root)

    def _is_cancelled(self) -> bool:
        if self._cancelled is None:
            self._cancelled = is_cancelled_by_server()
        return self._cancelled

    def _stage_state_after(self, error: BaseException) -> StageState:
        if isinstance(error, KeyboardInterrupt):
            return StageState.INTERRUPTED
        if is_sigterm(error):
            return StageState.CANCELLED if self._is_cancelled() else StageState.PREEMPTED
        return StageState.PREEMPTED if isinstance(error, PreemptedError) else StageState.FAILED

    def _state_after(self, error: BaseException | None) -> RunState:
        if error is not None:
            return RunState(self._stage_state_after(error).value)
        if not self.whole:
            return self._state_before if self._was_complete else RunState.INCOMPLETE
        if not is_rejected(self.state):
            return RunState.COMPLETED
        verdict = self.state.finished["gate"].result.summary.get("verdict")
        return RunState.GATE_ERROR if verdict == Verdict.ERROR else RunState.REJECTED

    def _write_report(self) -> None:
        """Write the report of the run as it stands, of a failed one too: an earlier attempt's tells of another end."""
        from tasks.report import write_report

        path = report_path(self.root, self.run_id)
        try:
            write_report(run_view(self.record, self.root), path, root=self.root)
        except Exception as error:
            # A picture that cannot be drawn must not turn a finished run into a failed one.
            observer().note(f"the report could not be written: {error!r}")
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def final_state(self) -> Any:
        """Return the Prefect state of a run that ended without an error: its name tells how."""
        from prefect.states import Cancelled, Completed, Failed

        if self.record.state is RunState.GATE_ERROR:
            reasons = "; ".join(map(str, (self.record.gate or {}).get("reasons") or [])) or "no reason given"
            undecided = EvaluationError(f"{self.run_id}: the gate could not decide: {reasons}")
            return Failed(name=self.record.state.value, message=str(undecided), data=undecided)
        if self.stopped is None:
            return Completed(name=self.record.state.value, message=self.summary(), data=self.run_id)
        if isinstance(self.stopped, KeyboardInterrupt):
            return Cancelled(name=RunState.INTERRUPTED.value, message=f"{self.run_id}: stopped by Ctrl-C")
        error = self.stopped if isinstance(self.stopped, PreemptedError) else PreemptedError(STOPPED)
        return Failed(name=RunState.PREEMPTED.value, message=f"{self.run_id}: {error}", data=error)

    def summary(self) -> str:
        """Return one line about the outcome."""
        verdict = (self.record.gate or {}).get("verdict", "none")
        model = self.record.model
        registered = f", registered as {model['model_name']} version {model['version']}" if model else ""
        return f"{self.run_id}: gate {verdict}{registered}"
