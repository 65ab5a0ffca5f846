"""How this process was asked to stop: by a SIGTERM as it is, or by someone who cancelled the flow run."""

from __future__ import annotations

from training_core.protocol.context import STOPPED

STOPPED_BY_CTRL_C = STOPPED.replace("SIGTERM", "Ctrl-C")


def ending_text(error: BaseException) -> str:
    """Return how an attempt at a stage ended, in words for a person."""
    if is_sigterm(error):
        return STOPPED
    if isinstance(error, KeyboardInterrupt):
        return STOPPED_BY_CTRL_C
    return f"{type(error).__name__}: {error}"


def is_sigterm(error: BaseException | None) -> bool:
    """Return whether `error` is what Prefect makes of a SIGTERM."""
    from prefect.exceptions import TerminationSignal

    return isinstance(error, TerminationSignal)


def is_cancelled_by_server() -> bool:
    """Return whether the flow run of this process is being cancelled: then its SIGTERM means that, not pre-emption.

    A server that does not answer counts as no: the run then says Pre-empted, which the same command continues.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException
    from prefect.runtime import flow_run

    if flow_run.id is None:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run.id).state
    except (httpx.HTTPError, PrefectException):
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())
