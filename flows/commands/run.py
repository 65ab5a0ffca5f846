"""`tidegate run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.commands.errors import error_value, failed, signals_unwind
from flows.commands.live import make_observer
from flows.commands.output import Answer
from flows.commands.summary import print_summary
from flows.config import load_pipeline
from tasks.config import PipelineConfig
from tasks.planning import ChainState, handed_over
from tasks.prefect_home import prefect_server, use_home
from tasks.progress import RunObserver, observed_by
from tasks.roots import prepare_root
from tasks.runs import RunRecord, RunState, load_run
from tasks.stopping import STOPPED_BY_CTRL_C
from tasks.views import empty_view, run_view
from training_core.errors import (
    EXIT_DATA,
    EXIT_GATE_NOT_PASSED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    PreemptedError,
    ServerUnreachableError,
    as_tidegate_error,
)


def run_pipeline(configs: Sequence[Path], settings: Sequence[str], root: str | Path | None, *, as_json: bool) -> Answer:
    """Run a pipeline and print how it goes; return what came out."""
    with signals_unwind():
        return _run(configs, settings, root, as_json)


def _run(configs: Sequence[Path], settings: Sequence[str], root: str | Path | None, as_json: bool) -> Answer:
    try:
        config = load_pipeline(configs, settings, root)
        state = ChainState.begin(config)
        before = load_run(state.root, state.run_id)
    except Exception as error:
        return failed(error, empty_view())
    with make_observer(as_json) as watcher, handed_over(state):
        failure = _attempt(config, state.root, watcher)
    record = load_run(state.root, state.run_id)
    if record is None or (before is not None and record.attempts == before.attempts):
        # The attempt never began: what an earlier one left says nothing about this one.
        view = {**empty_view(), "run_id": state.run_id}
        if isinstance(failure, KeyboardInterrupt):
            return _interrupted({**view, "state": RunState.INTERRUPTED.value})
        return _failed(view, failure, state.root)
    view = run_view(record, state.root)
    if isinstance(failure, KeyboardInterrupt) or record.state is RunState.INTERRUPTED:
        return _interrupted(view)
    if record.state is RunState.PREEMPTED:
        # The flow returned a state of that name; what Prefect raises for it is not the error itself.
        failure = PreemptedError(next((entry.error for entry in record.stages.values() if entry.error), "stopped"))
    if failure is not None and record.state is not RunState.GATE_ERROR:
        return _failed(view, failure, state.root)
    output = sys.stderr if as_json else sys.stdout
    print_summary(record, view, state.root, output)
    return Answer(view, outcome_code(record))


def _attempt(config: PipelineConfig, root: Path, watcher: RunObserver) -> BaseException | None:
    """Run the flow in this process; return what stopped it, or None when it ended by itself."""
    try:
        prepare_root(root)  # Before the server: on a full disk it would only say that it did not come up.
        use_home(root)
        with prefect_server(root) as server, observed_by(watcher):
            from flows.post_training import post_training  # Imports Prefect, while its server starts.

            if server is not None:
                server.wait_until_ready()
            try:
                post_training(config)
            except Exception as error:
                if server is not None and as_tidegate_error(error) is None and server.met_full_disk():
                    raise server.failure("cannot write") from error
                raise
    except (Exception, KeyboardInterrupt) as error:
        return _of_prefect(error)
    return None


def _of_prefect(error: BaseException) -> BaseException:
    """Return what to tell a person: a Prefect server that went away is no bug. Other errors come back as they are."""
    import httpx

    if not isinstance(error, httpx.HTTPError):
        return error
    return ServerUnreachableError(
        f"the Prefect server does not answer: {error or type(error).__name__}. Start it, or unset PREFECT_API_URL to "
        "do without, and run the same command again: what is done stays done"
    )


def _interrupted(view: dict[str, Any]) -> Answer:
    print("interrupted; the same command again continues", file=sys.stderr)
    return Answer({**view, **error_value("Interrupted", STOPPED_BY_CTRL_C, EXIT_INTERRUPTED)}, EXIT_INTERRUPTED)


def _failed(view: dict[str, Any], failure: BaseException | None, root: Path) -> Answer:
    assert isinstance(failure, Exception)
    return failed(failure, view, root)


def outcome_code(record: RunRecord) -> int:
    """Return the exit code of a run that ended by itself."""
    if record.state is RunState.COMPLETED:
        return EXIT_OK
    return EXIT_DATA if record.state is RunState.GATE_ERROR else EXIT_GATE_NOT_PASSED
