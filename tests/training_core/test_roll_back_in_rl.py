"""Roll-backs in real policy training: to the last good checkpoint, with other knobs, the same bits after any kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tasks import build_small_checkpoint, reward, small_config

from training_core.errors import EXIT_DIVERGED, TrainingDivergedError
from training_core.loop import _Loop
from training_core.metrics import read_metrics
from training_core.rl.trainer import PolicyTrainer
from training_core.rl.update import PolicyUpdater

BROKEN_STEP, GOOD_STEP, NUM_STEPS = 4, 2, 6
FILES = ("metrics.jsonl", "samples.jsonl", "alarms.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_checkpoint(tmp_path_factory.mktemp("small"))


def test_a_spent_budget_rolls_back_and_half_the_rate_stays_within(model: Path, rl_stage: Any, tmp_path: Path) -> None:
    """Nothing injected: a learning rate that is too high for the budget, and one that is not."""
    config = small_config(
        rl_stage,
        num_steps=4,
        optimizer={"learning_rate": 0.03},
        kl={"placement": "loss", "coefficient": 0.05},
        checkpoint_every_steps=3,
        sentinels={"kl_budget": {"limit_nats_per_token": 1.2, "action": "roll_back"}},
    )
    assert rl_stage.run(tmp_path, model, config)["num_roll_backs"] == 1
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert {row["train/learning_rate"] for row in rows} == {0.015}
    assert {row["kl/coefficient"] for row in rows} == {0.1}
    assert max(row["kl/policy_ref_nats"] for row in rows) < 1.2
    (alarm,) = [row for row in read_metrics(tmp_path / "alarms.jsonl") if row["name"] == "kl_budget"]
    assert (alarm["step"], alarm["rolled_back_to"], alarm["limit"]) == (3, 0, 1.2)
    assert alarm["value"] > 1.2


def test_roll_backs_end_when_they_do_not_help(model: Path, rl_stage: Any, tmp_path: Path) -> None:
    """Equal scores stay equal at any learning rate: two roll-backs, then the stage stops."""
    zero = {"zero_variance_groups": {"action": "roll_back", "patience_steps": 1}}
    config = small_config(rl_stage, reward("equal"), num_steps=3, sentinels=zero)
    with pytest.raises(TrainingDivergedError, match=r"rolled back 2 time\(s\) already") as caught:
        rl_stage.run(tmp_path, model, config)
    assert caught.value.exit_code == EXIT_DIVERGED
    assert [row["rolled_back_to"] for row in read_metrics(tmp_path / "alarms.jsonl")] == [0, 0, None]


def break_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loss of the second micro-batch of step 4 NaN, unless training was rolled back before.

    The first one is fine: its gradient is there when the second breaks, and must not outlive the roll-back.
    """
    update, loss = PolicyUpdater.optimizer_update, PolicyUpdater.micro_loss
    num_losses = {"of the update": 0}

    def of_step(self: Any, step: int, *arguments: Any) -> Any:
        num_losses["of the update"] = 0
        self.is_broken = step == BROKEN_STEP and self.optimizer.learning_rate_factor == 1.0
        return update(self, step, *arguments)

    def broken(self: Any, *arguments: Any) -> torch.Tensor:
        found = loss(self, *arguments)
        num_losses["of the update"] += 1
        return found * torch.nan if self.is_broken and num_losses["of the update"] == 2 else found

    monkeypatch.setattr(PolicyUpdater, "optimizer_update", of_step)
    monkeypatch.setattr(PolicyUpdater, "micro_loss", broken)


SHAPES: dict[str, dict[str, Any]] = {
    "critic": {"name": "ppo", "critic": {"initialise_from": "policy", "optimizer": {"learning_rate": 1e-3}}},
    "replay": {"name": "grpo", "replay": {"capacity_groups": 4, "groups_per_step": 1}},
}


