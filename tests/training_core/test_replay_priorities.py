"""Replay in whole runs: which groups are kept, and whose priorities change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tasks import build_small_checkpoint, reward, small_config

from training_core.metrics import read_metrics
from training_core.rl.replay import REPLAY_FILE, Drawn, KeptGroup, ReplayBuffer
from training_core.rl.update import PolicyUpdater

REPLAY = {"capacity_groups": 16, "groups_per_step": 2, "max_staleness_steps": 2, "sampling": {"kind": "prioritised"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize(("rewards", "mask_truncated"), [("equal", False), ("low_ids", True)])
def test_groups_that_teach_nothing_are_not_kept(
    model: Path, rl_stage: Any, tmp_path: Path, rewards: str, mask_truncated: bool
) -> None:
    """Equal scores, whose advantages are 0, and answers that are all cut and left out."""
    config = small_config(rl_stage, reward(rewards), replay=REPLAY, num_steps=2, mask_truncated=mask_truncated)
    rl_stage.run(tmp_path, model, config)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["rollout/truncated_fraction"] for row in rows] == [1.0] * 2
    assert [row["replay/num_kept_groups"] for row in rows] == [0] * 2
    assert json.loads((tmp_path / "checkpoints" / "step_000002" / REPLAY_FILE).read_text())["groups"] == []


def test_a_drawn_groups_priority_is_that_of_its_latest_advantages(
    model: Path, rl_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With advantages over the standard deviation of the whole step's, what a group is worth changes."""
    draws: list[tuple[Drawn, list[KeptGroup]]] = []
    steps: list[tuple[Any, torch.Tensor]] = []
    draw, update = ReplayBuffer.draw, PolicyUpdater.update

    def spy_draw(self: ReplayBuffer, step: int, seed: int) -> Drawn:
        drawn = draw(self, step, seed)
        draws.append((drawn, list(self.groups)))
        return drawn

    def spy_update(self: PolicyUpdater, step: int, scored: Any, coefficient: float) -> Any:
        metrics, advantages = update(self, step, scored, coefficient)
        steps.append((scored, advantages))
        return metrics, advantages

    monkeypatch.setattr(ReplayBuffer, "draw", spy_draw)
    monkeypatch.setattr(PolicyUpdater, "update", spy_update)
    config = small_config(rl_stage, replay=REPLAY, name="reinforce_plus_plus", num_steps=3)
    rl_stage.run(tmp_path, model, config)
    changed = 0
    for (drawn, before), (_, after), (scored, advantages) in zip(draws[:-1], draws[1:], steps[:-1], strict=True):
        for position, place in enumerate(drawn.places):
            rows = scored.group_ids == 4 + position
            expected = advantages[rows][scored.batch.mask[rows]].double().abs().mean()
            assert after[place].answers == before[place].answers
            assert after[place].priority == pytest.approx(float(expected), rel=1e-6)
            changed += after[place].priority != pytest.approx(before[place].priority, rel=1e-3)
        others = set(range(len(before))) - set(drawn.places)
        assert all(after[place] == before[place] for place in others)
        assert len(after) == len(before) + 4
    assert changed
