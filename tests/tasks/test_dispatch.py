"""Stages as flow runs of their own: what is said when one ends without a result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect import task
from prefect.exceptions import TerminationSignal
from prefect.states import Completed, Failed, Running
from scripted_stages.chain import config_of

import tasks.dispatch
import tasks.stage_tasks
from tasks.planning import BY_NAME, CHAIN
from tasks.progress import RunObserver, observed_by
from tasks.stage_tasks import run_stage_flow
from training_core.errors import (
    ArtifactError,
    ConfigurationError,
    DataError,
    DiskFullError,
    PreemptedError,
    ServerUnreachableError,
    StageLockedError,
    TemporaryError,
    TidegateError,
)
from training_core.protocol.atomic import write_json
from training_core.protocol.directory import StageDirectory
from training_core.records import StageResult, StageSpec
from training_core.sentinels import ALARMS_FILE, Alarm, append_alarms


def dispatch(spec: StageSpec, directory: StageDirectory) -> StageResult:
    orchestration = SimpleNamespace(mode="deployments", poll_seconds=0.01)
    config: Any = SimpleNamespace(orchestration=orchestration, launch=SimpleNamespace(grace_seconds=0.0))
    stage = next(stage for stage in CHAIN if stage.name == "policy")
    return tasks.dispatch.run_stage(stage, spec, directory, config, "run-1", "key", lambda progress: None)


def new_directory(root: Path) -> tuple[StageSpec, StageDirectory]:
    spec = StageSpec(stage="policy", stage_version=1, config={}, seed=1)
    directory = StageDirectory.of_spec(root, spec)
    directory.prepare(spec)
    return spec, directory


@pytest.mark.parametrize("reports", [False, True])
def test_the_error_of_an_earlier_attempt_is_not_the_answer_of_this_one(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, reports: bool
) -> None:
    spec, directory = new_directory(tmp_path)

    def report(message: str) -> None:
        write_json(directory.error_path, {"type": "DataError", "exit_code": 3, "message": message})

    def wait(*_arguments: Any) -> Any:
        if reports:
            report("of this attempt")
        state = SimpleNamespace(name="Crashed", message="lost", is_crashed=lambda: True, is_cancelled=lambda: False)
        return SimpleNamespace(name="flow-run", state=state)

    report("of an earlier attempt")
    monkeypatch.setattr(tasks.dispatch, "_start_flow_run", lambda *_arguments: SimpleNamespace(id=1))
    monkeypatch.setattr(tasks.dispatch, "_wait", wait)
    expected = (DataError, "of this attempt") if reports else (TemporaryError, "ended Crashed: lost")
    with pytest.raises(expected[0], match=expected[1]):
        dispatch(spec, directory)


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (PreemptedError("the machine is needed"), PreemptedError, 75),
        (TerminationSignal(15), PreemptedError, 75),
        (StageLockedError("process 3 works in it"), StageLockedError, 75),
        (ConfigurationError("no file of the module 'own'"), ConfigurationError, 2),
        (ArtifactError("stage policy needs check_data"), ArtifactError, 4),
        (OSError(28, "No space left on device"), DiskFullError, 75),
    ],
)
def test_what_a_worker_meets_around_its_process_keeps_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, kind: type[TidegateError], code: int
) -> None:
    def fail(*_arguments: Any) -> Any:
        raise error

    @task(name="policy")
    def policy(_run: Any) -> None:
        """Never called: the stage runs on behalf of another flow."""

    monkeypatch.setattr(tasks.stage_tasks, "run_stage_alone", fail)
    state = run_stage_flow(policy, None, "run-1")
    assert state.is_failed()
    # What the main flow reads from the server: no exception, only the state's name and message.
    state = state.model_copy(update={"data": None})
    monkeypatch.setattr(tasks.dispatch, "_start_flow_run", lambda *_arguments: SimpleNamespace(id=1))
    monkeypatch.setattr(tasks.dispatch, "_wait", lambda *_arguments: SimpleNamespace(name="flow-run", state=state))
    with pytest.raises(TidegateError) as caught:
        dispatch(*new_directory(tmp_path))
    assert type(caught.value) is kind
    assert caught.value.exit_code == code
    if isinstance(error, TidegateError):
        assert str(caught.value) == str(error)


def test_a_bug_on_a_worker_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Failed(message="Flow run encountered an exception: RuntimeError: a bug")
    monkeypatch.setattr(tasks.dispatch, "_start_flow_run", lambda *_arguments: SimpleNamespace(id=1))
    monkeypatch.setattr(tasks.dispatch, "_wait", lambda *_arguments: SimpleNamespace(name="flow-run", state=state))
    with pytest.raises(TidegateError, match=r"ended Failed: .*a bug") as caught:
        dispatch(*new_directory(tmp_path))
    assert caught.value.exit_code == 70


class Server:
    """A Prefect client whose server answers, or not, as told: one answer a look, the last one for ever."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.cancelled = False

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_error: object) -> None:
        """Nothing to close."""

    def read_flow_run(self, _flow_run_id: Any) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(name="flow-run", state=answer)

    def set_flow_run_state(self, *_arguments: Any) -> None:
        self.cancelled = True
        raise httpx.ConnectError("refused")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    def _served(*answers: Any) -> Server:
        server = Server(*answers)
        monkeypatch.setattr("prefect.client.orchestration.get_client", lambda **_named: server)
        monkeypatch.setattr(tasks.dispatch, "_start_flow_run", lambda *_arguments: SimpleNamespace(id=1))
        return server

    return _served


