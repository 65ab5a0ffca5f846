"""Roll-backs: the same bits when killed or pre-empted anywhere, counted once, bounded, from the start if need be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_trainer import (
    Killed,
    ScriptedTrainer,
    deterministic_files,
    scripted_context,
)

from training_core import loop
from training_core.checkpoint import CheckpointStore
from training_core.config.sentinels import RollBackConfig, SentinelsConfig
from training_core.errors import ArtifactError, PreemptedError, TrainingDivergedError
from training_core.loop import LoopReport, LoopSettings, run_loop
from training_core.metrics import read_metrics
from training_core.protocol.context import StageContext
from training_core.sentinels import KnobChanges, next_changes

NUM_STEPS = 10
SENTINELS = SentinelsConfig.model_validate(
    {"non_finite": {"action": "roll_back"}, "grad_norm": {"action": "roll_back"}, "truncation": {"patience_steps": 1}}
)


def settings(keep_last: int = 1, sentinels: SentinelsConfig = SENTINELS, **others: Any) -> LoopSettings:
    return LoopSettings(NUM_STEPS, 3, keep_last, "test", sentinels=sentinels, **others)


def troubled(step: int, knobs: KnobChanges) -> dict[str, float]:
    """Roll back at step 5 (to 3), once more at step 4 (to 3); warn at steps 2, 4 and 9."""
    changes: dict[str, float] = {}
    if (step, knobs.num_roll_backs) in ((5, 0), (4, 1)):
        changes["policy/grad_norm"] = 50.0
    if step in (2, 4, 9):
        changes["rollout/truncated_fraction"] = 0.9
    return changes


def diverging(step: int, knobs: KnobChanges) -> bool:
    return step == 8 and knobs.num_roll_backs == 0


def early(step: int, knobs: KnobChanges) -> dict[str, float]:
    """Roll back at step 2, to the start."""
    return {"policy/grad_norm": 50.0} if step == 2 and knobs.num_roll_backs == 0 else {}


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine fails here: what a process wrote before it died is there."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


COURSES: dict[str, dict[str, Any]] = {
    "twice": {"script": troubled},
    "gradient": {"diverges": diverging},
    "start": {"script": early},
}
NUM_CALLS = {"twice": 13, "gradient": 12, "start": 12}


def build(context: StageContext, course: str, **others: Any) -> ScriptedTrainer:
    return ScriptedTrainer(context, **COURSES[course], **others)


@pytest.fixture(scope="module", params=COURSES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A course, and the end of a run of it that nothing interrupts."""
    path = tmp_path_factory.mktemp(request.param)
    context = scripted_context(path)
    trainer = build(context, request.param)
    report = run_loop(context, trainer, settings())
    assert trainer.num_calls == NUM_CALLS[request.param]
    return request.param, end_of(path, trainer, report)


def end_of(path: Path, trainer: ScriptedTrainer, report: LoopReport) -> Any:
    checkpoint = scripted_context(path).checkpoints().latest()
    assert checkpoint is not None
    saved = {file.name: file.read_bytes() for file in checkpoint.path.iterdir()}
    return trainer.weights.numpy().tobytes(), trainer.knobs, report, deterministic_files(path), saved


def test_what_a_troubled_run_leaves_behind(tmp_path: Path) -> None:
    context = scripted_context(tmp_path)
    trainer = build(context, "twice")
    assert run_loop(context, trainer, settings()) == LoopReport(NUM_STEPS, None, 2)
    assert trainer.knobs == KnobChanges(
        num_roll_backs=2, since_step=3, learning_rate_factor=0.25, kl_coefficient_factor=4.0
    )
    rows = read_metrics(tmp_path / "alarms.jsonl")
    assert [(r["name"], r["step"], r["num_roll_backs"], r["rolled_back_to"]) for r in rows] == [
        ("truncation", 2, 0, None),
        ("grad_norm", 5, 0, 3),
        ("grad_norm", 4, 1, 3),
        ("truncation", 4, 1, 3),
        ("truncation", 4, 2, None),
        ("truncation", 9, 2, None),
    ]
    for name in ("metrics.jsonl", "timings.jsonl", "samples.jsonl"):
        assert [row["step"] for row in read_metrics(tmp_path / name)] == list(range(1, NUM_STEPS + 1))


def test_the_weights_are_those_of_the_steps_that_count(tmp_path: Path) -> None:
    context = scripted_context(tmp_path)
    trainer = build(context, "twice")
    run_loop(context, trainer, settings())
    weights = torch.tensor([1.0, -0.5, 0.1], dtype=torch.float64)
    for step in range(1, NUM_STEPS + 1):
        weights = weights - 0.1 * (1.0 if step <= 3 else 0.25) * torch.sin(weights * step)
    assert torch.equal(trainer.weights, weights)


