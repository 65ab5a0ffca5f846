"""Every sentinel provoked in real policy training: a model that samples, rewards that score, updates that go wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from small_tasks import build_small_checkpoint, end_with_high_ids, reward, small_config

from training_core.errors import EXIT_DIVERGED, EvaluationError, TrainingDivergedError, WeightVersionError
from training_core.metrics import read_metrics
from training_core.rollout.transformers import TransformersEngine
from training_core.sentinels import CHECKS

IN_LOSS = {"placement": "loss", "coefficient": 0.01}


@dataclass(frozen=True)
class Provocation:
    """A run that a sentinel must not let pass."""

    sentinel: str
    config: dict[str, Any]
    rewards: tuple[dict[str, Any], ...] = ()
    knobs: dict[str, Any] = field(default_factory=dict)
    """Of the sentinel, where its defaults wait longer than a test should."""
    ends_itself: bool = False
    """Whether the model's answers have ends of their own."""


def rate(learning_rate: float) -> dict[str, Any]:
    return {"learning_rate": learning_rate}


PROVOCATIONS = [
    Provocation("grad_norm", {"optimizer": rate(1.0), "num_steps": 3}),
    Provocation(
        "reward_stalled", {"optimizer": rate(0.0), "num_steps": 4}, (reward("equal"),), knobs={"window_steps": 2}
    ),
    Provocation(
        "kl_budget",
        {"optimizer": rate(0.03), "num_steps": 3, "kl": {"placement": "none", "measure": True}},
        knobs={"limit_nats_per_token": 0.5},
    ),
    Provocation("entropy_floor", {"optimizer": rate(1.0), "num_steps": 5, "kl": IN_LOSS}),
    Provocation(
        "entropy_ceiling", {"num_steps": 3, "optimizer": rate(0.0)}, knobs={"limit_nats": 5.5, "patience_steps": 2}
    ),
    Provocation("clip_fraction", {"optimizer": rate(0.03), "num_epochs": 2, "num_minibatches": 2, "num_steps": 5}),
    Provocation("zero_variance_groups", {"num_steps": 3}, (reward("equal"),)),
    Provocation("truncation", {"num_steps": 3, "max_new_tokens": 2}),
    Provocation(
        "length_drift",
        {"optimizer": rate(0.02), "num_steps": 7, "max_new_tokens": 24},
        (reward("number_of_tokens"),),
        knobs={"num_first_steps": 1, "patience_steps": 2},
        ends_itself=True,
    ),
    Provocation("reward_errors", {"num_steps": 2}, (reward("every_other"),)),
    Provocation("sampler_mismatch", {"num_steps": 1}),
    Provocation(
        "proxy_up_gold_down",
        {"num_steps": 8},
        (reward("low_ids"), reward("high_ids", weight=0.0)),
        knobs={"gold": "high_ids", "window_steps": 6},
    ),
]
BY_NAME = {provocation.sentinel: provocation for provocation in PROVOCATIONS}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Ends its answers itself -> a model."""
    path = tmp_path_factory.mktemp("small")
    return {False: build_small_checkpoint(path / "a"), True: end_with_high_ids(build_small_checkpoint(path / "b"))}


@pytest.fixture(autouse=True)
def _engine_of_sampler_mismatch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For that sentinel, let the engine report half the probabilities that it samples with."""
    if "sampler_mismatch" not in request.node.name:
        return
    original = TransformersEngine.generate

    def other(self: Any, *arguments: Any, **keywords: Any) -> Any:
        found = original(self, *arguments, **keywords)
        return [replace(r, logprobs=tuple(value - 0.7 for value in r.logprobs)) for r in found]

    monkeypatch.setattr(TransformersEngine, "generate", other)


def config_of(rl_stage: Any, provocation: Provocation, action: str | None, **others: Any) -> dict[str, Any]:
    knobs = {**provocation.knobs, **({"action": action} if action else {})}
    sentinels = {provocation.sentinel: knobs}
    return small_config(rl_stage, *provocation.rewards, **{**provocation.config, "sentinels": sentinels, **others})


def alarms_of(path: Path) -> list[dict[str, Any]]:
    return read_metrics(path / "alarms.jsonl") if (path / "alarms.jsonl").exists() else []


def test_every_sentinel_is_provoked() -> None:
    assert set(BY_NAME) == set(CHECKS)
    assert len(BY_NAME) == len(PROVOCATIONS)


