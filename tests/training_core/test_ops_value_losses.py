"""Value losses: a plain loop, gradients checked numerically, and NaN behind the mask."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training_core.ops.masking import lengths_to_mask
from training_core.ops.value_losses import clipped_value_loss, squared_error

SEEDS = st.integers(0, 10_000)
MASK = lengths_to_mask(torch.tensor([4, 2, 0]), 4)


def example(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, old values and returns, NaN behind the mask."""
    generator = torch.Generator().manual_seed(seed)
    holes = torch.where(MASK, 0.0, math.nan)
    values, old, returns = (torch.randn(3, 3, 4, generator=generator, dtype=torch.float64) + holes).unbind()
    return values, old, returns


def by_loop(value: float, old: float, target: float, clip: float) -> tuple[float, bool]:
    bounded = min(max(value, old - clip), old + clip)
    plain, other = 0.5 * (value - target) ** 2, 0.5 * (bounded - target) ** 2
    return max(plain, other), other > plain and abs(value - old) > clip


@given(SEEDS, st.sampled_from([0.01, 0.5, 2.0]))
@settings(max_examples=40, deadline=None)
def test_equals_a_plain_loop(seed: int, clip: float) -> None:
    values, old, returns = example(seed)
    loss, is_clipped = clipped_value_loss(values, old, returns, MASK, clip=clip)
    assert loss[~MASK].abs().sum() == 0.0
    assert not bool(is_clipped[~MASK].any())
    for t in MASK.nonzero().tolist():
        row, column = t
        here = (float(x[row, column]) for x in (values, old, returns))
        expected = by_loop(*here, clip)
        assert float(loss[row, column]) == pytest.approx(expected[0], abs=1e-12)
        assert bool(is_clipped[row, column]) == expected[1]


@pytest.mark.parametrize("clip", [None, 0.3, 100.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradients_are_right(clip: float | None, seed: int) -> None:
    values, old, returns = (torch.where(MASK, x, 0.0) for x in example(seed))

    def loss(x: Tensor) -> Tensor:
        return clipped_value_loss(x, old, returns, MASK, clip=clip)[0]

    assert torch.autograd.gradcheck(loss, values.requires_grad_())


def test_clipped_tokens_pass_no_gradient_and_no_others_lose_it() -> None:
    values, old, returns = example(5)
    values.requires_grad_()
    loss, is_clipped = clipped_value_loss(values, old, returns, MASK, clip=0.3)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert 0 < int(is_clipped.sum()) < int(MASK.sum())
    expected = torch.where(MASK & ~is_clipped, values.detach() - returns, 0.0)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14)


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_reduces_to_the_squared_error(seed: int) -> None:
    values, old, returns = example(seed)
    plain = squared_error(values, returns, MASK)
    for clip, before in ((None, old), (100.0, old), (0.1, values)):
        loss, is_clipped = clipped_value_loss(values, before, returns, MASK, clip=clip)
        assert loss.tolist() == plain.tolist()
        assert not bool(is_clipped.any())
    assert bool((clipped_value_loss(values, old, returns, MASK, clip=0.1)[0] >= plain).all())
    assert squared_error(returns, returns, MASK).abs().sum() == 0.0


@pytest.mark.parametrize("fill", [math.nan, math.inf, 1e300])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_what_stands_behind_the_mask_reaches_neither_value_nor_gradient(fill: float, clip: float | None) -> None:
    def run(hole: float) -> tuple[list[list[float]], list[list[float]]]:
        values, old, returns = (torch.where(MASK, x, hole) for x in example(3))
        values.requires_grad_()
        loss, _ = clipped_value_loss(values, old, returns, MASK, clip=clip)
        (gradient,) = torch.autograd.grad(loss.sum(), values)
        return loss.tolist(), gradient.tolist()

    assert run(fill) == run(0.0)


def test_neither_old_values_nor_targets_get_a_gradient() -> None:
    values, old, returns = (torch.where(MASK, x, 0.0).requires_grad_() for x in example(1))
    loss, _ = clipped_value_loss(values, old, returns, MASK, clip=0.3)
    gradients = torch.autograd.grad(loss.sum(), (values, old, returns), allow_unused=True)
    assert gradients[0] is not None
    assert gradients[1:] == (None, None)


@pytest.mark.parametrize("clip", [0.0, -0.1, math.nan])
def test_a_bound_that_is_none_is_refused(clip: float) -> None:
    with pytest.raises(ValueError, match="clip must be above 0"):
        clipped_value_loss(*example(0), MASK, clip=clip)
