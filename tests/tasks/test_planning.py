"""Plans: states and reasons; runs: identity, champion, continuation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tasks.registration
from flows.config import load_pipeline
from tasks.pipeline import PipelineRun, run_stage_alone
from tasks.planning import CHAIN, ChainState, chain_of
from tasks.plans import PlanState, StagePlan, make_plan
from tasks.runs import RunState, StageState, find_run, load_run
from training_core.errors import (
    ArtifactError,
    ConfigurationError,
    DataError,
    DigestMismatchError,
    EvaluationError,
    PreemptedError,
    StageLockedError,
    TidegateError,
)
from training_core.protocol.directory import StageDirectory
from training_core.protocol.lock import directory_lock

NAMES = [stage.name for stage in CHAIN]


def config_of(space: Any, *settings: str) -> Any:
    return load_pipeline([space.config], settings)


def plan(space: Any, *settings: str) -> dict[str, StagePlan]:
    return {line.name: line for line in make_plan(ChainState.begin(config_of(space, *settings)))}


def run(space: Any, *settings: str) -> PipelineRun:
    """Run the whole chain in this process, without Prefect."""
    with PipelineRun(config_of(space, *settings)) as pipeline:
        for stage in chain_of(pipeline.config):
            pipeline.run_stage(stage.name)
    return pipeline


def states(pipeline: PipelineRun) -> dict[str, str]:
    return {name: entry.state.value for name, entry in pipeline.record.stages.items()}


def test_a_new_root_runs_the_first_stage_and_the_others_wait(scripted) -> None:  # type: ignore[no-untyped-def]
    lines = plan(scripted)
    assert list(lines) == NAMES
    assert lines["sft_intake"].state is PlanState.RUNS
    assert lines["sft_intake"].why == "never finished under this root"
    assert lines["check_data"].state is PlanState.WAITS
    assert lines["check_data"].why == "for sft_intake"
    assert not scripted.root.exists()


def test_everything_is_cached_the_second_time(scripted) -> None:  # type: ignore[no-untyped-def]
    first = run(scripted)
    assert set(states(first).values()) == {"Completed"}
    assert {line.state for line in plan(scripted).values()} == {PlanState.CACHED}
    second = run(scripted)
    assert second.run_id == first.run_id
    assert set(states(second).values()) == {"Cached"}
    assert second.record.state is RunState.COMPLETED
    assert second.record.model == first.record.model


def test_one_field_of_rl_runs_rl_and_what_follows_and_says_why(scripted) -> None:  # type: ignore[no-untyped-def]
    run(scripted)
    lines = plan(scripted, "algorithm.clip_low=0.3")
    assert [name for name, line in lines.items() if line.state is PlanState.CACHED] == NAMES[:3]
    assert lines["grpo"].state is PlanState.RUNS
    assert lines["grpo"].why == "algorithm.clip_low: 0.2 -> 0.3"
    again = run(scripted, "algorithm.clip_low=0.3")
    assert list(states(again).values()) == ["Cached"] * 3 + ["Completed"] * 4


def test_a_changed_file_names_the_input(scripted) -> None:  # type: ignore[no-untyped-def]
    run(scripted)
    with (scripted.path / "pairs.jsonl").open("a") as stream:
        stream.write("{}\n")
    lines = plan(scripted)
    assert lines["sft_intake"].state is PlanState.CACHED
    assert lines["check_data"].why == "input preferences_0 changed"


def test_the_most_similar_finished_stage_is_compared_with(scripted) -> None:  # type: ignore[no-untyped-def]
    run(scripted, "algorithm.clip_low=0.3", "algorithm.group_size=4")
    run(scripted, "algorithm.clip_low=0.4")
    why = plan(scripted, "algorithm.clip_low=0.3", "algorithm.group_size=8")["grpo"].why
    assert why in ("algorithm.group_size: 4 -> 8", "algorithm.clip_low: 0.4 -> 0.3")
    assert "seed: 1 -> 9" in plan(scripted, "seed=9")["sft_intake"].why


def test_moving_files_and_changing_how_to_run_changes_nothing(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    first = run(scripted)
    elsewhere = scripted.path / "elsewhere"
    elsewhere.mkdir()
    for name in ("model", "pairs.jsonl", "pipeline.yaml"):
        shutil.move(str(scripted.path / name), elsewhere / name)
    monkeypatch.chdir(elsewhere)
    scripted.config = elsewhere / "pipeline.yaml"
    again = run(scripted, "launch.retries=0", "tracking.poll_seconds=1", "orchestration.poll_seconds=9")
    assert again.run_id == first.run_id
    assert set(states(again).values()) == {"Cached"}


def test_a_stage_with_a_checkpoint_continues(scripted) -> None:  # type: ignore[no-untyped-def]
    scripted.script({"grpo": {"steps": 3, "raise": ["DataError", "no more"], "bad_attempts": 1}})
    with pytest.raises(DataError, match="no more"):
        run(scripted)
    line = plan(scripted)["grpo"]
    assert line.state is PlanState.CONTINUES
    assert line.why == "from step_000003 (last attempt: DataError)"
    record = find_run(scripted.root, "latest")
    assert record.state is RunState.FAILED
    assert record.stages["grpo"].state is StageState.FAILED
    assert record.stages["grpo"].error == "DataError: no more"
    assert states(run(scripted))["grpo"] == "Completed"


@pytest.mark.parametrize("harm", ["change", "delete"])
def test_a_harmed_output_is_an_error_that_says_what_to_delete(scripted, harm: str) -> None:  # type: ignore[no-untyped-def]
    pipeline = run(scripted)
    directory = scripted.root / str(pipeline.record.stages["reward_model"].directory)
    weights = directory / "outputs" / "reward_model" / "weights.safetensors"
    if harm == "change":
        weights.write_text("other")
    else:
        shutil.rmtree(weights.parent)
    import tasks.plans

    tasks.plans._verified.clear()  # A new command is a new process.
    with pytest.raises(ArtifactError, match=str(directory)) as caught:
        plan(scripted)
    assert caught.value.exit_code == 4


def test_a_stage_at_work_elsewhere_is_locked(scripted) -> None:  # type: ignore[no-untyped-def]
    spec = plan(scripted)["sft_intake"].spec
    assert spec is not None
    with directory_lock(StageDirectory.of_spec(scripted.root, spec).path):
        assert plan(scripted)["sft_intake"].state is PlanState.LOCKED
        with pytest.raises(StageLockedError, match="works in"):
            run(scripted)


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


def test_a_digest_in_the_config_is_held_to(scripted) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DigestMismatchError, match=r"data\.preferences\.0\.path"):
        plan(scripted, f"data.preferences.0.sha256={'a' * 64}")


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("data.preferences.0.path=pars.jsonl", ["data.preferences.0.path", "Did you mean", "pairs.jsonl"]),
        ("checkpoint.source=modle", ["checkpoint.source", "Did you mean"]),
        ("data.eval_prompts=no/where.jsonl", ["data.eval_prompts", "does not exist either"]),
    ],
)
def test_missing_files(scripted, setting: str, wanted: list[str]) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError) as caught:
        plan(scripted, setting)
    assert all(part in str(caught.value) for part in wanted), str(caught.value)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (["reward_model=null"], "rewards.0 is of kind reward_model, but there is no `reward_model` section"),
        (
            ["reward_model=null", "rewards=[{kind: sentiment}]", "evaluation.reward_model=true"],
            "evaluation.reward_model",
        ),
        (["gate.primary.metric=sentimnt"], "Did you mean 'sentiment'?"),
        (["gate.guards=[{kind: maximum, metric: toxicity, maximum: 1}]"], "gate.guards.0.metric is 'toxicity'"),
        (["rewards=[{kind: soft_overlong, buffer_tokens: 64}]"], "rollout.max_new_tokens = 32"),
        (["rewards=[{kind: length, min_tokens: 40, max_tokens: 50}]"], "no answer could have the full reward"),
        (["data.max_prompt_tokens=2048"], "data.max_total_tokens = 1024"),
        (["evaluation.num_prompts=10"], "gate.min_prompts = 200"),
        ([f"checkpoint={{source: 'hub:a/b', revision: {'a' * 40!r}}}"], "launch.offline: false"),
        (["rewards=[{kind: sentiment}, {kind: sentiment}]"], "give each a `name`"),
        (["rewards=[]"], "rewards"),
        (["name=My Run"], "name"),
    ],
)
def test_sections_that_do_not_fit(scripted, settings: list[str], wanted: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError) as caught:
        config_of(scripted, *settings)
    assert wanted in str(caught.value), str(caught.value)


def test_an_answer_longer_than_the_model_reads(scripted) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=r"at most 4096 tokens.*Write at most 3584"):
        run(scripted, "rollout.max_new_tokens=5000")


def test_a_chain_without_reward_model(scripted) -> None:  # type: ignore[no-untyped-def]
    pipeline = run(scripted, "reward_model=null", "rewards=[{kind: sentiment}]")
    assert list(states(pipeline)) == [name for name in NAMES if name != "reward_model"]
    assert "reward_model" not in pipeline.state.finished["grpo"].directory.spec_path.read_text()


@pytest.mark.parametrize("verdict", ["fail", "inconclusive", "error"])
def test_a_gate_that_says_no_ends_in_rejected_and_registers_nothing(scripted, verdict: str) -> None:  # type: ignore[no-untyped-def]
    scripted.script({"gate": {"verdict": verdict}})
    pipeline = run(scripted)
    assert pipeline.record.state is RunState.REJECTED
    assert states(pipeline)["register"] == "Skipped"
    assert pipeline.record.model is None
    assert plan(scripted)["register"].state is PlanState.SKIPPED
    assert pipeline.final_state().name == "Rejected"
    assert pipeline.final_state().is_completed()


def champion(folder: Path, text: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_text(text)
    return {"version": "7", "weights_sha256": "b" * 64, "path": str(folder), "gate_sha256": None}


def test_the_champion_is_asked_for_once_and_a_complete_run_keeps_it(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    asked: list[str | None] = []
    found: dict[str, Any] = champion(scripted.path / "champion", "first")

    def current_champion(_config: Any, _root: Path, _to: Path, candidate_sha256: str | None = None) -> dict[str, Any]:
        asked.append(candidate_sha256)
        return found

    monkeypatch.setattr(tasks.registration, "current_champion", current_champion)
    first = run(scripted)
    assert asked == [first.state.finished["grpo"].result.summary["weights_sha256"]]
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


def test_an_unfinished_run_asks_for_the_champion_again(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    scripted.script({"register": {"raise": ["NotPromotableError", "the champion moved"], "bad_attempts": 1}})
    with pytest.raises(ArtifactError, match="the champion moved"):
        run(scripted)
    scripted.script({})
    found = champion(scripted.path / "champion", "moved")
    monkeypatch.setattr(tasks.registration, "current_champion", lambda *_a, **_k: found)
    again = run(scripted)
    assert states(again) == {**dict.fromkeys(NAMES[:4], "Cached"), **dict.fromkeys(NAMES[4:], "Completed")}


def test_a_version_that_the_registry_lost_is_registered_again(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    run(scripted)
    monkeypatch.setattr(tasks.registration, "verify_registration", lambda *_a, **_k: False)
    again = run(scripted)
    assert states(again)["register"] == "Completed"
    assert again.record.stages["register"].why == "the registry lost the version"


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
    assert ("started", "grpo", False) in SilentTracker.calls
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
