"""Policy loss, aggregation, masks: invariance to how rows are cut, and NaN behind the mask."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from training_core.ops.aggregation import (
    constant_weights,
    sequence_mean_token_mean_weights,
    sequence_mean_token_sum_weights,
    token_mean_weights,
    weighted_sum,
)
from training_core.ops.masking import lengths_to_mask, masked_sum
from training_core.ops.policy_losses import clipped_surrogate
from training_core.ops.shaping import soft_overlong_penalty
from training_core.registries import AGGREGATIONS, KL_LOSSES, POLICY_LOSSES

KNOBS = {"constant": {"num_tokens": 7}}
NUM_ROWS, NUM_COLUMNS = 6, 5


class Example:
    """Six answers of different lengths, one of them without a token; masked positions hold NaN."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.mask = lengths_to_mask(torch.tensor([5, 2, 4, 0, 1, 3]), NUM_COLUMNS)
        holes = torch.where(self.mask, 0.0, math.nan)
        self.parameter = random(NUM_ROWS, NUM_COLUMNS)
        self.old = self.parameter + 0.3 * random(NUM_ROWS, NUM_COLUMNS) + holes
        self.reference = self.parameter + 0.5 * random(NUM_ROWS, NUM_COLUMNS) + holes
        self.advantages = random(NUM_ROWS, 1)

    def loss(self, parameter: Tensor, rows: list[int], width: int, weights: Tensor, policy: str, kl: str) -> Tensor:
        def cut(values: Tensor) -> Tensor:
            padded = torch.nn.functional.pad(values[rows].double(), (0, 3), value=math.nan)
            return padded[:, :width]

        mask = torch.nn.functional.pad(self.mask[rows], (0, 3))[:, :width]
        logprobs = torch.where(mask, cut(parameter), torch.nan)
        losses, _ = POLICY_LOSSES[policy](
            logprobs, cut(self.old), self.advantages[rows], mask, clip_low=0.2, clip_high=0.28
        )
        log_ratio = torch.where(mask, logprobs - cut(self.reference), 0.0)
        importance = torch.where(mask, logprobs - cut(self.old), 0.0)
        losses = losses + 0.1 * KL_LOSSES[kl](log_ratio, importance)
        return weighted_sum(losses, cut(weights), mask)

    def gradient(
        self, groups: list[list[int]], width: int, aggregation: str, policy: str, kl: str
    ) -> tuple[float, Tensor]:
        parameter = self.parameter.clone().requires_grad_(True)
        weights = AGGREGATIONS[aggregation](self.mask, **KNOBS.get(aggregation, {}))
        total = 0.0
        for rows in groups:
            loss = self.loss(parameter, rows, width, weights, policy, kl)
            loss.backward()
            total += loss.item()
        assert parameter.grad is not None
        return total, parameter.grad


SPLITS = [
    [[0], [1], [2], [3], [4], [5]],
    [[5, 4, 3], [2, 1, 0]],
    [[0, 5], [1, 2, 3, 4]],
    [[3, 1, 4, 0, 5, 2]],
]


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize("policy", list(POLICY_LOSSES))
@pytest.mark.parametrize("kl", list(KL_LOSSES))
def test_gradients_do_not_depend_on_split_order_or_padding(aggregation: str, policy: str, kl: str) -> None:
    example = Example()
    value, gradient = example.gradient([list(range(NUM_ROWS))], NUM_COLUMNS, aggregation, policy, kl)
    assert torch.isfinite(gradient).all()
    assert (gradient[~example.mask] == 0).all()
    assert gradient.abs().sum() > 0
    for groups in SPLITS:
        for width in (NUM_COLUMNS, NUM_COLUMNS + 3):
            other_value, other = example.gradient(groups, width, aggregation, policy, kl)
            assert other_value == pytest.approx(value, rel=1e-12)
            torch.testing.assert_close(other, gradient, rtol=1e-12, atol=1e-15)


def loop_aggregate(losses: list[list[float]], kind: str) -> float:
    rows = [row for row in losses if row]
    if kind == "token_mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if kind == "sequence_mean_token_mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if kind == "sequence_mean_token_sum":
        return sum(map(sum, rows)) / len(rows)
    return sum(map(sum, rows)) / (len(rows) * 7)