def write_result(spec: StageSpec, directory: StageDirectory) -> None:
    result = StageResult(
        stage=spec.stage, spec_hash=spec.spec_hash, outputs={}, summary={}, seconds=1.0, peak_rss_bytes=1
    )
    write_json(directory.result_path, result.model_dump(mode="json"))


def test_a_short_outage_of_the_prefect_server_is_waited_out(tmp_path: Path, served: Callable[..., Server]) -> None:
    spec, directory = new_directory(tmp_path)
    refused = httpx.ConnectError("refused")
    server = served(Running(), refused, refused, Running(), Failed(message="DataError: row 3 is bad"))
    with pytest.raises(DataError, match="row 3 is bad"):
        dispatch(spec, directory)
    assert server.answers[0].is_failed()
    served(Completed())
    with pytest.raises(TidegateError, match="ended Completed"):
        dispatch(spec, directory)


def test_alarms_of_a_stage_on_a_worker_are_told(tmp_path: Path, served: Callable[..., Server]) -> None:
    spec, directory = new_directory(tmp_path)
    server, told = served(Running(), Running(), Completed()), []
    write_result(spec, directory)

    class Watcher(RunObserver):
        def stage_alarm(self, stage: str, alarm: Any) -> None:
            told.append((stage, alarm.step))

    answer = server.read_flow_run

    def answer_after_an_alarm(flow_run_id: Any) -> Any:
        alarm = Alarm("kl_budget", "warn", 10 - 2 * len(server.answers), "too far", 0.2, 0.1)
        append_alarms(directory.path / ALARMS_FILE, [alarm], 0)
        return answer(flow_run_id)

    server.read_flow_run = answer_after_an_alarm  # type: ignore[method-assign]
    with observed_by(Watcher()):
        dispatch(spec, directory)
    assert told == [("policy", 4), ("policy", 6), ("policy", 8)]


def test_a_result_counts_while_the_prefect_server_is_silent(tmp_path: Path, served: Callable[..., Server]) -> None:
    spec, directory = new_directory(tmp_path)
    server = served(Running(), httpx.ReadTimeout("no answer"))
    write_result(spec, directory)
    assert dispatch(spec, directory).spec_hash == spec.spec_hash
    assert not server.cancelled


def test_a_long_outage_of_the_prefect_server_is_temporary(
    tmp_path: Path, served: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks.dispatch, "OUTAGE_SECONDS", 0.05)
    server = served(httpx.ConnectError("refused"))
    with pytest.raises(ServerUnreachableError, match=r"Prefect server does not answer .*refused"):
        dispatch(*new_directory(tmp_path))
    assert server.cancelled  # Tried, at least.


def test_a_stage_that_cannot_be_started_because_the_server_is_away(
    tmp_path: Path, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_named: Any) -> Any:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr("prefect.deployments.run_deployment", refuse)
    with pytest.raises(ServerUnreachableError, match="asked to start policy/gpu"):
        tasks.dispatch._start_flow_run(BY_NAME["policy"], config_of(scripted), "run-1", "key")
