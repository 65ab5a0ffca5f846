"""Whitening, centring and running moments: plain statistics beside them, exact zeros, digits kept."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training_core.ops.normalising import STD_EPSILON, RunningMoments, center, whiten

CELLS = st.lists(st.tuples(st.booleans(), st.floats(-100, 100)), min_size=1, max_size=20)
NUMBERS = st.lists(st.floats(-1e3, 1e3), max_size=12)


def masked(cells: list[tuple[bool, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.tensor([cell[0] for cell in cells])
    return torch.tensor([x if kept else math.nan for kept, x in cells], dtype=torch.float64), mask


def whiten_by_hand(values: list[float]) -> list[float]:
    if len(values) < 2 or max(values) == min(values):
        return [0.0] * len(values)
    mean, spread = statistics.fmean(values), statistics.stdev(values) + STD_EPSILON
    return [(x - mean) / spread for x in values]


@given(CELLS)
@settings(max_examples=80, deadline=None)
def test_equals_plain_statistics_of_the_unmasked_values(cells: list[tuple[bool, float]]) -> None:
    values, mask = masked(cells)
    kept = [x for is_kept, x in cells if is_kept]
    whitened, centred = whiten(values, mask), center(values, mask)
    # A spread near the last bit of the values divides rounding by rounding; only its size can be compared.
    assert whitened[mask].tolist() == pytest.approx(whiten_by_hand(kept), rel=1e-6, abs=1e-6)
    mean = statistics.fmean(kept) if kept else 0.0
    assert centred[mask].tolist() == pytest.approx([x - mean for x in kept], abs=1e-11)
    assert whitened[~mask].abs().sum() + centred[~mask].abs().sum() == 0.0
    assert whitened.dtype == centred.dtype == torch.float64


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 0.9, 1e6 + 0.1, -0.7])
@pytest.mark.parametrize("shape", [(1,), (8,), (3, 5), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_give_exactly_zero(value: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values, mask = torch.full(shape, value, dtype=dtype), torch.ones(shape, dtype=torch.bool)
    assert whiten(values, mask).abs().sum() == 0.0
    assert center(values, mask).abs().sum() == 0.0


def test_equal_values_give_exactly_zero_even_where_their_sum_overflows() -> None:
    values, mask = torch.full((8,), 1e308, dtype=torch.float64), torch.ones(8, dtype=torch.bool)
    assert whiten(values, mask).tolist() == center(values, mask).tolist() == [0.0] * 8
    assert RunningMoments().updated(values) == RunningMoments(8, 1e308, 0.0)


def test_one_unmasked_value_and_none_give_zero() -> None:
    values = torch.tensor([3.0, math.nan, math.inf])
    for mask in ([True, False, False], [False, False, False]):
        assert whiten(values, torch.tensor(mask)).tolist() == [0.0, 0.0, 0.0]
        assert center(values, torch.tensor(mask)).tolist() == [0.0, 0.0, 0.0]


@given(CELLS, st.floats(-1e6, 1e6), st.floats(0.5, 20))
@settings(max_examples=40, deadline=None)
def test_an_offset_or_a_factor_changes_nothing(cells: list[tuple[bool, float]], offset: float, factor: float) -> None:
    values, mask = masked([(kept, float(round(x))) for kept, x in cells])
    moved = whiten(values * factor + offset, mask)
    torch.testing.assert_close(moved, whiten(values, mask), rtol=1e-4, atol=1e-5)
    assert abs(float(moved.sum())) < 1e-6
    assert abs(float(center(values, mask).sum())) < 1e-10


def test_a_large_offset_costs_no_digits() -> None:
    values, mask = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), torch.ones(3, dtype=torch.bool)
    torch.testing.assert_close(whiten(values + 1e9, mask), whiten(values, mask), rtol=1e-9, atol=0)


@given(CELLS, st.integers(0, 5), st.integers(0, 20))
@settings(max_examples=40, deadline=None)
def test_padding_changes_no_bit(cells: list[tuple[bool, float]], num_padding: int, where: int) -> None:
    values, mask = masked(cells)
    wide, wide_mask = masked([*cells[:where], *[(False, 0.0)] * num_padding, *cells[where:]])
    assert whiten(wide, wide_mask)[wide_mask].tolist() == whiten(values, mask)[mask].tolist()
    assert center(wide, wide_mask)[wide_mask].tolist() == center(values, mask)[mask].tolist()


def test_a_mask_that_does_not_fit_is_refused() -> None:
    for function in (whiten, center):
        with pytest.raises(ValueError, match="same shape"):
            function(torch.ones(3), torch.ones(2, dtype=torch.bool))
        with pytest.raises(TypeError, match="bool"):
            function(torch.ones(3), torch.ones(3))


@given(st.lists(NUMBERS, max_size=5))
@settings(max_examples=60, deadline=None)
def test_running_moments_equal_those_of_all_values_at_once(batches: list[list[float]]) -> None:
    moments = RunningMoments()
    for batch in batches:
        moments = moments.updated(torch.tensor(batch, dtype=torch.float64))
    values = [x for batch in batches for x in batch]
    assert moments.count == len(values)
    assert moments.mean == pytest.approx(statistics.fmean(values) if values else 0.0, rel=1e-9, abs=1e-9)
    assert moments.std == pytest.approx(statistics.stdev(values) if len(values) > 1 else 0.0, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("sizes", [[8], [1] * 8, [3, 0, 5]])
@pytest.mark.parametrize("value", [0.7, 0.1, 1e6 + 0.1])
def test_running_moments_of_equal_values_have_no_spread(sizes: list[int], value: float) -> None:
    moments = RunningMoments()
    for size in sizes:
        moments = moments.updated(torch.full((size,), value, dtype=torch.float64))
    assert moments == RunningMoments(8, value, 0.0)
    assert moments.std == 0.0


def test_running_moments_keep_their_digits_far_from_zero() -> None:
    moments = RunningMoments()
    for start in range(0, 1000, 10):
        moments = moments.updated(1e9 + torch.arange(start, start + 10, dtype=torch.float64) % 7)
    assert moments.std == pytest.approx(statistics.stdev([i % 7 for i in range(1000)]), rel=1e-6)


@given(NUMBERS, NUMBERS)
@settings(max_examples=40, deadline=None)
def test_merging_two_sets_equals_seeing_both(first: list[float], second: list[float]) -> None:
    def seen(values: list[float]) -> RunningMoments:
        return RunningMoments().updated(torch.tensor(values, dtype=torch.float64))

    merged, both = seen(first).merged(seen(second)), seen(first + second)
    assert merged.count == both.count
    assert (merged.mean, merged.std) == pytest.approx((both.mean, both.std), rel=1e-9, abs=1e-9)


def test_running_moments_survive_a_checkpoint_to_the_bit() -> None:
    def batch(seed: int) -> torch.Tensor:
        return torch.randn(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    moments = RunningMoments().updated(batch(0))
    saved: dict[str, Any] = json.loads(json.dumps(asdict(moments)))
    assert RunningMoments(**saved) == moments
    assert RunningMoments(**saved).updated(batch(1)) == moments.updated(batch(1))


def test_running_moments_refuse_what_is_not_finite() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not finite"):
            RunningMoments().updated(torch.tensor([1.0, bad]))
