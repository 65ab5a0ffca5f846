"""Runs: identity, verdict, champion, continuation, report, and stages on their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from scripted_stages.chain import NAMES, champion, config_of, plan, run, states

import tasks.champion
from flows.commands.plan import plan_of
from tasks.pipeline import PipelineRun
from tasks.planning import ChainState, handed_over
from tasks.plans import PlanState
from tasks.runs import RunState, StageState, find_run, load_run, report_path
from tasks.stage_alone import run_stage_alone
from training_core.errors import (
    ArtifactError,
    ConfigurationError,
    DigestMismatchError,
    EvaluationError,
    PreemptedError,
    ServerUnreachableError,
    StageLockedError,
    TidegateError,
    TrainingDivergedError,
)
from training_core.protocol.lock import is_locked


def test_two_attempts_at_one_run_at_once(scripted) -> None:  # type: ignore[no-untyped-def]
    with PipelineRun(config_of(scripted)) as first, pytest.raises(StageLockedError, match="already going on"):  # noqa: SIM117
        with PipelineRun(config_of(scripted)):
            pass
    assert first.record.attempts == 1


def test_a_file_that_changes_after_planning_is_refused(scripted) -> None:  # type: ignore[no-untyped-def]
    with PipelineRun(config_of(scripted)) as pipeline:
        pipeline.run_stage("sft_intake")
        (scripted.path / "pairs.jsonl").write_text("other\n")
        with pytest.raises(DigestMismatchError, match="preferences_0"):
            pipeline.run_stage("check_data")


@pytest.mark.parametrize(
    ("verdict", "state"),
    [("fail", RunState.REJECTED), ("inconclusive", RunState.REJECTED), ("error", RunState.GATE_ERROR)],
)
def test_a_gate_that_does_not_say_pass_registers_nothing(scripted, verdict: str, state: RunState) -> None:  # type: ignore[no-untyped-def]
    scripted.script({"gate": {"verdict": verdict, "reasons": ["few prompts"]}})
    pipeline = run(scripted)
    assert pipeline.record.state is state
    assert states(pipeline)["register"] == "Skipped"
    assert plan(scripted)["register"].state is PlanState.SKIPPED
    assert pipeline.record.model is None
    assert pipeline.final_state().name == state.value
    assert pipeline.final_state().is_completed() is (state is RunState.REJECTED)
    assert ("few prompts" in str(pipeline.final_state().message)) is (state is RunState.GATE_ERROR)


def test_the_champion_is_asked_for_once_and_a_complete_run_keeps_it(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    asked: list[str | None] = []
    found: dict[str, Any] = champion(scripted.path / "champion", "first")

    def current_champion(_config: Any, _root: Path, _to: Path, candidate_sha256: str | None = None) -> dict[str, Any]:
        asked.append(candidate_sha256)
        return found

    monkeypatch.setattr(tasks.champion, "current_champion", current_champion)
    first = run(scripted)
    assert asked == [first.state.finished["policy"].result.summary["weights_sha256"]]
    assert "champion" in json.loads(first.state.finished["evaluate"].directory.spec_path.read_text())["inputs"]
    assert first.record.champion is not None
    assert first.record.champion.version == "7"
    found = champion(scripted.path / "new_champion", "second")
    second = run(scripted)
    assert len(asked) == 1
    assert set(states(second).values()) == {"Cached"}
    # Another run is compared with the champion of now.
    third = run(scripted, "evaluation.samples_per_prompt=2")
    assert len(asked) == 2
    assert third.state.finished["evaluate"].result.spec_hash != first.state.finished["evaluate"].result.spec_hash


def test_a_complete_run_whose_policy_is_trained_anew_meets_the_champion_of_now(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    found = champion(scripted.path / "champion", "first")
    monkeypatch.setattr(tasks.champion, "current_champion", lambda *_a, **_k: found)
    first = run(scripted)
    assert first.record.state is RunState.COMPLETED
    found = champion(scripted.path / "new_champion", "second")
    # Nothing but the evaluation is gone.
    shutil.rmtree(scripted.stage_directories("evaluate")[0])
    lines = {line.name: line for line in plan_of(ChainState.begin(config_of(scripted)))}
    assert lines["evaluate"].spec is not None
    assert lines["evaluate"].spec.inputs["champion"].path == found["path"]
    # A directory deleted, or another version of a stage: the weights become others.
    shutil.rmtree(scripted.stage_directories("policy")[0])
    lines = {line.name: line for line in plan_of(ChainState.begin(config_of(scripted)))}
    assert lines["evaluate"].state is PlanState.WAITS
    scripted.script({"policy": {"steps": 2}})
    with PipelineRun(config_of(scripted)) as pipeline:
        for name in NAMES[:4]:
            pipeline.run_stage(name)
        lines = {line.name: line for line in plan_of(ChainState.begin(config_of(scripted)))}
        pipeline.run_stage("evaluate")
    assert pipeline.record.champion is not None
    assert pipeline.record.champion.path == found["path"]
    evaluated = pipeline.state.finished["evaluate"].directory.spec_path
    assert json.loads(evaluated.read_text())["inputs"]["champion"]["path"] == found["path"]
    assert lines["evaluate"].spec is not None
    assert lines["evaluate"].spec.inputs["champion"].path == found["path"]


def test_an_unfinished_run_asks_for_the_champion_again(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    scripted.script({"register": {"raise": ["NotPromotableError", "the champion moved"], "bad_attempts": 1}})
    with pytest.raises(ArtifactError, match="the champion moved"):
        run(scripted)
    scripted.script({})
    found = champion(scripted.path / "champion", "moved")
    monkeypatch.setattr(tasks.champion, "current_champion", lambda *_a, **_k: found)
    again = run(scripted)
    assert states(again) == {**dict.fromkeys(NAMES[:4], "Cached"), **dict.fromkeys(NAMES[4:], "Completed")}


def test_a_version_that_the_registry_lost_is_registered_again(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    run(scripted)
    monkeypatch.setattr(tasks.champion, "verify_registration", lambda *_a, **_k: False)
    again = run(scripted)
    assert states(again)["register"] == "Completed"
    assert again.record.stages["register"].why == "the registry lost the version"
    lines = {line.name: line for line in plan_of(ChainState.begin(config_of(scripted)))}
    assert (lines["register"].state, lines["register"].why) == (PlanState.RUNS, "the registry lost the version")
    assert {lines[name].state for name in NAMES[:-1]} == {PlanState.CACHED}


def test_a_preempted_stage_is_wanted_again_up_to_the_limit(scripted) -> None:  # type: ignore[no-untyped-def]
    scripted.script({"check_data": {"raise": ["PreemptedError", "asked to stop"]}})
    with PipelineRun(config_of(scripted, "launch.retries=1")) as pipeline:
        pipeline.run_stage("sft_intake")
        with pytest.raises(PreemptedError):
            pipeline.run_stage("check_data")
        assert pipeline.wants_retry("check_data")
        pipeline.run_stage("check_data")
    assert isinstance(pipeline.stopped, PreemptedError)
    assert not pipeline.wants_retry("check_data")
    assert pipeline.record.state is RunState.PREEMPTED
    assert pipeline.final_state().name == "Pre-empted"
    record = load_run(scripted.root, pipeline.run_id)
    assert record is not None
    assert record.stages["check_data"].state is StageState.PREEMPTED


def test_the_tracker_hears_of_every_stage(scripted) -> None:  # type: ignore[no-untyped-def]
    from scripted_stages.replace import SilentTracker

    scripted.script({"evaluate": {"raise": ["EvaluationError", "no scores"]}})
    with pytest.raises(EvaluationError, match="no scores"):
        run(scripted)
    assert ("started", "policy", False) in SilentTracker.calls
    assert ("finished", "evaluate", "EvaluationError") in SilentTracker.calls
    assert SilentTracker.calls[-1] == ("close", "Failed")


def test_a_stage_alone_finds_what_it_needs_or_says_what_is_missing(scripted) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArtifactError, match="reward_model needs sft_intake"):  # noqa: SIM117
        with PipelineRun(config_of(scripted), whole=False) as pipeline:
            pipeline.run_stage("reward_model")
    whole = run(scripted)
    config = config_of(scripted, "gate.alpha=0.1")
    with PipelineRun(config, whole=False) as pipeline:
        assert pipeline.run_stage("gate").state is StageState.COMPLETED
    assert pipeline.record.state is RunState.INCOMPLETE
    # On behalf of a main flow elsewhere: from its record alone.
    assert run_stage_alone("gate", config, pipeline.run_id).result.spec_hash == pipeline.record.stages["gate"].spec_hash
    done = run_stage_alone("register", config, pipeline.run_id)
    assert done.result.summary["weights_sha256"] == (whole.record.model or {})["weights_sha256"]
    with pytest.raises(TidegateError, match="must share `root`"):
        run_stage_alone("gate", config, "scripted-000000000000")
    # A stage of a complete run, on its own: nothing about the run is forgotten.
    with PipelineRun(config_of(scripted), whole=False) as pipeline:
        assert pipeline.run_stage("evaluate").state is StageState.CACHED
    assert pipeline.record.state is RunState.COMPLETED
    assert pipeline.record.gate == whole.record.gate
    assert pipeline.record.model == whole.record.model
    assert states(pipeline) == states(whole) | {"evaluate": "Cached"}


def test_stages_alone_remember_the_champion_that_the_evaluation_met(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    found = champion(scripted.path / "champion", "first")
    monkeypatch.setattr(tasks.champion, "current_champion", lambda *_a, **_k: found)
    for name in NAMES[:6]:
        with PipelineRun(config_of(scripted), whole=False) as pipeline:
            assert pipeline.run_stage(name).state is StageState.COMPLETED
    evaluated = pipeline.record.stages["evaluate"].spec_hash
    found = champion(scripted.path / "second", "second")
    with PipelineRun(config_of(scripted), whole=False) as pipeline:
        assert pipeline.run_stage("evaluate").spec_hash != evaluated  # Asked for again: it has another rival now.


def test_the_report_is_there_before_the_tracker_closes(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from scripted_stages.replace import SilentTracker

    import tasks.report
    import tasks.tracking

    sent: list[str] = []

    class Tracker(SilentTracker):
        def close(self, state: str) -> None:
            sent.extend(path.read_text() for path in (scripted.root / "runs").glob("*/report.html"))

    def write_report(view: dict[str, Any], output: Path, *, root: Path) -> Path:
        output.write_text(f"{view['run_id']} {view['state']}")
        return output

    monkeypatch.setattr(tasks.tracking, "PipelineTracker", Tracker)
    monkeypatch.setattr(tasks.report, "write_report", write_report)
    with PipelineRun(config_of(scripted), whole=False) as pipeline:
        pipeline.run_stage("sft_intake")
    assert sent == [f"{pipeline.run_id} Incomplete"]
    monkeypatch.setattr(tasks.report, "write_report", lambda *_a, **_k: 1 / 0)
    with PipelineRun(config_of(scripted), whole=False) as pipeline:  # A picture that cannot be drawn fails no run.
        pipeline.run_stage("sft_intake")
    assert pipeline.record.state is RunState.INCOMPLETE
    assert not report_path(scripted.root, pipeline.run_id).exists()  # The one there tells of an earlier attempt.


def test_a_failed_run_has_a_report_of_its_own(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import tasks.report

    monkeypatch.setattr(tasks.report, "write_report", lambda view, output, root: output.write_text(json.dumps(view)))
    scripted.script({"policy": {"raise": ["TrainingDivergedError", "loss is NaN"]}})
    with pytest.raises(TrainingDivergedError):
        run(scripted)
    report = report_path(scripted.root, find_run(scripted.root, "latest").run_id)
    view = json.loads(report.read_text())
    assert view["state"] == "Failed"
    assert "loss is NaN" in view["stages"][3]["error"]


def test_a_short_outage_of_the_registry_forgets_nothing(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    first = run(scripted)

    def silent(*_arguments: Any, **_named: Any) -> bool:
        raise ServerUnreachableError("MLflow does not answer")

    monkeypatch.setattr(tasks.champion, "verify_registration", silent)
    with pytest.raises(ServerUnreachableError):
        run(scripted)
    record = find_run(scripted.root, "latest")
    assert record.state is RunState.FAILED
    assert (record.gate, record.model) == (first.record.gate, first.record.model)
    # What the gate was about is trained anew: its word, and what was registered on it, are of the past.
    (directory,) = scripted.stage_directories("policy")
    shutil.rmtree(directory)
    scripted.script({"policy": {"raise": ["TrainingDivergedError", "loss is NaN"]}})
    with pytest.raises(TrainingDivergedError):
        run(scripted)
    record = find_run(scripted.root, "latest")
    assert (record.gate, record.model) == (None, None)


def test_ids_of_mlflow_outlive_an_outage(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from scripted_stages.replace import SilentTracker

    found: dict[str, Any] = {"run_id": "one", "stages": {"policy": "two"}}
    monkeypatch.setattr(SilentTracker, "mlflow_ids", lambda _tracker: found)
    first = run(scripted)
    assert first.record.mlflow == found
    found = {"run_id": None, "stages": {"gate": "three"}}
    again = run(scripted)
    assert again.record.mlflow == {"run_id": "one", "stages": {"policy": "two", "gate": "three"}}


def test_a_run_that_cannot_begin_gives_its_lock_back(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    pipeline = PipelineRun(config_of(scripted))
    monkeypatch.setattr(pipeline, "_begin_tracker", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), pipeline:
        raise AssertionError
    assert not is_locked(scripted.root / "runs" / pipeline.run_id)


def test_the_server_is_asked_once_who_stopped_the_run(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from prefect.exceptions import TerminationSignal

    import tasks.pipeline

    asked: list[bool] = []
    monkeypatch.setattr(tasks.pipeline, "is_cancelled_by_server", lambda: asked.append(True) or False)
    with PipelineRun(config_of(scripted)) as pipeline:
        monkeypatch.setattr(pipeline, "_assess", lambda _stage: raise_(TerminationSignal(15)))
        pipeline.run_stage("sft_intake")
    assert asked == [True]
    assert pipeline.record.state is RunState.PREEMPTED
    assert (pipeline.record.stages["sft_intake"].error or "").startswith("stopped by SIGTERM")


def raise_(error: BaseException) -> Any:
    raise error


def test_a_record_of_an_earlier_version_is_read(scripted) -> None:  # type: ignore[no-untyped-def]
    run_id = run(scripted).run_id
    path = scripted.root / "runs" / run_id / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "prefect": {"flow_run_id": "x"}}))
    assert find_run(scripted.root, run_id).state is RunState.COMPLETED
    path.write_text(json.dumps({**json.loads(path.read_text()), "perfect": {}}))
    with pytest.raises(ArtifactError, match="perfect"):
        find_run(scripted.root, run_id)


def test_digests_that_were_taken_are_not_taken_again(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import tasks.planning

    state = ChainState.begin(config_of(scripted))
    digest = tasks.planning.digest_external_files
    monkeypatch.setattr(tasks.planning, "digest_external_files", lambda _config: raise_(AssertionError("again")))
    with handed_over(state):
        assert PipelineRun(config_of(scripted)).run_id == state.run_id
        monkeypatch.setattr(tasks.planning, "digest_external_files", digest)
        assert PipelineRun(config_of(scripted, "seed=2")).run_id != state.run_id  # Another config is not this state's.
        (scripted.path / "pairs.jsonl").write_text("other\n")
        assert PipelineRun(config_of(scripted)).run_id == state.run_id
    assert PipelineRun(config_of(scripted)).run_id != state.run_id


def test_runs_are_found_by_the_start_of_their_id(scripted) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match="no runs under"):
        find_run(scripted.root, "latest")
    first, second = run(scripted), run(scripted, "seed=2")
    assert find_run(scripted.root, "latest").run_id == second.run_id
    assert find_run(scripted.root, first.run_id[:-3]).run_id == first.run_id
    with pytest.raises(ConfigurationError, match="could be any of"):
        find_run(scripted.root, "scripted-")
    with pytest.raises(ConfigurationError, match="no run 'scriptd"):
        find_run(scripted.root, "scriptd-123")
    (scripted.root / "runs" / first.run_id / "run.json").write_text("{")
    with pytest.raises(ArtifactError, match="Delete it"):
        find_run(scripted.root, first.run_id)
