"""Held-out scores and the self-test of a reward model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from training_core.errors import EvaluationError
from training_core.models.heads import RewardModel, new_reward_model
from training_core.reward_modelling.validation import PairScores, check_batch_invariance, mean_and_std

SEQUENCES = [[5, 6, 7, 2], [8, 2], [9, 10, 11, 12, 13, 14, 2]]


def test_ties_count_half_and_loss_is_bradley_terry() -> None:
    scores = PairScores(chosen=[2.0, 1.0, 0.0], rejected=[1.0, 1.0, 1.0])
    assert scores.accuracy == 0.5
    expected = -sum(torch.nn.functional.logsigmoid(torch.tensor([1.0, 0.0, -1.0])).tolist()) / 3
    assert scores.loss == pytest.approx(expected)


def test_equal_scores_have_no_scale() -> None:
    with pytest.raises(EvaluationError, match="tells no answers apart"):
        mean_and_std([0.5, 0.5, 0.5, 0.5])


def test_the_self_test_notices_a_model_that_ignores_the_mask(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_reward_model(tiny_checkpoint, seed=0)
    with torch.no_grad():
        model.head.weight.mul_(129.0)
    assert check_batch_invariance(model, SEQUENCES, 3)["max_difference_padded_left"] < 1e-4
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, ids, mask: forward(self, ids, torch.ones_like(mask)))
    with pytest.raises(EvaluationError, match="scores depend on the batch"):
        check_batch_invariance(model, SEQUENCES, 3)


@pytest.mark.parametrize(
    ("dtype", "difference", "accepted"),
    [("bfloat16", 0.2, True), ("bfloat16", 0.4, False), ("float32", 0.0005, True), ("float32", 0.01, False)],
)
def test_the_self_test_allows_each_dtype_its_rounding(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, difference: float, accepted: bool
) -> None:
    model = new_reward_model(tiny_checkpoint, seed=0)
    model.backbone.to(getattr(torch, dtype))
    forward = RewardModel.forward

    def shifted(self: RewardModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return forward(self, ids, mask) + difference * (len(ids) > 1)

    monkeypatch.setattr(RewardModel, "forward", shifted)
    if accepted:
        report = check_batch_invariance(model, SEQUENCES, 3, unit=1.0)
        assert report["max_difference_padded_right"] == pytest.approx(difference, abs=difference / 5)
    else:
        with pytest.raises(EvaluationError, match="scores depend on the batch"):
            check_batch_invariance(model, SEQUENCES, 3, unit=1.0)
