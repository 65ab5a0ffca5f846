"""Losses of reward models: plain formulas as oracle, special cases, gradients, and scores far out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training_core.ops.reward_losses import (
    bradley_terry,
    centring,
    level_probabilities,
    ordered_thresholds,
    ordinal,
    squared_error,
    threshold_parameters,
)

FLOATS = st.floats(-8.0, 8.0)
LEVELS = 4


def tensor(values: list[float], **options: bool) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, **options)  # type: ignore[arg-type]


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


@given(st.lists(st.tuples(FLOATS, FLOATS, FLOATS), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_pair_losses_equal_a_plain_loop(rows: list[tuple[float, float, float]]) -> None:
    chosen, rejected, margin = (tensor(list(column)) for column in zip(*rows, strict=True))
    loss = bradley_terry(chosen, rejected, margin=margin)
    assert loss.tolist() == pytest.approx([-math.log(sigmoid(c - r - m)) for c, r, m in rows], rel=1e-9, abs=1e-12)
    assert centring(chosen, rejected).tolist() == pytest.approx([(c + r) ** 2 for c, r, _ in rows])
    assert squared_error(chosen, rejected).tolist() == pytest.approx([(c - r) ** 2 for c, r, _ in rows])


@given(st.lists(st.tuples(FLOATS, st.integers(0, LEVELS - 1)), min_size=1, max_size=6), FLOATS)
@settings(max_examples=50, deadline=None)
def test_ordinal_loss_equals_a_plain_loop(rows: list[tuple[float, int]], first: float) -> None:
    thresholds = [first, first + 0.5, first + 2.0]
    bounds = [0.0, *([0.0] * (LEVELS - 1)), 1.0]

    def probability(score: float, level: int) -> float:
        for k, threshold in enumerate(thresholds, start=1):
            bounds[k] = sigmoid(threshold - score)
        return bounds[level + 1] - bounds[level]

    scores, levels = tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    expected = [-math.log(probability(*row)) for row in rows]
    assert ordinal(scores, levels, tensor(thresholds)).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    probabilities = level_probabilities(scores, tensor(thresholds))
    assert probabilities.sum(dim=1).tolist() == pytest.approx([1.0] * len(rows))
    picked = probabilities.gather(1, levels[:, None])[:, 0]
    assert picked.tolist() == pytest.approx([probability(*row) for row in rows], abs=1e-12)


def test_no_margin_is_the_plain_loss_and_a_margin_brings_scores_closer() -> None:
    chosen, rejected = tensor([2.0, -1.0, 0.3]), tensor([0.5, 1.0, 0.3])
    plain = bradley_terry(chosen, rejected)
    assert torch.equal(plain, bradley_terry(chosen, rejected, margin=tensor([0.0] * 3)))
    assert torch.equal(plain, -torch.nn.functional.logsigmoid(chosen - rejected))
    assert plain[2].item() == pytest.approx(math.log(2.0))
    margin = tensor([1.0, 0.5, 2.0])
    assert torch.allclose(bradley_terry(chosen, rejected, margin=margin), bradley_terry(chosen - margin, rejected))
    shifted = bradley_terry(chosen + 3.0, rejected + 3.0, margin=margin)
    assert torch.allclose(shifted, bradley_terry(chosen, rejected, margin=margin))


def test_centring_says_nothing_about_the_difference() -> None:
    chosen = tensor([0.7, 5.0], requires_grad=True)
    assert centring(chosen, -chosen.detach()).tolist() == [0.0, 0.0]
    a, b = tensor([1.0], requires_grad=True), tensor([2.0], requires_grad=True)
    assert [g.item() for g in torch.autograd.grad(centring(a, b).sum(), (a, b))] == [6.0, 6.0]


def test_two_levels_are_logistic_regression() -> None:
    scores, threshold = tensor([0.3, -2.0, 4.0, 0.0]), tensor([0.7])
    levels = torch.tensor([1, 0, 1, 0])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        scores - threshold, levels.double(), reduction="none"
    )
    assert torch.allclose(ordinal(scores, levels, threshold), expected, rtol=1e-12)


def test_ordinal_depends_on_distances_to_the_thresholds_only() -> None:
    scores, levels, thresholds = tensor([0.3, -2.0, 1.0]), torch.tensor([2, 0, 1]), tensor([-1.0, 1.5])
    assert torch.allclose(ordinal(scores + 7.0, levels, thresholds + 7.0), ordinal(scores, levels, thresholds))


def test_the_mean_rating_costs_least_of_all_constants() -> None:
    ratings, score = tensor([1.0, 2.0, 6.0]), tensor([3.0], requires_grad=True)
    [gradient] = torch.autograd.grad(squared_error(score, ratings).sum(), score)
    assert gradient.item() == pytest.approx(0.0, abs=1e-12)


def test_gradients_are_those_of_the_values() -> None:
    def leaf(*values: float) -> torch.Tensor:
        return tensor(list(values), requires_grad=True)

    margin = tensor([0.5, -0.2])
    assert torch.autograd.gradcheck(lambda c, r: bradley_terry(c, r, margin=margin), (leaf(1.0, -2.0), leaf(0.3, 0.4)))
    assert torch.autograd.gradcheck(centring, (leaf(1.0, -2.0), leaf(0.3, 0.4)))
    assert torch.autograd.gradcheck(lambda s: squared_error(s, margin), (leaf(1.0, -2.0),))
    levels = torch.tensor([0, 1, 2, 3])
    scores, first, widths = leaf(0.3, -1.0, 0.2, 2.0), leaf(-0.4), leaf(0.3, -1.2)
    assert torch.autograd.gradcheck(
        lambda s, f, w: ordinal(s, levels, ordered_thresholds(f, w)), (scores, first, widths)
    )


def test_the_margin_gets_no_gradient() -> None:
    scores, margin = tensor([1.0], requires_grad=True), tensor([0.5], requires_grad=True)
    bradley_terry(scores, tensor([0.0]), margin=margin).sum().backward()
    assert scores.grad is not None
    assert margin.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_far_out_have_finite_losses_and_gradients(dtype: torch.dtype) -> None:
    far = torch.tensor([1e4, -1e4, 1e4, -1e4], dtype=dtype, requires_grad=True)
    zeros = torch.zeros(4, dtype=dtype)
    loss = bradley_terry(far, zeros, margin=zeros + 1.0)
    assert loss.tolist() == pytest.approx([0.0, 10001.0, 0.0, 10001.0])
    assert torch.autograd.grad(loss.sum(), far)[0].tolist() == [0.0, -1.0, 0.0, -1.0]
    thresholds = torch.tensor([-1.0, 0.0, 1.0], dtype=dtype)
    loss = ordinal(far, torch.tensor([0, 3, 1, 2]), thresholds)
    width = -math.log(-math.expm1(-1.0))
    assert loss.tolist() == pytest.approx([10001.0, 10001.0, 10000.0 + width, 10000.0 + width])
    assert torch.autograd.grad(loss.sum(), far)[0].tolist() == pytest.approx([1.0, -1.0, 1.0, -1.0])


def test_a_narrow_level_keeps_its_digits() -> None:
    """The difference of two sigmoids would be 0 here, and its logarithm infinite."""
    thresholds = tensor([30.0, 30.0 + 1e-9])
    loss = ordinal(tensor([0.0]), torch.tensor([1]), thresholds)
    width = (thresholds[1] - thresholds[0]).item()
    assert loss.item() == pytest.approx(30.0 - math.log(width), rel=1e-9)


@pytest.mark.parametrize("thresholds", [[], [1.0, 1.0], [2.0, 1.0], [0.0, math.nan]])
def test_thresholds_must_increase(thresholds: list[float]) -> None:
    with pytest.raises(ValueError, match="strictly increasing"):
        ordinal(tensor([0.0]), torch.tensor([0]), tensor(thresholds))


@pytest.mark.parametrize("level", [-1, 2])
def test_levels_beyond_the_thresholds_are_refused(level: int) -> None:
    with pytest.raises(ValueError, match=r"levels must lie in \[0, 1\]"):
        ordinal(tensor([0.0]), torch.tensor([level]), tensor([0.0]))


def test_thresholds_start_where_the_frequencies_are() -> None:
    counts = torch.tensor([9, 0, 29, 59])
    thresholds = ordered_thresholds(*threshold_parameters(counts))
    probabilities = level_probabilities(tensor([0.0]), thresholds)[0]
    assert probabilities.tolist() == pytest.approx([10 / 101, 1 / 101, 30 / 101, 60 / 101])


@given(FLOATS, st.lists(st.floats(-20.0, 20.0), max_size=5))
@settings(max_examples=50, deadline=None)
def test_any_parameters_give_increasing_thresholds(first: float, widths: list[float]) -> None:
    thresholds = ordered_thresholds(tensor([first]), tensor(widths))
    assert len(thresholds) == len(widths) + 1
    assert thresholds[0].item() == first
    assert bool((thresholds.diff() > 0).all())