@pytest.mark.parametrize("kind", list(AGGREGATIONS))
def test_aggregation_equals_a_plain_loop(kind: str) -> None:
    mask = Example().mask
    losses = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = [[losses[i, t].item() for t in range(NUM_COLUMNS) if mask[i, t]] for i in range(NUM_ROWS)]
    value = weighted_sum(losses, AGGREGATIONS[kind](mask, **KNOBS.get(kind, {})), mask)
    assert value.item() == pytest.approx(loop_aggregate(plain, kind), rel=1e-12)


def test_what_aggregations_reduce_to() -> None:
    equal = lengths_to_mask(torch.tensor([4, 4, 4]), 4)
    torch.testing.assert_close(token_mean_weights(equal), sequence_mean_token_mean_weights(equal))
    torch.testing.assert_close(token_mean_weights(equal), constant_weights(equal, num_tokens=4))
    uneven = lengths_to_mask(torch.tensor([4, 1]), 4)
    torch.testing.assert_close(constant_weights(uneven, num_tokens=10), sequence_mean_token_sum_weights(uneven) / 10)


@pytest.mark.parametrize("kind", list(AGGREGATIONS))
def test_no_token_at_all_gives_zero_weights(kind: str) -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert AGGREGATIONS[kind](mask, **KNOBS.get(kind, {})).tolist() == [[0.0] * 3] * 2


def test_surrogate_equals_a_plain_loop() -> None:
    example = Example()
    losses, clipped = clipped_surrogate(
        example.parameter, example.old, example.advantages, example.mask, clip_low=0.1, clip_high=0.3
    )
    for i in range(NUM_ROWS):
        for t in range(NUM_COLUMNS):
            if not example.mask[i, t]:
                assert losses[i, t] == 0.0
                assert not clipped[i, t]
                continue
            ratio = math.exp(example.parameter[i, t] - example.old[i, t])
            advantage = example.advantages[i, 0].item()
            surrogate = min(ratio * advantage, min(max(ratio, 0.9), 1.3) * advantage)
            assert losses[i, t].item() == pytest.approx(-surrogate, rel=1e-12)
    assert clipped.any()


def test_on_policy_surrogate_is_reinforce() -> None:
    example = Example()
    parameter = example.parameter.clone().requires_grad_(True)
    losses, clipped = clipped_surrogate(
        parameter, parameter.detach(), example.advantages, example.mask, clip_low=0.2, clip_high=0.2
    )
    losses.sum().backward()
    expected = torch.where(example.mask, -example.advantages.expand(example.mask.shape), 0.0)
    torch.testing.assert_close(parameter.grad, expected)
    torch.testing.assert_close(losses.detach(), expected)
    assert not clipped.any()


def test_clipped_tokens_pass_no_gradient() -> None:
    logprobs = torch.tensor([[0.5, -0.5]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    losses, clipped = clipped_surrogate(
        logprobs, torch.zeros(1, 2), torch.ones(1, 1), mask, clip_low=0.2, clip_high=0.2
    )
    losses.sum().backward()
    assert clipped.tolist() == [[True, False]]
    assert logprobs.grad is not None
    assert logprobs.grad[0, 0] == 0.0
    assert logprobs.grad[0, 1] != 0.0


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.2), (1.0, 0.2), (0.2, 0.0)])
def test_clip_bounds_out_of_range_are_refused(low: float, high: float) -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="clip_low"):
        clipped_surrogate(one, one, one, one > 0, clip_low=low, clip_high=high)


def test_a_mask_must_be_bool() -> None:
    with pytest.raises(TypeError, match="bool"):
        masked_sum(torch.ones(2), torch.ones(2))


def test_soft_overlong_penalty_by_hand() -> None:
    penalty = soft_overlong_penalty(torch.tensor([0, 12, 16, 20, 30]), max_tokens=20, buffer_tokens=8)
    assert penalty.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0])
    with pytest.raises(ValueError, match="buffer_tokens"):
        soft_overlong_penalty(torch.tensor([1]), max_tokens=20, buffer_tokens=21)