def test_a_healthy_run_raises_no_alarm(models: dict[bool, Path], rl_stage: Any, tmp_path: Path) -> None:
    """Sentinels as they come, those that need a limit or a name with one."""
    sentinels = {"kl_budget": {"limit_nats_per_token": 1.0}, "proxy_up_gold_down": {"gold": "low_ids"}}
    config = small_config(
        rl_stage, num_steps=4, optimizer=rate(1e-3), kl=IN_LOSS, max_new_tokens=16, sentinels=sentinels
    )
    rl_stage.run(tmp_path, models[True], config)
    assert alarms_of(tmp_path) == []


@pytest.mark.parametrize("name", list(BY_NAME))
def test_a_warning_is_written_and_training_ends_as_planned(
    models: dict[bool, Path], rl_stage: Any, tmp_path: Path, name: str
) -> None:
    provocation = BY_NAME[name]
    config = config_of(rl_stage, provocation, "warn")
    rl_stage.run(tmp_path, models[provocation.ends_itself], config)
    alarms = [row for row in alarms_of(tmp_path) if row["name"] == name]
    assert alarms
    assert {(row["action"], row["num_roll_backs"], row["rolled_back_to"]) for row in alarms} == {("warn", 0, None)}
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == provocation.config["num_steps"]
    assert (tmp_path / "outputs" / "policy" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["kl_budget", "reward_stalled", "reward_errors", "truncation"])
def test_a_stop_ends_the_stage_with_exit_code_5(
    models: dict[bool, Path], rl_stage: Any, tmp_path: Path, name: str
) -> None:
    action = None if name == "kl_budget" else "stop"  # Its default.
    with pytest.raises(TrainingDivergedError, match=f"sentinel {name}") as caught:
        rl_stage.run(tmp_path, models[False], config_of(rl_stage, BY_NAME[name], action))
    assert caught.value.exit_code == EXIT_DIVERGED == 5
    assert (name, "stop") in [(row["name"], row["action"]) for row in alarms_of(tmp_path)]
    assert not (tmp_path / "outputs" / "policy").exists()


def test_a_budget_sees_a_policy_whose_answers_all_score_the_same(
    models: dict[bool, Path], rl_stage: Any, tmp_path: Path
) -> None:
    """It gives no gradient any more, so nothing but the budget asks for the forward passes that measure it."""
    config = small_config(
        rl_stage,
        optimizer=rate(0.1),
        num_steps=4,
        kl={"placement": "none", "measure": True},
        sentinels={"kl_budget": {"limit_nats_per_token": 1.0}},
    )
    with pytest.raises(TrainingDivergedError, match=r"sentinel kl_budget"):
        rl_stage.run(tmp_path, models[False], config)
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["kl/policy_ref_nats"] > 1.0
    assert (last["rollout/zero_variance_group_fraction"], last["train/num_updates"]) == (1.0, 0)


def test_a_sampler_mismatch_stops_before_anything_is_learned(
    models: dict[bool, Path], rl_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default; the check comes before the update, so that no weight has changed."""
    monkeypatch.setattr("training_core.engines.single.SingleProcessEngine.step", None)
    with pytest.raises(WeightVersionError, match=r"sentinels\.sampler_mismatch\.limit_nats = 0.1") as caught:
        rl_stage.run(tmp_path, models[False], config_of(rl_stage, BY_NAME["sampler_mismatch"], None))
    assert caught.value.exit_code == EXIT_DIVERGED


def test_a_reward_that_raises_ends_the_stage_with_its_name(
    models: dict[bool, Path], rl_stage: Any, tmp_path: Path
) -> None:
    with pytest.raises(EvaluationError, match=r"small_tasks:failing raised KeyError\('reference'\)"):
        rl_stage.run(tmp_path, models[False], small_config(rl_stage, reward("failing"), num_steps=2))


def test_a_stage_process_returns_5(models: dict[bool, Path], rl_stage: Any, tmp_path: Path) -> None:
    never = {"kind": "regex", "pattern": "(?!)"}
    sentinels = {"zero_variance_groups": {"action": "stop", "patience_steps": 1}}
    config = small_config(rl_stage, never, num_steps=2, sentinels=sentinels)
    spec = rl_stage.context(tmp_path, models[False], config).directory.spec_path
    done = subprocess.run([sys.executable, "-m", "training_core", str(spec)], capture_output=True, text=True)
    assert done.returncode == 5, done.stderr[-2000:]
    error = json.loads((tmp_path / "error.json").read_text())
    assert error["type"] == "TrainingDivergedError"
    assert "sentinels.zero_variance_groups" in error["message"]
    assert [row["name"] for row in alarms_of(tmp_path)] == ["zero_variance_groups"]
