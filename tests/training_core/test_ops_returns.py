"""Token rewards, reward-to-go and GAE: a plain loop beside each, and what masked positions must not do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training_core.ops.masking import lengths_to_mask
from training_core.ops.returns import (
    discounted_reward_to_go,
    finite_or_zero,
    generalised_advantages,
    token_rewards,
)

FRACTIONS = st.sampled_from([0.0, 0.5, 0.95, 1.0])
ROWS = st.integers(0, 6).flatmap(
    lambda width: st.lists(
        st.lists(st.tuples(st.booleans(), st.floats(-5, 5), st.floats(-5, 5)), min_size=width, max_size=width),
        min_size=1,
        max_size=4,
    )
)
"""Answers as lists of (is a token, a number, another number)."""


def tensors(rows: list[list[tuple[bool, float, float]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (mask, first numbers, second numbers), the numbers NaN where the mask is false."""
    shape = (len(rows), len(rows[0]))
    mask = torch.tensor([[cell[0] for cell in row] for row in rows], dtype=torch.bool).reshape(shape)
    first, second = (torch.tensor([[c[k] for c in row] for row in rows]).double().reshape(shape) for k in (1, 2))
    return mask, torch.where(mask, first, math.nan), torch.where(mask, second, math.nan)


def to_go_by_loop(rewards: list[float], discount: float) -> list[float]:
    return [sum(discount ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]


def gae_by_loop(rewards: list[float], values: list[float], discount: float, smoothing: float) -> list[float]:
    after = [*values[1:], 0.0]
    deltas = [r + discount * n - v for r, n, v in zip(rewards, after, values, strict=False)]
    return to_go_by_loop(deltas, discount * smoothing)


@given(ROWS, FRACTIONS)
@settings(max_examples=60, deadline=None)
def test_reward_to_go_equals_a_sum_over_the_tokens_to_come(rows: Any, discount: float) -> None:
    mask, rewards, _ = tensors(rows)
    result = discounted_reward_to_go(rewards, mask, discount)
    assert result.dtype == torch.float64
    assert result[~mask].abs().sum() == 0.0
    for row, kept, got in zip(rewards, mask, result, strict=True):
        assert got[kept].tolist() == pytest.approx(to_go_by_loop(row[kept].tolist(), discount), abs=1e-12)


@given(ROWS, FRACTIONS, FRACTIONS)
@settings(max_examples=60, deadline=None)
def test_gae_equals_a_plain_loop(rows: Any, discount: float, smoothing: float) -> None:
    mask, rewards, values = tensors(rows)
    advantages, targets = generalised_advantages(rewards, values, mask, discount, smoothing)
    assert advantages[~mask].abs().sum() + targets[~mask].abs().sum() == 0.0
    for row, value, kept, got, target in zip(rewards, values, mask, advantages, targets, strict=True):
        expected = gae_by_loop(row[kept].tolist(), value[kept].tolist(), discount, smoothing)
        assert got[kept].tolist() == pytest.approx(expected, abs=1e-12)
        assert target[kept].tolist() == pytest.approx((got + value)[kept].tolist(), abs=1e-12)


def test_reward_to_go_special_cases() -> None:
    rewards, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert discounted_reward_to_go(rewards, mask, 1.0).tolist() == [[7.0, 6.0, 4.0]]
    assert discounted_reward_to_go(rewards, mask, 0.0).tolist() == rewards.tolist()


@given(ROWS, FRACTIONS)
@settings(max_examples=40, deadline=None)
def test_gae_special_cases(rows: Any, discount: float) -> None:
    mask, rewards, values = tensors(rows)
    to_go = discounted_reward_to_go(rewards, mask, discount)
    value = torch.where(mask, values, 0.0)
    advantages, targets = generalised_advantages(rewards, values, mask, discount, 1.0)
    torch.testing.assert_close(advantages, to_go - value, rtol=0, atol=1e-12)
    torch.testing.assert_close(targets, to_go, rtol=0, atol=1e-12)
    without_critic, _ = generalised_advantages(rewards, torch.zeros_like(values), mask, discount, 1.0)
    assert without_critic.tolist() == to_go.tolist()


def test_gae_without_smoothing_is_the_temporal_difference() -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0, 20.0, 40.0]])
    advantages, _ = generalised_advantages(rewards, values, torch.ones(1, 3, dtype=torch.bool), 0.5, 0.0)
    assert advantages.tolist() == [[1.0 + 10.0 - 10.0, 2.0 + 20.0 - 20.0, 3.0 - 40.0]]


