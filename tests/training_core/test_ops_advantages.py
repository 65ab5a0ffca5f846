"""Group statistics: exact zeros, missing scores, singletons, and a plain loop as oracle."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training_core.ops.advantages import STD_EPSILON, group_advantages
from training_core.registries import ADVANTAGE_ESTIMATORS


def by_loop(scores: list[float | None], groups: list[int], divide_by_std: bool) -> list[float]:
    result = []
    for score, group in zip(scores, groups, strict=True):
        members = [s for s, g in zip(scores, groups, strict=True) if g == group and s is not None]
        if score is None or len(members) < 2 or max(members) == min(members):
            result.append(0.0)
            continue
        centred = score - statistics.fmean(members)
        result.append(centred / (statistics.stdev(members) + STD_EPSILON) if divide_by_std else centred)
    return result


def compute(scores: list[float | None], groups: list[int], divide_by_std: bool = True) -> list[float]:
    values = torch.tensor([math.nan if s is None else s for s in scores], dtype=torch.float64)
    present = torch.tensor([s is not None for s in scores])
    return group_advantages(values, torch.tensor(groups), present, divide_by_std=divide_by_std).advantages.tolist()


@given(
    st.lists(st.tuples(st.none() | st.floats(-100, 100), st.integers(0, 3)), min_size=1, max_size=24),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_equals_a_plain_loop(rows: list[tuple[float | None, int]], divide_by_std: bool) -> None:
    scores, groups = [row[0] for row in rows], [row[1] for row in rows]
    expected = by_loop(scores, groups, divide_by_std)
    # A spread near the last bit of the values divides rounding by rounding; only its size can be compared.
    assert compute(scores, groups, divide_by_std) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 0.9, 1e6 + 0.1, -0.7])
@pytest.mark.parametrize("size", [2, 3, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_give_exactly_zero(value: float, size: int, dtype: torch.dtype) -> None:
    scores = torch.full((size,), value, dtype=dtype)
    everything = torch.ones(size, dtype=torch.bool)
    result = group_advantages(scores, torch.zeros(size, dtype=torch.long), everything, divide_by_std=True)
    assert result.advantages.tolist() == [0.0] * size
    assert (result.num_groups, result.num_zero_variance_groups, result.num_singletons) == (1, 1, 0)


def test_a_large_offset_costs_no_digits() -> None:
    small = compute([1.0, 2.0, 4.0], [0, 0, 0])
    assert compute([1e9 + 1.0, 1e9 + 2.0, 1e9 + 4.0], [0, 0, 0]) == pytest.approx(small, rel=1e-6)


def test_a_missing_score_is_as_if_it_were_not_there() -> None:
    with_gap = compute([1.0, None, 3.0, 8.0], [0, 0, 0, 0])
    without = compute([1.0, 3.0, 8.0], [0, 0, 0])
    assert [with_gap[0], with_gap[2], with_gap[3]] == without
    assert with_gap[1] == 0.0
    assert with_gap != compute([1.0, 0.0, 3.0, 8.0], [0, 0, 0, 0])


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_penalties_are_subtracted_after_the_scores_are_scaled(divide_by_std: bool) -> None:
    scores = torch.tensor([1.0, 2.0, 6.0, math.nan, 5.0, 5.0, 5.0, 9.0], dtype=torch.float64)
    penalties = torch.tensor([0.3, 0.0, 0.6, math.nan, 0.1, 0.4, -0.2, 7.0], dtype=torch.float64)
    present, groups = ~scores.isnan(), torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])

    def advantages(coefficient: float) -> torch.Tensor:
        return group_advantages(
            scores, groups, present, divide_by_std=divide_by_std, penalties=coefficient * penalties
        ).advantages

    spread = statistics.stdev([1.0, 2.0, 6.0]) + STD_EPSILON if divide_by_std else 1.0
    expected = [(s - 3.0) / spread - (p - 0.3) for s, p in ((1.0, 0.3), (2.0, 0.0), (6.0, 0.6))]
    flat = [-(p - 0.1) for p in (0.1, 0.4, -0.2)]
    assert advantages(1.0).tolist() == pytest.approx([*expected, 0.0, *flat, 0.0], abs=1e-12)
    # Linear in the coefficient, also where all scores are equal.
    slope = advantages(1.0) - advantages(0.0)
    torch.testing.assert_close(advantages(0.01) - advantages(0.0), 0.01 * slope, rtol=1e-9, atol=1e-12)
    assert group_advantages(scores, groups, present, divide_by_std=True).advantages[4:7].tolist() == [0.0] * 3


def test_singletons_get_zero_and_are_counted() -> None:
    scores = torch.tensor([5.0, 1.0, 2.0, 7.0])
    present = torch.tensor([True, True, True, False])
    result = group_advantages(scores, torch.tensor([0, 1, 1, 2]), present, divide_by_std=True)
    assert result.advantages[0] == 0.0
    assert (result.num_groups, result.num_singletons, result.num_zero_variance_groups) == (2, 1, 0)


def test_rows_may_come_in_any_order() -> None:
    scores, groups = [1.0, 2.0, 5.0, -1.0, 0.0, 4.0], [0, 0, 0, 1, 1, 1]
    order = [3, 0, 5, 1, 4, 2]
    shuffled = compute([scores[i] for i in order], [groups[i] for i in order])
    assert shuffled == pytest.approx([compute(scores, groups)[i] for i in order], rel=1e-12)


def test_a_score_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        compute([1.0, math.inf], [0, 0])


@pytest.mark.parametrize("name", list(ADVANTAGE_ESTIMATORS))
def test_every_registered_estimator_runs_and_sums_to_zero_within_a_group(name: str) -> None:
    scores = torch.tensor([1.0, 2.0, 4.0, 3.0, 3.0, 9.0])
    result = ADVANTAGE_ESTIMATORS[name](scores, torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6, dtype=torch.bool))
    assert result.advantages.abs().sum() > 0
    assert result.advantages.reshape(2, 3).sum(dim=1).abs().max() < 1e-12
