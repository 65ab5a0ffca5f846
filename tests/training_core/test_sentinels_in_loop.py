"""Every sentinel, provoked in the real loop by a trainer whose metrics go wrong: each action, and silence."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scripted_trainer import HEALTHY, Script, ScriptedTrainer, healthy, scripted_context

from training_core.config.sentinels import SentinelsConfig
from training_core.errors import ConfigurationError, TrainingDivergedError
from training_core.loop import LoopReport, LoopSettings, run_loop
from training_core.metrics import read_metrics
from training_core.sentinels import CHECKS

NUM_STEPS = 8


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@dataclass(frozen=True)
class Provocation:
    """How to make one sentinel alarm at step `alarm_step` and at none before."""

    sentinel: str
    knobs: Mapping[str, Any]
    metrics: Mapping[str, float]
    """From step `from_step` on."""
    alarm_step: int
    from_step: int = 4
    slope: Mapping[str, float] | None = None
    """Metrics that change by so much a step, from step 1."""

    def script(self) -> Script:
        def metrics(step: int, knobs: Any) -> dict[str, float]:
            if knobs.num_roll_backs:
                return {}
            sloped = {name: 0.5 + slope * step for name, slope in (self.slope or {}).items()}
            return {**sloped, **(self.metrics if step >= self.from_step else {})}

        return metrics


PROVOCATIONS = [
    Provocation("grad_norm", {}, {"policy/grad_norm": 10.5}, 4),
    Provocation("reward_stalled", {"window_steps": 2}, {"reward/mean": 0.2}, 5),
    Provocation("kl_budget", {"limit_nats_per_token": 0.1}, {"kl/policy_ref_nats": 0.2}, 4),
    Provocation("kl_budget", {"limit_nats_per_answer": 2.0}, {"kl/policy_ref_answer_nats": 2.5}, 4),
    Provocation("entropy_floor", {}, {"policy/entropy_nats": 0.01}, 6),
    Provocation("entropy_ceiling", {}, {"policy/entropy_nats": 6.5}, 6),
    Provocation("clip_fraction", {"patience_steps": 2}, {"policy/clip_fraction": 0.4}, 5),
    Provocation("zero_variance_groups", {}, {"rollout/zero_variance_group_fraction": 1.0}, 6),
    Provocation("truncation", {}, {"rollout/truncated_fraction": 0.6}, 6),
    Provocation("length_drift", {"num_first_steps": 3}, {"rollout/length_mean_tokens": 41.0}, 6),
    Provocation("length_drift", {"num_first_steps": 3, "limit_ratio": 3.0}, {"rollout/length_mean_tokens": 6.0}, 6),
    Provocation("reward_errors", {}, {"reward/missing_fraction": 0.25}, 4),
    Provocation("reward_errors", {}, {"reward/error_fraction": 0.25}, 4),
    Provocation("sampler_mismatch", {}, {"rollout/sampler_trainer_kl_nats": 0.2}, 4),
    Provocation(
        "proxy_up_gold_down", {"gold": "fluent", "window_steps": 5}, {}, 5, slope={"reward/fluent_mean": -0.01}
    ),
]
IDS = [f"{number}-{provocation.sentinel}" for number, provocation in enumerate(PROVOCATIONS)]
provoked = pytest.mark.parametrize("provocation", PROVOCATIONS, ids=IDS)


def run(path: Path, provocation: Provocation, action: str | None, **others: Any) -> tuple[LoopReport, ScriptedTrainer]:
    knobs = dict(provocation.knobs) | ({"action": action} if action else {})
    sentinels = SentinelsConfig.model_validate({provocation.sentinel: knobs, **others})
    settings = LoopSettings(NUM_STEPS, 3, 2, "test", sentinels=sentinels)
    context = scripted_context(path)
    trainer = ScriptedTrainer(context, provocation.script())
    return run_loop(context, trainer, settings), trainer


def alarms_of(path: Path) -> list[tuple[str, str, int]]:
    return [(row["name"], row["action"], row["step"]) for row in read_metrics(path / "alarms.jsonl")]


def test_every_sentinel_is_provoked() -> None:
    assert {provocation.sentinel for provocation in PROVOCATIONS} == set(CHECKS)
    assert set(CHECKS) | {"non_finite", "roll_back"} == set(SentinelsConfig.model_fields)


def test_a_healthy_run_raises_no_alarm(tmp_path: Path) -> None:
    report, _ = run(tmp_path, Provocation("grad_norm", {}, {}, 0), None, proxy_up_gold_down={"gold": "fluent"})
    assert report == LoopReport(NUM_STEPS, None, 0)
    assert not (tmp_path / "alarms.jsonl").exists()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, NUM_STEPS + 1))


@provoked
def test_a_warning_is_written_and_the_run_goes_on(
    tmp_path: Path, provocation: Provocation, caplog: pytest.LogCaptureFixture
) -> None:
    report, _ = run(tmp_path, provocation, "warn")
    assert report.steps == NUM_STEPS
    name = provocation.sentinel
    assert alarms_of(tmp_path) == [(name, "warn", step) for step in range(provocation.alarm_step, NUM_STEPS + 1)]
    row = read_metrics(tmp_path / "alarms.jsonl")[0]
    assert set(row) == {"name", "action", "step", "message", "value", "limit", "num_roll_backs", "rolled_back_to"}
    assert math.isfinite(row["value"])
    assert (row["num_roll_backs"], row["rolled_back_to"]) == (0, None)
    # In the log once, not at every step.
    assert [record.message.split(":")[0] for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"step {provocation.alarm_step}, sentinel {name} (warn)"
    ]


@provoked
def test_a_stop_ends_the_stage_before_the_step_is_saved(tmp_path: Path, provocation: Provocation) -> None:
    for _ in range(2):  # The second time from the checkpoint: the same end.
        with pytest.raises(TrainingDivergedError) as caught:
            run(tmp_path, provocation, "stop")
        message = str(caught.value)
        assert caught.value.exit_code == 5
        assert f"step {provocation.alarm_step}, sentinel {provocation.sentinel}:" in message
        for part in (str(tmp_path / "alarms.jsonl"), f"sentinels.{provocation.sentinel}", "up to step 3 are kept"):
            assert part in message
        assert alarms_of(tmp_path) == [(provocation.sentinel, "stop", provocation.alarm_step)]
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]
        assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == provocation.alarm_step


@provoked
def test_a_roll_back_continues_with_changed_knobs(tmp_path: Path, provocation: Provocation) -> None:
    report, trainer = run(tmp_path, provocation, "roll_back")
    assert report == LoopReport(NUM_STEPS, None, 1)
    assert trainer.knobs.model_dump() == {
        "num_roll_backs": 1,
        "since_step": 3,
        "learning_rate_factor": 0.5,
        "kl_coefficient_factor": 2.0,
    }
    (row,) = read_metrics(tmp_path / "alarms.jsonl")
    assert (row["step"], row["action"], row["rolled_back_to"]) == (provocation.alarm_step, "roll_back", 3)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, NUM_STEPS + 1))
    assert trainer.num_calls == NUM_STEPS + provocation.alarm_step - 3


@provoked
def test_off_is_not_watched(tmp_path: Path, provocation: Provocation) -> None:
    report, _ = run(tmp_path, provocation, "off")
    assert report.steps == NUM_STEPS
    assert not (tmp_path / "alarms.jsonl").exists()


DEFAULT_ACTIONS = {"kl_budget": "stop", "sampler_mismatch": "stop"}


@provoked
def test_the_default_action(tmp_path: Path, provocation: Provocation) -> None:
    if DEFAULT_ACTIONS.get(provocation.sentinel, "warn") == "stop":
        with pytest.raises(TrainingDivergedError):
            run(tmp_path, provocation, None)
    else:
        assert run(tmp_path, provocation, None)[0].steps == NUM_STEPS
    assert alarms_of(tmp_path)[0][0] == provocation.sentinel


def test_a_metric_that_is_not_reported_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    context = scripted_context(tmp_path)
    trainer = ScriptedTrainer(context)

    def without_policy(step: int) -> Any:
        record = ScriptedTrainer.train_step(trainer, step)
        for name in [name for name in record.metrics if name.startswith("policy/")]:
            del record.metrics[name]
        return record

    trainer.train_step = without_policy  # type: ignore[method-assign]
    run_loop(context, trainer, LoopSettings(NUM_STEPS, 3, 2, "test", sentinels=SentinelsConfig()))
    said = [record.message for record in caplog.records if "is silent until" in record.message]
    assert said == [
        "sentinel grad_norm is silent until policy/grad_norm is reported",
        "sentinel entropy_floor is silent until policy/entropy_nats is reported",
        "sentinel entropy_ceiling is silent until policy/entropy_nats is reported",
        "sentinel clip_fraction is silent until policy/clip_fraction is reported",
    ]


@pytest.mark.parametrize("metric", ["policy/grad_norm", "test/other"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("action", ["stop", "roll_back"])
def test_a_metric_that_is_no_number(tmp_path: Path, metric: str, value: float, action: str) -> None:
    provocation = Provocation("non_finite", {}, {metric: value}, 5, from_step=5)
    if action == "stop":
        with pytest.raises(TrainingDivergedError, match=f"step 5, sentinel non_finite: metric {metric} is {value}"):
            run(tmp_path, provocation, None)
        assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 4
    else:
        assert run(tmp_path, provocation, action)[0] == LoopReport(NUM_STEPS, None, 1)
    assert alarms_of(tmp_path) == [("non_finite", action, 5)]


def test_a_gradient_that_is_no_number_stops_with_the_trainers_words(tmp_path: Path) -> None:
    for sentinels in (None, SentinelsConfig()):
        context = scripted_context(tmp_path / str(sentinels is None))
        trainer = ScriptedTrainer(context, diverges=lambda step, knobs: step == 5)
        with pytest.raises(TrainingDivergedError, match="step 5: the gradient is nan"):
            run_loop(context, trainer, LoopSettings(NUM_STEPS, 3, 2, "test", sentinels=sentinels))
        found = context.checkpoints().latest()
        assert found is not None
        assert found.step == 3
    assert alarms_of(tmp_path / "False") == [("non_finite", "stop", 5)]


def test_stop_goes_before_roll_back_and_both_are_written(tmp_path: Path) -> None:
    provocation = Provocation("grad_norm", {}, {"policy/grad_norm": 99.0, "reward/missing_fraction": 0.5}, 4)
    with pytest.raises(TrainingDivergedError, match="step 4, sentinel reward_errors") as caught:
        run(tmp_path, provocation, "roll_back", reward_errors={"action": "stop"})
    assert "grad_norm" not in str(caught.value)
    assert alarms_of(tmp_path) == [("grad_norm", "roll_back", 4), ("reward_errors", "stop", 4)]


def test_a_trainer_without_knobs_cannot_be_rolled_back(tmp_path: Path) -> None:
    class Rigid:
        def __init__(self, trainer: ScriptedTrainer) -> None:
            self.train_step, self.save, self.load = trainer.train_step, trainer.save, trainer.load

    context = scripted_context(tmp_path)
    rigid = Rigid(ScriptedTrainer(context, healthy))
    sentinels = SentinelsConfig.model_validate({"truncation": {"action": "roll_back"}})
    with pytest.raises(ConfigurationError, match="Rigid has no knobs"):
        run_loop(context, rigid, LoopSettings(NUM_STEPS, 3, 2, "test", sentinels=sentinels))
    assert run_loop(context, rigid, LoopSettings(NUM_STEPS, 3, 2, "test", sentinels=SentinelsConfig())).steps == 8


def test_the_healthy_metrics_are_all_that_is_read() -> None:
    from training_core.sentinels.watch import metrics_read

    config = SentinelsConfig.model_validate(
        {
            "kl_budget": {"limit_nats_per_token": 1.0, "limit_nats_per_answer": 1.0},
            "proxy_up_gold_down": {"gold": "fluent"},
        }
    )
    read = {metric for name in CHECKS for metric in metrics_read(config, name)}
    assert read == {*HEALTHY, "reward/mean"}
