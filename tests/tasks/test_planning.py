"""Plans: which stages are cached, continue, run or wait, and why."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_stages.chain import NAMES, champion, config_of, plan, run, states

import tasks.champion
from flows.commands.plan import plan_of
from tasks.code_files import code_files, find_module_file
from tasks.planning import ChainState
from tasks.plans import PlanState
from tasks.runs import RunState, StageState, find_run
from tasks.stage_alone import planned_files
from training_core.errors import (
    ArtifactError,
    ConfigurationError,
    DataError,
    StageLockedError,
)
from training_core.protocol import environment
from training_core.protocol.directory import StageDirectory
from training_core.protocol.lock import directory_lock


def test_a_new_root_runs_the_first_stage_and_the_others_wait(scripted) -> None:  # type: ignore[no-untyped-def]
    lines = plan(scripted)
    assert list(lines) == NAMES
    assert lines["sft_intake"].state is PlanState.RUNS
    assert lines["sft_intake"].why == "no complete one under this root"
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
    lines = plan(scripted, "algorithm.loss.clip_low=0.3")
    assert [name for name, line in lines.items() if line.state is PlanState.CACHED] == NAMES[:3]
    assert lines["policy"].state is PlanState.RUNS
    assert lines["policy"].why == "algorithm.loss.clip_low: 0.2 -> 0.3"
    again = run(scripted, "algorithm.loss.clip_low=0.3")
    assert list(states(again).values()) == ["Cached"] * 3 + ["Completed"] * 4


def test_a_changed_file_names_the_input(scripted) -> None:  # type: ignore[no-untyped-def]
    run(scripted)
    with (scripted.path / "pairs.jsonl").open("a") as stream:
        stream.write("{}\n")
    lines = plan(scripted)
    assert lines["sft_intake"].state is PlanState.CACHED
    assert lines["check_data"].why == "input preferences_0 changed"


def test_the_most_similar_finished_stage_is_compared_with(scripted) -> None:  # type: ignore[no-untyped-def]
    run(scripted, "algorithm.loss.clip_low=0.3", "algorithm.group_size=4")
    run(scripted, "algorithm.loss.clip_low=0.4")
    why = plan(scripted, "algorithm.loss.clip_low=0.3", "algorithm.group_size=8")["policy"].why
    assert why in ("algorithm.group_size: 4 -> 8", "algorithm.loss.clip_low: 0.4 -> 0.3")
    assert "seed: 1 -> 9" in plan(scripted, "seed=9")["sft_intake"].why
    # A field is named by its whole path, also where a stage's config is one section.
    assert plan(scripted, "checkpoint.dtype=bfloat16")["sft_intake"].why == "checkpoint.dtype: 'source' -> 'bfloat16'"
    assert plan(scripted, "data.min_pairs=3")["check_data"].why == "data.min_pairs: 100 -> 3"
    (scripted.path / "mine.jinja").write_text("{{ messages }}")
    template = plan(scripted, "checkpoint.chat_template=mine.jinja")["sft_intake"]
    assert template.why == "input chat_template is new"
    assert plan(scripted, "data.max_response_tokens=9")["check_data"].why == "data.max_response_tokens: null -> 9"


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
    scripted.script({"policy": {"steps": 3, "raise": ["DataError", "no more"], "bad_attempts": 1}})
    with pytest.raises(DataError, match="no more"):
        run(scripted)
    line = plan(scripted)["policy"]
    assert line.state is PlanState.CONTINUES
    assert line.why == "from step_000003 (last attempt: DataError)"
    record = find_run(scripted.root, "latest")
    assert record.state is RunState.FAILED
    assert record.stages["policy"].state is StageState.FAILED
    assert record.stages["policy"].error == "DataError: no more"
    assert states(run(scripted))["policy"] == "Completed"


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
    with pytest.raises(ArtifactError) as caught:
        plan(scripted)
    assert caught.value.exit_code == 4
    what = "changed after the stage wrote it" if harm == "change" else "is missing"
    assert f"{what}. Delete the directory {directory} to compute it again" in str(caught.value)
    shutil.rmtree(directory)
    assert plan(scripted)["reward_model"].state is PlanState.RUNS


def test_a_stage_at_work_elsewhere_is_locked(scripted) -> None:  # type: ignore[no-untyped-def]
    spec = plan(scripted)["sft_intake"].spec
    assert spec is not None
    with directory_lock(StageDirectory.of_spec(scripted.root, spec).path):
        assert plan(scripted)["sft_intake"].state is PlanState.LOCKED
        with pytest.raises(StageLockedError, match="works in"):
            run(scripted)


def test_a_cached_stage_of_other_code_says_so(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import tasks.plans

    made, now = ("a" * 40, {"torch": "2.0"}), ("b" * 40 + "-dirty", {"torch": "2.1", "numpy": "2"})
    monkeypatch.setattr(environment, "git_commit", lambda: made[0])
    monkeypatch.setattr(environment, "package_versions", lambda: made[1])
    monkeypatch.setattr(tasks.plans, "_code_here", lambda: made)
    run(scripted)
    why = plan(scripted)["policy"].why
    assert why.startswith("same config, inputs and stage version as ")
    assert why.endswith("outputs verified")
    monkeypatch.setattr(tasks.plans, "_code_here", lambda: now)
    code = f"made by commit {'a' * 12}, now {'b' * 12}-dirty"
    assert plan(scripted)["policy"].why.endswith(f"({code}; numpy absent, now 2; torch 2.0, now 2.1)")
    # A worker, or another interpreter, has packages of its own.
    for setting in ("orchestration.mode=deployments", "launch.python=/some/python"):
        assert plan(scripted, setting)["policy"].why.endswith(f"({code})")


def test_a_chain_with_a_reward_function_of_its_own_and_no_reward_model(scripted) -> None:  # type: ignore[no-untyped-def]
    module = scripted.path / "own" / "rules.py"
    module.parent.mkdir()
    module.write_text("raise RuntimeError('found, never imported')")
    settings = ("reward_model=null", "rewards=[{kind: custom, import_path: 'own.rules:score'}]")
    pipeline = run(scripted, *settings)
    assert list(states(pipeline)) == [name for name in NAMES if name != "reward_model"]
    spec = pipeline.state.finished["policy"].directory.spec_path.read_text()
    assert "reward_model" not in spec
    assert json.loads(spec)["inputs"]["code_custom"]["path"] == str(module)
    assert plan(scripted, *settings)["policy"].state is PlanState.CACHED
    # Another function is another reward: what the old one trained is not taken for it.
    module.write_text("def score(prompts, answers, context): return [0.0 for _ in answers]")
    lines = plan(scripted, *settings)
    assert lines["check_data"].state is PlanState.CACHED
    assert lines["policy"].state is PlanState.RUNS
    assert lines["policy"].why == "input code_custom changed"
    # A worker reads its own copy, but the digest that was planned is the one that its stage verifies.
    (scripted.path / "own").rename(scripted.path / "theirs")
    config = config_of(scripted, *settings[:1], "rewards=[{kind: custom, import_path: 'theirs.rules:score'}]")
    planned = planned_files(config, pipeline.record)["rewards.0.import_path"]
    assert planned.path == str(scripted.path / "theirs" / "rules.py")
    assert planned.sha256 == pipeline.record.inputs["rewards.0.import_path"].sha256


def test_the_code_of_a_metric_is_an_input_of_the_evaluation(scripted) -> None:  # type: ignore[no-untyped-def]
    (scripted.path / "gold.py").write_text("")
    custom = "{kind: custom, name: gold, import_path: 'gold:score'}"
    config = config_of(scripted, f"evaluation.metrics=[{{kind: sentiment}}, {custom}]")
    (file,) = code_files(config)
    assert (file.dotted, file.stage, file.input_name) == ("evaluation.metrics.1.import_path", "evaluate", "code_gold")
    before = ChainState.begin(config).run_id
    (scripted.path / "gold.py").write_text("changed = True")
    assert ChainState.begin(config).run_id != before
    (scripted.path / "gold.py").unlink()
    with pytest.raises(ConfigurationError, match=r"evaluation\.metrics\.1\.import_path: no file of the module 'gold'"):
        ChainState.begin(config)
    assert find_module_file("email.mime.text") == Path(sys.modules["email"].__file__).parent / "mime" / "text.py"  # type: ignore[arg-type]
    assert find_module_file("tasks.plans") == Path(sys.modules["tasks.plans"].__file__)  # type: ignore[arg-type]
    assert [find_module_file(name) for name in ("sys", "email.nothing", "email.mime.text.more")] == [None] * 3


def test_a_plan_names_a_champion_that_is_not_downloaded_yet(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    first = run(scripted)
    asked: list[bool] = []
    found: dict[str, Any] = {"version": "7", "weights_sha256": "b" * 64, "path": None, "gate_sha256": None}

    def current_champion(*_arguments: Any, download: bool = True, **_named: Any) -> dict[str, Any]:
        asked.append(download)
        return found

    monkeypatch.setattr(tasks.champion, "current_champion", current_champion)
    assert {line.state for line in plan_of(ChainState.begin(config_of(scripted)))} == {PlanState.CACHED}
    changed = config_of(scripted, "evaluation.samples_per_prompt=2")
    lines = {line.name: line for line in plan_of(ChainState.begin(changed))}
    assert asked == [False]
    assert [lines[name].state.value for name in NAMES] == ["cached"] * 4 + ["runs", "waits", "waits"]
    assert "the champion, version 7 of scripted, not yet downloaded" in lines["evaluate"].why
    found = champion(scripted.path / "champion", "downloaded before")
    lines = {line.name: line for line in plan_of(ChainState.begin(changed))}
    assert lines["evaluate"].why == "input champion is new; evaluation.samples_per_prompt: 1 -> 2"
    assert first.record.champion is None