def broken_config(rl_stage: Any, action: str, shape: str = "critic") -> dict[str, Any]:
    """Return a run with what a roll-back changes or puts back: coefficient, reward statistics, critic or replay."""
    return small_config(
        rl_stage,
        reward("low_ids", scale={"kind": "running"}),
        **SHAPES[shape],
        kl={"placement": "reward", "coefficient": 0.05},
        micro_batch_size=8,
        checkpoint_every_steps=2,
        samples_every_steps=2,
        num_steps=NUM_STEPS,
        sentinels={"non_finite": {"action": action}},
    )


def test_a_loss_that_is_not_finite_stops_by_default(
    model: Path, rl_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_a_loss(monkeypatch)
    with pytest.raises(TrainingDivergedError, match="step 4: the loss is nan") as caught:
        rl_stage.run(tmp_path, model, broken_config(rl_stage, "stop"))
    assert caught.value.exit_code == EXIT_DIVERGED
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def copy_at(
    monkeypatch: pytest.MonkeyPatch, path: Path, to: Path, owner: type, method: str, names: dict[int, str]
) -> None:
    """Copy directory `path` after some calls of a method, before what follows: what a SIGKILL there would leave.

    Args:
        names: number of the call that ended -> name of the copy.
    """
    original: Callable[..., Any] = getattr(owner, method)
    ended: list[None] = []

    def copying(self: Any, *arguments: Any, **keywords: Any) -> Any:
        found = original(self, *arguments, **keywords)
        ended.append(None)
        if len(ended) in names:
            shutil.copytree(path, to / names[len(ended)])
        return found

    monkeypatch.setattr(owner, method, copying)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_it_goes_on_from_the_last_good_checkpoint_and_to_the_same_bits_from_anywhere(
    model: Path, rl_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    break_a_loss(monkeypatch)
    whole, kills = tmp_path / "whole", tmp_path / "kills"
    config = broken_config(rl_stage, "roll_back", shape)
    with monkeypatch.context() as patch:
        # The steps that end: 1 2 3 | 3 4 5 6; the 4th's first try breaks.
        copy_at(patch, whole, kills, PolicyTrainer, "train_step", {3: "before", 4: "first step after", 7: "at the end"})
        copy_at(patch, whole, kills, _Loop, "log_new", {4: "alarm raised", 6: "two steps after"})
        copy_at(patch, whole, kills, PolicyTrainer, "load", {1: "gone back"})
        copy_at(patch, whole, kills, PolicyTrainer, "change_knobs", {2: "knobs changed"})
        # Saved: the start, step 2, step 2 with the changes.
        copy_at(patch, whole, kills, PolicyTrainer, "save", {3: "while the changes are saved"})
        summary = rl_stage.run(whole, model, config)
    check_the_whole_run(whole, summary)
    assert len(list(kills.iterdir())) == 8
    for killed in kills.iterdir():
        assert not (killed / "outputs" / "policy").exists()
        assert rl_stage.run(killed, model, config) == summary, killed.name
        for name in FILES:
            assert (killed / name).read_bytes() == (whole / name).read_bytes(), (killed.name, name)


def check_the_whole_run(whole: Path, summary: dict[str, Any]) -> None:
    """Check what alarms, metrics and state say of the roll-back."""
    assert summary["num_roll_backs"] == 1
    rows, alarms = read_metrics(whole / "metrics.jsonl"), read_metrics(whole / "alarms.jsonl")
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert [row["train/learning_rate"] for row in rows] == [0.01] * GOOD_STEP + [0.005] * 4
    assert [row["kl/coefficient"] for row in rows] == [0.05] * GOOD_STEP + [0.1] * 4
    found = [(row["step"], row["action"], row["rolled_back_to"]) for row in alarms if row["name"] == "non_finite"]
    assert found == [(BROKEN_STEP, "roll_back", GOOD_STEP)]
    for step in (GOOD_STEP + 2, NUM_STEPS):
        state = json.loads((whole / "checkpoints" / f"step_{step:06d}" / "state.json").read_text())
        assert state["knobs"] == {
            "num_roll_backs": 1,
            "since_step": GOOD_STEP,
            "learning_rate_factor": 0.5,
            "kl_coefficient_factor": 2.0,
        }