@given(ROWS, FRACTIONS, FRACTIONS, st.integers(0, 3), st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_masked_columns_anywhere_change_no_bit(
    rows: Any, discount: float, smoothing: float, num_columns: int, where: int
) -> None:
    """Padding on the left, on the right and tool output in the middle: not a step, whatever stands there."""
    mask, rewards, values = tensors(rows)
    place = min(where, mask.shape[1])

    def widen(x: Tensor, fill: float) -> Tensor:
        extra = torch.full((x.shape[0], num_columns), fill).to(x.dtype)
        return torch.cat([x[:, :place], extra, x[:, place:]], dim=1)

    wide = widen(mask, 0.0)
    for fill in (math.nan, math.inf, 3.0):
        to_go = discounted_reward_to_go(widen(rewards, fill), wide, discount)
        assert to_go[wide].tolist() == discounted_reward_to_go(rewards, mask, discount)[mask].tolist()
        got = generalised_advantages(widen(rewards, fill), widen(values, fill), wide, discount, smoothing)
        expected = generalised_advantages(rewards, values, mask, discount, smoothing)
        assert [x[wide].tolist() for x in got] == [x[mask].tolist() for x in expected]


def test_tool_output_is_no_step_of_the_discount() -> None:
    mask = torch.tensor([[True, False, False, True]])
    assert discounted_reward_to_go(torch.tensor([[0.0, 5.0, 5.0, 1.0]]), mask, 0.5).tolist() == [[0.5, 0, 0, 1.0]]


@pytest.mark.parametrize("mask", [[1, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("has_score", [True, False])
def test_the_score_stands_on_the_last_unmasked_token(mask: list[int], has_score: bool) -> None:
    kept = torch.tensor([mask, [1, 0, 0, 0]]).bool()
    scores = torch.tensor([5.0 if has_score else math.nan, 7.0])
    penalties = torch.where(kept & torch.tensor([[has_score], [True]]), 0.25, math.nan)
    rewards = token_rewards(scores, torch.tensor([has_score, True]), kept, penalties)
    expected = [-0.25 * kept for kept in mask]
    if any(mask):
        expected[max(t for t, kept in enumerate(mask) if kept)] += 5.0
    assert rewards.tolist() == [expected if has_score else [0.0] * 4, [6.75, 0.0, 0.0, 0.0]]


def test_the_rewards_of_an_answer_add_up_to_its_score_minus_its_penalties() -> None:
    mask = lengths_to_mask(torch.tensor([3, 1, 0]), 4)
    penalties = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores, present = torch.tensor([2.0, -1.0, 9.0], dtype=torch.float64), torch.ones(3, dtype=torch.bool)
    sums = token_rewards(scores, present, mask, penalties).sum(dim=1)
    expected = [2.0 - float(penalties[0, :3].sum()), -1.0 - float(penalties[1, 0]), 0.0]
    assert sums.tolist() == pytest.approx(expected, abs=1e-12)
    assert token_rewards(scores, present, mask, None).tolist() == [[0, 0, 2.0, 0], [-1.0, 0, 0, 0], [0, 0, 0, 0]]


def test_an_answer_of_no_width_has_no_rewards() -> None:
    empty = torch.zeros(2, 0, dtype=torch.bool)
    assert token_rewards(torch.ones(2), torch.ones(2, dtype=torch.bool), empty, None).shape == (2, 0)
    assert discounted_reward_to_go(torch.zeros(2, 0), empty, 1.0).shape == (2, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(bad: float) -> None:
    mask, present = torch.tensor([[True, True]]), torch.tensor([True])
    with pytest.raises(ValueError, match="a score is not finite"):
        token_rewards(torch.tensor([bad]), present, mask, None)
    with pytest.raises(ValueError, match=r"a KL penalty is not finite \(1 of 2\)"):
        token_rewards(torch.tensor([1.0]), present, mask, torch.tensor([[0.0, bad]]))
    assert finite_or_zero(torch.tensor([bad, 1.0]), torch.tensor([False, True]), "x").tolist() == [0.0, 1.0]


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan])
def test_fractions_out_of_range_are_refused(bad: float) -> None:
    one, mask = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="discount"):
        discounted_reward_to_go(one, mask, bad)
    with pytest.raises(ValueError, match="discount"):
        generalised_advantages(one, one, mask, bad, 1.0)
    with pytest.raises(ValueError, match="smoothing"):
        generalised_advantages(one, one, mask, 1.0, bad)


def test_shapes_that_do_not_fit_are_refused() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="same shape"):
        discounted_reward_to_go(torch.ones(2, 4), mask, 1.0)
    with pytest.raises(ValueError, match=r"\[answers, time\]"):
        discounted_reward_to_go(torch.ones(3), mask[0], 1.0)
    with pytest.raises(ValueError, match="with 3 answers"):
        token_rewards(torch.ones(3), torch.ones(3, dtype=torch.bool), mask, None)


def test_nothing_flows_back() -> None:
    rewards = torch.ones(1, 2, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert not discounted_reward_to_go(rewards, mask, 1.0).requires_grad
    assert not any(x.requires_grad for x in generalised_advantages(rewards, rewards, mask, 1.0, 1.0))