@pytest.mark.parametrize("kill_at_call", range(1, 14))
def test_killed_at_any_step_and_continued(tmp_path: Path, whole: tuple[str, Any], kill_at_call: int) -> None:
    course, expected = whole
    context = scripted_context(tmp_path)
    if kill_at_call <= NUM_CALLS[course]:
        with pytest.raises(Killed):
            run_loop(context, build(context, course, kill_at_call=kill_at_call), settings())
    trainer = build(context, course)
    report = run_loop(context, trainer, settings())
    assert end_of(tmp_path, trainer, report) == expected


@pytest.mark.parametrize("stop_at_call", range(1, 14))
def test_preempted_at_any_step_and_continued(tmp_path: Path, whole: tuple[str, Any], stop_at_call: int) -> None:
    course, expected = whole
    context = scripted_context(tmp_path)
    if stop_at_call < NUM_CALLS[course]:
        with pytest.raises(PreemptedError):
            run_loop(context, build(context, course, stop_at_call=stop_at_call), settings())
    context = scripted_context(tmp_path)
    trainer = build(context, course)
    report = run_loop(context, trainer, settings())
    assert end_of(tmp_path, trainer, report) == expected


def test_preempted_after_every_step(tmp_path: Path, whole: tuple[str, Any]) -> None:
    course, expected = whole
    for _ in range(20):
        context = scripted_context(tmp_path)
        trainer = build(context, course, stop_at_call=1)
        try:
            report = run_loop(context, trainer, settings())
            break
        except PreemptedError:
            continue
    assert end_of(tmp_path, trainer, report) == expected


WITHIN = (
    *("truncate_steps", "truncate_alarms", "append_alarms", "next_changes"),
    *("save", "load", "remove_after", "_put_in_place", "_prune"),
)


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.parametrize("after", [False, True])
def test_killed_within_a_roll_back_or_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: bool
) -> None:
    """Kill before or after each call of `name`, one after the other, until a run meets none any more."""
    course, context = "twice", scripted_context(tmp_path / "whole")
    trainer = build(context, course)
    expected = end_of(tmp_path / "whole", trainer, run_loop(context, trainer, settings()))
    owner: Any = next((o for o in (CheckpointStore, ScriptedTrainer) if hasattr(o, name)), loop)
    original: Callable[..., Any] = getattr(owner, name)
    for number in range(1, 40):
        path = tmp_path / str(number)
        context = scripted_context(path)
        calls = iter(range(1, 1000))

        def dying(*arguments: Any, number: int = number, calls: Any = calls, **others: Any) -> Any:
            is_last = next(calls) == number
            if is_last and not after:
                raise Killed
            result = original(*arguments, **others)
            if is_last:
                raise Killed
            return result

        monkeypatch.setattr(owner, name, dying)
        try:
            run_loop(context, build(context, course), settings())
        except Killed:
            monkeypatch.setattr(owner, name, original)
        else:
            break
        trainer = build(context, course)
        report = run_loop(context, trainer, settings())
        assert end_of(path, trainer, report) == expected
        shutil.rmtree(path)
    assert 1 < number < 39


@pytest.mark.parametrize("interrupted", [False, True])
def test_one_roll_back_too_many_stops(tmp_path: Path, interrupted: bool) -> None:
    def hopeless(step: int, knobs: KnobChanges) -> dict[str, float]:
        return {"policy/grad_norm": 50.0} if step == 5 else {}

    context = scripted_context(tmp_path)
    if interrupted:  # In the course after the first roll-back.
        with pytest.raises(Killed):
            run_loop(context, ScriptedTrainer(context, hopeless, kill_at_call=7), settings())
    trainer = ScriptedTrainer(context, hopeless)
    with pytest.raises(TrainingDivergedError, match=r"rolled back 2 time\(s\) already, roll_back.max_times is 2"):
        run_loop(context, trainer, settings())
    rows = read_metrics(tmp_path / "alarms.jsonl")
    assert [(row["step"], row["num_roll_backs"], row["rolled_back_to"]) for row in rows] == [
        (5, 0, 3),
        (5, 1, 3),
        (5, 2, None),
    ]


def test_an_early_alarm_goes_back_to_the_start(tmp_path: Path) -> None:
    context = scripted_context(tmp_path)
    trainer = build(context, "start")
    assert run_loop(context, trainer, settings()).num_roll_backs == 1
    assert trainer.knobs.since_step == 0
    (row,) = read_metrics(tmp_path / "alarms.jsonl")
    assert row["rolled_back_to"] == 0


