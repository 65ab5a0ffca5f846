"""What all stage tasks share: how a stage's outcome becomes the state of a task, and which failures are tried again."""

from __future__ import annotations

from typing import Any

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tasks.artifacts import publish_gate_report, publish_stage_table
from tasks.pipeline import PipelineRun
from tasks.planning import BY_NAME
from tasks.policies import RETRY_DELAY_SECONDS
from tasks.runs import RunState, StageState
from tasks.stage_alone import run_stage_alone
from tasks.stopping import is_cancelled_by_server, is_sigterm
from training_core.errors import PreemptedError, as_tidegate_error
from training_core.protocol.context import STOPPED

# Stages are cached by content in the root, with their outputs verified; Prefect's cache knows nothing of files.
STAGE_TASK: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}


def stage_task_body(run: PipelineRun, name: str) -> Any:
    """Run a stage within a task; return a state whose name tells what happened, or the stage's entry."""
    try:
        entry = run.run_stage(name)
    except Exception as error:  # Not one that stops this process: it has no time for requests.
        _show_stages(run)
        if isinstance(error, PreemptedError):
            return Failed(name=StageState.PREEMPTED.value, message=str(error), data=error)
        raise
    _show_stages(run)
    if name == "gate" and run.record.gate is not None:
        publish_gate_report(run.record.gate)
    if entry.state in (StageState.CACHED, StageState.SKIPPED):
        return Completed(name=entry.state.value, message=entry.why)
    return entry.model_dump(mode="json")


def _show_stages(run: PipelineRun) -> None:
    rows = [{"stage": stage, **entry.model_dump(mode="json")} for stage, entry in run.record.stages.items()]
    publish_stage_table(rows)


def call(task: Task[..., Any], run: PipelineRun) -> None:
    """Call a stage task with the retries that the policies allow.

    Raises:
        TidegateError: of the type that the stage reported, after the last attempt.
    """
    name = stage_name(task)
    configured = task.with_options(
        # The most that any policy asks for: pre-emption counts `launch.retries`, a silent server has one of its own.
        # `wants_retry` stops earlier.
        retries=max(run.config.launch.retries, 1),
        retry_delay_seconds=RETRY_DELAY_SECONDS,
        retry_condition_fn=lambda _task, _task_run, _state: run.wants_retry(name),
    )
    outcome = configured(run)
    if isinstance(outcome, State) and outcome.is_failed():
        # Prefect wraps what a state holds; the run kept the error itself.
        raise run.errors[name]


def stage_name(task: Task[..., Any]) -> str:
    """Return the stage that a task runs: tasks are named like the stages' flows."""
    return next(stage.name for stage in BY_NAME.values() if stage.flow_name == task.name)


def run_stage_flow(task: Task[..., Any], config: Any, run_id: str | None) -> Any:
    """Body of a stage's own flow: for the main flow of `run_id`, or on its own when that is None.

    For the main flow, which reads the state and not the exception, an error becomes a failed state whose message starts
    with the error's type: `tasks.dispatch` makes the same error of it.

    Raises:
        TidegateError: without `run_id`, of the type that the stage reported.
    """
    if run_id is None:
        with PipelineRun(config, whole=False) as run:
            call(task, run)
        return run.final_state()
    name = stage_name(task)
    try:
        finished = run_stage_alone(name, config, run_id)
    except BaseException as error:
        known = as_tidegate_error(error)
        if is_sigterm(error) and not is_cancelled_by_server():
            known = PreemptedError(STOPPED)
        if known is None:
            raise
        if isinstance(known, PreemptedError):
            return Failed(name=RunState.PREEMPTED.value, message=str(known), data=known)
        return Failed(message=f"{type(known).__name__}: {known}", data=known)
    return Completed(message=f"{name} {finished.result.spec_hash}")
