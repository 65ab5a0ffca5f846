"""How a command ends, in this process: outcomes, errors, signals."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest

from flows.config import load_pipeline
from training_core.errors import ServerUnreachableError


@pytest.mark.parametrize(
    ("verdict", "state", "code"),
    [("pass", "Completed", 0), ("fail", "Rejected", 1), ("inconclusive", "Rejected", 1), ("error", "GateError", 3)],
)
def test_the_verdict_decides_the_exit_code(verdict: str, state: str, code: int) -> None:
    from flows.commands.run import outcome_code
    from tasks.runs import RunRecord, RunState

    record = RunRecord(run_id="r", config={}, inputs={}, state=RunState(state), gate={"verdict": verdict})
    assert outcome_code(record) == code


def test_what_an_earlier_attempt_left_is_not_the_outcome_of_this_one(scripted, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    import flows.commands.run as command
    from tasks.planning import ChainState
    from tasks.runs import RunRecord, RunState

    state = ChainState.begin(load_pipeline([scripted.config]))
    record = RunRecord(run_id=state.run_id, config={}, inputs={}, state=RunState.PREEMPTED, attempts=1)
    record.save(state.root)
    unreachable = ServerUnreachableError("no Prefect server answers")
    monkeypatch.setattr(command, "_attempt", lambda *_arguments: unreachable)
    answer = command._run([scripted.config], [], None, as_json=True)
    assert answer.exit_code == 75
    assert answer.value["state"] == "Failed"
    assert answer.value["error"]["type"] == "ServerUnreachableError"
    assert "no Prefect server answers" in capsys.readouterr().err

    # A Ctrl-C is an error like any other for whoever reads the object, whether the attempt began or not.
    monkeypatch.setattr(command, "_attempt", lambda *_arguments: KeyboardInterrupt())
    answer = command._run([scripted.config], [], None, as_json=True)
    assert (answer.exit_code, answer.value["state"]) == (130, "Interrupted")
    assert (answer.value["error"]["type"], answer.value["error"]["exit_code"]) == ("Interrupted", 130)

    def preempted(*_arguments: Any) -> Exception:
        record.attempts = 2
        record.save(state.root)
        return RuntimeError("what Prefect makes of a failed state")

    monkeypatch.setattr(command, "_attempt", preempted)
    answer = command._run([scripted.config], [], None, as_json=True)
    view = answer.value
    assert (answer.exit_code, view["error"]["type"], view["state"]) == (75, "PreemptedError", "Pre-empted")


def test_a_prefect_server_that_went_away_is_no_bug(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import httpx

    import flows.commands.run as command
    import flows.post_training

    def lose_the_server(_config: Any) -> None:
        raise failure

    monkeypatch.setattr(command, "prefect_server", lambda _root: contextlib.nullcontext())
    monkeypatch.setattr(command, "use_home", lambda _root: None)
    monkeypatch.setattr(flows.post_training, "post_training", lose_the_server)
    failure: Exception = httpx.ConnectError("connection refused")
    answer = command._run([scripted.config], [], None, as_json=True)
    assert (answer.exit_code, answer.value["error"]["type"]) == (75, "ServerUnreachableError")
    assert "connection refused. Start it" in answer.value["error"]["message"]
    failure = RuntimeError("a bug")
    assert command._run([scripted.config], [], None, as_json=True).exit_code == 70


@pytest.mark.parametrize(("kind", "code"), [("ArtifactError", 4), ("TrainingDivergedError", 5), ("DiskFullError", 75)])
def test_every_error_has_one_block_and_its_code(capsys, kind: str, code: int) -> None:  # type: ignore[no-untyped-def]
    from flows.commands.errors import report_error
    from training_core import errors

    assert report_error(getattr(errors, kind)("the value is 3; write 4")) == code
    assert capsys.readouterr().err.endswith(f"exit code {code}): the value is 3; write 4\n")


@pytest.mark.parametrize(("ignored", "raised"), [(False, True), (True, False)])
def test_a_hangup_unwinds_unless_it_is_ignored(ignored: bool, raised: bool) -> None:
    from flows.commands.errors import TerminatedError, signals_unwind

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with pytest.raises(TerminatedError) if raised else contextlib.nullcontext(), signals_unwind():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_bug_goes_to_a_file(workspace, tmp_path: Path, capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import typer

    from flows.commands.errors import exit_code_of

    app = typer.Typer()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))

    @app.command()
    def broken() -> None:
        raise RuntimeError("surprise")

    assert exit_code_of(app, []) == 70
    printed = capsys.readouterr().err
    assert "This is a bug" in printed
    assert "Traceback" not in printed
    # There is no root yet: nothing makes one, and nothing lies in the current folder.
    assert not workspace.root.exists()
    file = next(tmp_path.glob("temporary/tidegate-traceback-*.txt"))
    assert "RuntimeError: surprise" in file.read_text()
    assert not list(Path.cwd().glob("tidegate-traceback-*"))
    workspace.root.mkdir()
    assert exit_code_of(app, []) == 70
    (file,) = (workspace.root / "crashes").glob("tidegate-traceback-*.txt")
    assert str(file) in capsys.readouterr().err