def test_the_start_is_saved_only_where_it_may_be_needed(tmp_path: Path) -> None:
    for name, sentinels in (("roll_back", SENTINELS), ("warn", SentinelsConfig())):
        context = scripted_context(tmp_path / name)
        with pytest.raises(Killed):
            run_loop(context, ScriptedTrainer(context, kill_at_call=1), settings(sentinels=sentinels))
        assert context.checkpoints().is_empty() == (name == "warn")


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    context = scripted_context(tmp_path)

    def damage_then_alarm(step: int, knobs: KnobChanges) -> dict[str, float]:
        if step != 8 or knobs.num_roll_backs:
            return {}
        (context.directory.checkpoints_path / "step_000006" / "state.json").write_text("{}")
        return {"policy/grad_norm": 50.0}

    trainer = ScriptedTrainer(context, damage_then_alarm)
    assert run_loop(context, trainer, settings(keep_last=2)).num_roll_backs == 1
    assert trainer.knobs.since_step == 3


def test_a_resume_from_before_a_roll_back_forgets_it(tmp_path: Path) -> None:
    """The checkpoint that holds a roll-back is damaged: what came of it is done, and written, once more."""

    def warned(step: int, knobs: KnobChanges) -> dict[str, float]:
        return {"rollout/truncated_fraction": 0.9} if step == 7 else {}

    ends = []
    for name, kill_at_call in (("whole", 0), ("damaged", 11)):
        path = tmp_path / name
        context = scripted_context(path)
        if kill_at_call:  # At step 9 after the roll-back from 8 to 6.
            trainer = ScriptedTrainer(context, warned, diverges=diverging, kill_at_call=kill_at_call)
            with pytest.raises(Killed):
                run_loop(context, trainer, settings(keep_last=2))
            assert [row["num_roll_backs"] for row in read_metrics(path / "alarms.jsonl")] == [0, 1]
            (context.directory.checkpoints_path / "step_000006" / "state.json").write_text("{}")
        trainer = ScriptedTrainer(context, warned, diverges=diverging)
        ends.append(end_of(path, trainer, run_loop(context, trainer, settings(keep_last=2))))
    assert ends[0] == ends[1]


def test_without_a_checkpoint_to_go_back_to(tmp_path: Path) -> None:
    context = scripted_context(tmp_path)

    def remove_then_alarm(step: int, knobs: KnobChanges) -> dict[str, float]:
        shutil.rmtree(context.directory.checkpoints_path)
        return {"policy/grad_norm": 50.0}

    with pytest.raises(ArtifactError, match="no longer holds a checkpoint"):
        run_loop(context, ScriptedTrainer(context, remove_then_alarm), settings())


def test_a_window_starts_anew_after_a_roll_back(tmp_path: Path) -> None:
    """A stalled reward is given as many steps again; else the rows before would raise the alarm at once."""
    config = SentinelsConfig.model_validate({"reward_stalled": {"action": "roll_back", "window_steps": 4}})

    def flat(step: int, knobs: KnobChanges) -> dict[str, float]:
        return {"reward/mean": 0.5}

    context = scripted_context(tmp_path)
    with pytest.raises(TrainingDivergedError):
        run_loop(context, ScriptedTrainer(context, flat), settings(sentinels=config))
    # At 5 first (4 after 1), to 3; then 4 steps after 3, to 6; then 4 steps after 6.
    assert [row["step"] for row in read_metrics(tmp_path / "alarms.jsonl")] == [5, 7, 10]


def test_the_best_checkpoint_is_still_the_best_after_going_back_to_it(tmp_path: Path) -> None:
    def best_at_three(step: int, knobs: KnobChanges) -> dict[str, float]:
        return {**troubled(step, knobs), "test/score": 1.0 if step == 3 else 0.1}

    context = scripted_context(tmp_path)
    keeping = settings(keep_best_checkpoints=1, best_metric="test/score")
    report = run_loop(context, ScriptedTrainer(context, best_at_three), keeping)
    assert report == LoopReport(NUM_STEPS, best_step=3, num_roll_backs=2)


def test_changes_compound() -> None:
    config = RollBackConfig(max_times=3, learning_rate_factor=0.1, kl_coefficient_factor=3.0)
    changes = next_changes(config, 2, 40)
    assert (changes.num_roll_backs, changes.since_step) == (3, 40)
    assert changes.learning_rate_factor == pytest.approx(1e-3)
    assert changes.kl_coefficient_factor == 27.0
