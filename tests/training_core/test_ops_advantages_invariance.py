"""What must change no estimator: order of rows, names of groups, padding, what stands where nothing counts."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from estimators import ESTIMATORS, ROW_FIELDS, TOKEN_FIELDS, changed, random_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training_core.ops import advantages
from training_core.ops.advantages import Advantages, EstimatorInputs
from training_core.registries import ADVANTAGE_ESTIMATORS

every_estimator = pytest.mark.parametrize("name", list(ESTIMATORS))
SEEDS = st.integers(0, 10_000)
COUNTS = ("num_groups", "num_zero_variance_groups", "num_singletons", "num_without_score")


def select(inputs: EstimatorInputs, rows: list[int]) -> EstimatorInputs:
    return changed(inputs, **{name: getattr(inputs, name)[rows] for name in (*ROW_FIELDS, *TOKEN_FIELDS)})


def widen(inputs: EstimatorInputs, place: int, num_columns: int, fill: float) -> EstimatorInputs:
    def wide(x: Tensor) -> Tensor:
        value = 0.0 if x.dtype == torch.bool else fill
        extra = torch.full((x.shape[0], num_columns), value).to(x.dtype)
        return torch.cat([x[:, :place], extra, x[:, place:]], dim=1)

    return changed(inputs, **{name: wide(getattr(inputs, name)) for name in TOKEN_FIELDS})


def assert_same(got: Advantages, expected: Advantages, mask: Tensor, expected_mask: Tensor) -> None:
    def compare(x: Tensor | None, y: Tensor | None) -> None:
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            torch.testing.assert_close(x[mask], y[expected_mask], rtol=1e-10, atol=1e-12)

    compare(got.advantages, expected.advantages)
    compare(got.returns, expected.returns)


def test_the_table_holds_every_public_and_every_registered_estimator() -> None:
    public = [name for name in advantages.__all__ if inspect.isfunction(getattr(advantages, name))]
    assert set(public) == set(ESTIMATORS) - {"gae_whitened"}
    assert set(ADVANTAGE_ESTIMATORS) == set(ESTIMATORS) - {"gae_whitened"}


@every_estimator
@given(seed=SEEDS)
@settings(max_examples=25, deadline=None)
def test_nothing_stands_where_nothing_counts(name: str, seed: int) -> None:
    inputs = random_inputs(seed)
    result = ESTIMATORS[name](inputs)
    idle = ~(inputs.mask & inputs.present[:, None])
    for values in (result.advantages, result.returns):
        if values is not None:
            assert values.dtype == torch.float64
            assert bool(values.isfinite().all())
            assert values[idle].abs().sum() == 0.0
    assert not result.advantages.requires_grad


@every_estimator
@given(seed=SEEDS, order=st.permutations(range(7)))
@settings(max_examples=25, deadline=None)
def test_rows_come_in_any_order(name: str, seed: int, order: list[int]) -> None:
    inputs = random_inputs(seed)
    expected, got = ESTIMATORS[name](inputs), ESTIMATORS[name](select(inputs, order))
    everything = torch.ones(7, 5, dtype=torch.bool)
    rows = select(changed(inputs, values=expected.advantages), order).values
    assert rows is not None
    torch.testing.assert_close(got.advantages, rows, rtol=1e-10, atol=1e-12)
    assert [getattr(got, c) for c in COUNTS] == [getattr(expected, c) for c in COUNTS]
    renamed = ESTIMATORS[name](changed(inputs, group_ids=1000 - inputs.group_ids))
    assert_same(renamed, expected, everything, everything)


@every_estimator
@given(seed=SEEDS, place=st.integers(0, 5), num_columns=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_masked_columns_anywhere_change_nothing(name: str, seed: int, place: int, num_columns: int) -> None:
    inputs = random_inputs(seed)
    expected = ESTIMATORS[name](inputs)
    for fill in (math.nan, math.inf, 7.0):
        wide = widen(inputs, place, num_columns, fill)
        got = ESTIMATORS[name](wide)
        assert_same(got, expected, wide.mask, inputs.mask)
        assert [getattr(got, c) for c in COUNTS] == [getattr(expected, c) for c in COUNTS]


@every_estimator
@given(seed=SEEDS, fill=st.sampled_from([math.nan, math.inf, 0.0, 1e9]))
@settings(max_examples=25, deadline=None)
def test_what_stands_where_nothing_counts_changes_no_bit(name: str, seed: int, fill: float) -> None:
    inputs = random_inputs(seed)
    idle = ~(inputs.mask & inputs.present[:, None])
    tokens = {field: torch.where(idle, fill, getattr(inputs, field)) for field in ("kl_penalties", "values")}
    other = changed(inputs, scores=torch.where(inputs.present, inputs.scores, fill), **tokens)
    everything = ESTIMATORS[name](other), ESTIMATORS[name](inputs)
    assert everything[0].advantages.tolist() == everything[1].advantages.tolist()
    if everything[0].returns is not None and everything[1].returns is not None:
        assert everything[0].returns.tolist() == everything[1].returns.tolist()


@every_estimator
@given(seed=SEEDS)
@settings(max_examples=25, deadline=None)
def test_answers_that_do_not_count_are_as_if_they_were_not_there(name: str, seed: int) -> None:
    """No score, no token, and for ReMax no baseline."""
    inputs = random_inputs(seed, num_rows=10)
    counts = inputs.present & inputs.mask.any(dim=1)
    if name == "remax":
        assert inputs.baseline_scores is not None
        counts = counts & ~inputs.baseline_scores.isnan()
    result = ESTIMATORS[name](inputs)
    assert result.num_without_score == int((~counts).sum())
    assert result.advantages[~counts].abs().sum() == 0.0
    without = ESTIMATORS[name](select(inputs, counts.nonzero()[:, 0].tolist()))
    torch.testing.assert_close(result.advantages[counts], without.advantages, rtol=1e-10, atol=1e-12)
    assert without.num_without_score == 0
    assert [getattr(without, c) for c in COUNTS[:3]] == [getattr(result, c) for c in COUNTS[:3]]


@every_estimator
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_step_in_which_nothing_counts(name: str, num_tokens: int) -> None:
    inputs = random_inputs(0, num_rows=4, num_tokens=num_tokens, present=torch.zeros(4, dtype=torch.bool))
    result = ESTIMATORS[name](inputs)
    assert result.advantages.shape == (4, num_tokens)
    assert result.advantages.abs().sum() == 0.0
    assert [getattr(result, c) for c in COUNTS] == [0, 0, 0, 4]


@every_estimator
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_present_number_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    everything = torch.ones(4, 2, dtype=torch.bool)
    plain = {"mask": everything, "present": everything[:, 0], "kl_penalties": torch.zeros(4, 2)}
    numbers = {"values": torch.zeros(4, 2), "baseline_scores": torch.zeros(4)}
    inputs = random_inputs(1, num_rows=4, num_tokens=2, scores=torch.arange(4.0), **plain, **numbers)
    ESTIMATORS[name](inputs)
    with pytest.raises(ValueError, match="a score is not finite"):
        ESTIMATORS[name](changed(inputs, scores=torch.tensor([1.0, bad, 2.0, 3.0])))
    with pytest.raises(ValueError, match="a KL penalty is not finite"):
        ESTIMATORS[name](changed(inputs, kl_penalties=torch.where(everything.cumsum(0) > 3, bad, 0.0)))
    # An empty answer's score must be a number too: it is present.
    empty = everything & torch.tensor([True, False, True, True])[:, None]
    with pytest.raises(ValueError, match="a score is not finite"):
        ESTIMATORS[name](changed(inputs, mask=empty, scores=torch.tensor([1.0, bad, 2.0, 3.0])))
