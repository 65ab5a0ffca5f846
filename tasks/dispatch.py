"""Run a planned stage: as a child process here, or as a flow run of its own on a work pool."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from tasks.config import PipelineConfig
from tasks.inputs import with_absolute_paths
from tasks.launch import named_error, refuse_if_running, reported_error, run_stage_process
from tasks.planning import StageDefinition
from tasks.progress import Progress, StageWatch, observer
from tasks.runs import RunState
from training_core.errors import (
    ConfigurationError,
    PreemptedError,
    ServerUnreachableError,
    TemporaryError,
    TidegateError,
)
from training_core.protocol.directory import StageDirectory
from training_core.records import StageResult, StageSpec

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

CANCEL_SECONDS_BEYOND_GRACE = 35.0
"""Prefect kills a cancelled flow run 30 seconds after asking it to stop."""
OUTAGE_SECONDS = 300.0
"""How long a main flow waits for a Prefect server that does not answer: the stage on the worker goes on meanwhile, and
its result under the shared root counts, whoever can say so."""


def run_stage(
    stage: StageDefinition,
    spec: StageSpec,
    directory: StageDirectory,
    config: PipelineConfig,
    run_id: str,
    attempt_key: str,
    on_poll: Callable[[Progress | None], None],
) -> StageResult:
    """Run one stage to its end where the config says and return its result, read from the root.

    Args:
        attempt_key: names this attempt; two calls with one key start one flow run.
        on_poll: called again and again with the newest progress meanwhile.

    Raises:
        TidegateError: of the type that the stage reported.
    """
    if config.orchestration.mode == "local":
        return run_stage_process(stage.package, spec, directory, config.launch, on_poll)
    return _run_as_deployment(stage, directory, config, run_id, attempt_key, on_poll)


def deployment_name(stage: StageDefinition, config: PipelineConfig) -> str:
    """Return `flow/deployment` of a stage, e.g. `reward-model/gpu`."""
    orchestration = config.orchestration
    deployment = orchestration.gpu_deployment if stage.pool == "gpu" else orchestration.cpu_deployment
    return f"{stage.flow_name}/{deployment}"


def _run_as_deployment(
    stage: StageDefinition,
    directory: StageDirectory,
    config: PipelineConfig,
    run_id: str,
    attempt_key: str,
    on_poll: Callable[[Progress | None], None],
) -> StageResult:
    refuse_if_running(directory)
    directory.error_path.unlink(missing_ok=True)  # A worker that dies at once leaves none: an old one is no answer.
    flow_run = _start_flow_run(stage, config, run_id, attempt_key)
    try:
        ended = _wait(flow_run.id, stage, directory, config.orchestration.poll_seconds, on_poll)
    except BaseException:
        # Neither the parent's end nor its cancellation may leave a stage on a GPU.
        observer().stage_stopping(stage.name, config.launch.grace_seconds)
        _cancel(flow_run.id, config.launch.grace_seconds + CANCEL_SECONDS_BEYOND_GRACE)
        raise
    if (result := directory.result()) is not None:
        return result
    raise _remote_error(stage, ended, directory)


def _start_flow_run(stage: StageDefinition, config: PipelineConfig, run_id: str, attempt_key: str) -> FlowRun:
    import httpx
    from prefect.deployments import run_deployment
    from prefect.exceptions import ObjectNotFound

    name = deployment_name(stage, config)
    parameters: dict[str, Any] = {"config": with_absolute_paths(config).model_dump(mode="json"), "run_id": run_id}
    try:
        # timeout=0: return at once. The waiting is done here, where metrics can be forwarded meanwhile.
        flow_run = run_deployment(
            name=name, parameters=parameters, timeout=0, as_subflow=True, idempotency_key=attempt_key
        )
    except httpx.HTTPError as error:
        raise _silent_server(f"asked to start {name}", error) from error
    except ObjectNotFound:
        raise ConfigurationError(
            f"orchestration.mode is deployments, but there is no deployment {name!r}. Deploy it with "
            "`prefect deploy --all`, or correct orchestration.cpu_deployment / gpu_deployment, or use mode: local"
        ) from None
    return cast("FlowRun", flow_run)  # A coroutine only inside an event loop, where no flow of ours runs.


def _wait(
    flow_run_id: UUID,
    stage: StageDefinition,
    directory: StageDirectory,
    poll_seconds: float,
    on_poll: Callable[[Progress | None], None],
) -> FlowRun | None:
    """Wait for the end of a flow run and return it; None when the server is silent and the stage's result is there.

    Raises:
        ServerUnreachableError: the server was silent for too long.
    """
    import httpx
    from prefect.client.orchestration import get_client

    watch = StageWatch(stage.name, directory)
    answered = time.monotonic()
    with get_client(sync_client=True) as client:
        while True:
            try:
                flow_run = client.read_flow_run(flow_run_id)
                answered = time.monotonic()
                if flow_run.state is not None and flow_run.state.is_final():
                    watch.tell_alarms(observer())
                    return flow_run
            except httpx.HTTPError as error:
                if directory.result() is not None:
                    return None
                if time.monotonic() - answered > OUTAGE_SECONDS:
                    raise _silent_server(f"asked for {OUTAGE_SECONDS:.0f} s how {stage.name} is", error) from error
            if (progress := watch.look()) is not None:
                observer().stage_progress(progress)
            watch.tell_alarms(observer())
            on_poll(progress)
            time.sleep(poll_seconds)


def _cancel(flow_run_id: UUID, seconds: float) -> None:
    """Cancel a flow run and wait until its worker has ended it."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException
    from prefect.states import Cancelling

    # The server may be what failed: then there is nobody to ask, and the worker's own process ends the stage.
    with contextlib.suppress(httpx.HTTPError, PrefectException), get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, Cancelling(message="the pipeline run was stopped"))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            state = client.read_flow_run(flow_run_id).state
            if state is not None and state.is_final():
                return
            time.sleep(0.5)


def _silent_server(doing: str, error: Exception) -> ServerUnreachableError:
    return ServerUnreachableError(
        f"the Prefect server does not answer ({doing}): {error or type(error).__name__}. A stage that runs on a worker "
        "goes on. Start the server and run the same command again: what is done stays done"
    )


def _remote_error(stage: StageDefinition, flow_run: FlowRun | None, directory: StageDirectory) -> TidegateError:
    """Return why there is no result: what the stage's process reported, else what its flow run said of itself."""
    if (error := reported_error(directory)) is not None:
        return error
    state = flow_run.state if flow_run is not None else None
    name, message = (state.name, state.message) if state is not None else ("Unknown", None)
    if name == RunState.PREEMPTED.value:
        return PreemptedError(message or f"stage {stage.name} was asked to stop")
    # The flow of a stage names the type of what went wrong before or around the stage's process.
    if (error := named_error(message or "")) is not None:
        return error
    run_name = flow_run.name if flow_run is not None else "unknown"
    what = f"flow run {run_name} of stage {stage.name} ended {name}: {message or 'no message'}"
    if state is not None and (state.is_crashed() or state.is_cancelled()):
        return TemporaryError(f"{what}. The same command again continues from the last checkpoint")
    return TidegateError(f"{what}. Its log in Prefect says more")
