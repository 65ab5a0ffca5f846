"""Group estimators: exact zeros, missing scores, singletons, empty answers, and a plain loop as oracle."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from estimators import changed, one_token, random_inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from training_core.ops.advantages import (
    STD_EPSILON,
    EstimatorInputs,
    group_centred,
    group_normalised,
    leave_one_out,
)

GROUP_ESTIMATORS = {
    "group_normalised": group_normalised,
    "group_centred": group_centred,
    "leave_one_out": leave_one_out,
}
every_group_estimator = pytest.mark.parametrize("name", list(GROUP_ESTIMATORS))


def relative(value: float, members: list[float], name: str) -> float:
    """Compare one value with its group, itself included."""
    if len(members) < 2 or max(members) == min(members):
        return 0.0
    if name == "leave_one_out":
        return value - (sum(members) - value) / (len(members) - 1)
    centred = value - statistics.fmean(members)
    return centred / (statistics.stdev(members) + STD_EPSILON) if name == "group_normalised" else centred


def by_loop(inputs: EstimatorInputs, name: str) -> list[list[float]]:
    """The advantages, answer by answer; the KL of whole answers is compared without division."""
    masks, scores, groups = inputs.mask.tolist(), inputs.scores.tolist(), inputs.group_ids.tolist()
    counts = [bool(p) and any(m) for p, m in zip(inputs.present.tolist(), masks, strict=True)]
    costs = [0.0] * len(masks)
    if inputs.kl_penalties is not None:
        rows = zip(inputs.kl_penalties.tolist(), masks, strict=True)
        costs = [sum(k for k, is_token in zip(row, mask, strict=True) if is_token) for row, mask in rows]
    result = []
    for i, mask in enumerate(masks):
        others = [j for j in range(len(masks)) if counts[j] and groups[j] == groups[i]]
        advantage = 0.0
        if counts[i]:
            advantage = relative(scores[i], [scores[j] for j in others], name)
            plain = "group_centred" if name == "group_normalised" else name
            advantage -= relative(costs[i], [costs[j] for j in others], plain)
        result.append([advantage if is_token else 0.0 for is_token in mask])
    return result


@every_group_estimator
@given(seed=st.integers(0, 10_000), with_kl=st.booleans())
@settings(max_examples=40, deadline=None)
def test_equals_a_plain_loop(name: str, seed: int, with_kl: bool) -> None:
    inputs = random_inputs(seed)
    inputs = inputs if with_kl else changed(inputs, kl_penalties=None)
    result = GROUP_ESTIMATORS[name](inputs)
    expected = torch.tensor(by_loop(inputs, name), dtype=torch.float64)
    torch.testing.assert_close(result.advantages, expected, rtol=1e-10, atol=1e-12)
    assert result.returns is None


@every_group_estimator
@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 0.9, 1e6 + 0.1, -0.7])
@pytest.mark.parametrize("size", [2, 3, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_give_exactly_zero(name: str, value: float, size: int, dtype: torch.dtype) -> None:
    inputs = one_token([0.0] * size, [0] * size)
    result = GROUP_ESTIMATORS[name](changed(inputs, scores=torch.full((size,), value, dtype=dtype)))
    assert result.advantages[:, 0].tolist() == [0.0] * size
    assert (result.num_groups, result.num_zero_variance_groups, result.num_singletons) == (1, 1, 0)


@every_group_estimator
def test_equal_scores_give_exactly_zero_even_where_their_sum_overflows(name: str) -> None:
    assert GROUP_ESTIMATORS[name](one_token([1e308] * 8, [0] * 8)).advantages[:, 0].tolist() == [0.0] * 8


@every_group_estimator
def test_a_large_offset_costs_no_digits(name: str) -> None:
    small = GROUP_ESTIMATORS[name](one_token([1.0, 2.0, 4.0], [0, 0, 0])).advantages
    large = GROUP_ESTIMATORS[name](one_token([1e9 + 1.0, 1e9 + 2.0, 1e9 + 4.0], [0, 0, 0])).advantages
    torch.testing.assert_close(large, small, rtol=1e-9, atol=0)


@every_group_estimator
def test_a_missing_score_is_as_if_it_were_not_there(name: str) -> None:
    with_gap = GROUP_ESTIMATORS[name](one_token([1.0, None, 3.0, 8.0], [0, 0, 0, 0]))
    without = GROUP_ESTIMATORS[name](one_token([1.0, 3.0, 8.0], [0, 0, 0])).advantages[:, 0].tolist()
    assert with_gap.advantages[[0, 2, 3], 0].tolist() == without
    assert with_gap.advantages[1, 0] == 0.0
    assert with_gap.num_without_score == 1
    zero = GROUP_ESTIMATORS[name](one_token([1.0, 0.0, 3.0, 8.0], [0, 0, 0, 0]))
    assert zero.advantages[[0, 2, 3], 0].tolist() != without
    assert zero.num_without_score == 0


@every_group_estimator
def test_an_empty_answer_does_not_move_the_others(name: str) -> None:
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    scores = {"scores": torch.tensor([1.0, 10.0, 3.0]), "mask": mask, "kl_penalties": torch.full((3, 2), 0.5)}
    result = GROUP_ESTIMATORS[name](changed(one_token([0.0, 0.0, 0.0], [0, 0, 0]), **scores))
    pair = changed(one_token([1.0, 3.0], [0, 0]), mask=mask[[0, 2]], kl_penalties=torch.full((2, 2), 0.5))
    assert result.advantages[[0, 2]].tolist() == GROUP_ESTIMATORS[name](pair).advantages.tolist()
    assert result.advantages[1].tolist() == [0.0, 0.0]
    assert (result.num_groups, result.num_singletons, result.num_without_score) == (1, 0, 1)


@every_group_estimator
def test_singletons_get_zero_and_are_counted(name: str) -> None:
    inputs = one_token([5.0, 1.0, 2.0, None], [0, 1, 1, 2], kl_penalties=torch.full((4, 1), 0.5))
    result = GROUP_ESTIMATORS[name](inputs)
    assert result.advantages[0, 0] == 0.0
    assert result.advantages[1, 0] != 0.0
    counts = (result.num_groups, result.num_singletons, result.num_zero_variance_groups, result.num_without_score)
    assert counts == (2, 1, 0, 1)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_the_advantages_of_a_group_sum_to_zero(seed: int) -> None:
    inputs = changed(random_inputs(seed, num_tokens=1), mask=torch.ones(7, 1, dtype=torch.bool))
    inputs = changed(inputs, kl_penalties=torch.ones(7, 1) * torch.arange(7)[:, None])
    for estimate in GROUP_ESTIMATORS.values():
        sums = torch.zeros(15).double().index_add_(0, inputs.group_ids, estimate(inputs).advantages[:, 0])
        assert sums.abs().max() < 1e-9


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_leave_one_out_is_n_over_n_minus_1_times_centred(seed: int) -> None:
    inputs = random_inputs(seed)
    counts = inputs.present & inputs.mask.any(dim=1)
    sizes = torch.stack([(counts & (inputs.group_ids == g)).sum() for g in inputs.group_ids]).double()
    factor = torch.where(sizes > 1, sizes / (sizes - 1), 0.0)[:, None]
    expected = factor * group_centred(inputs).advantages
    torch.testing.assert_close(leave_one_out(inputs).advantages, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_penalties_are_subtracted_after_the_scores_are_scaled(divide_by_std: bool) -> None:
    estimate = group_normalised if divide_by_std else group_centred
    scores = [1.0, 2.0, 6.0, None, 5.0, 5.0, 5.0, 9.0]
    penalties = torch.tensor([0.3, 0.0, 0.6, math.nan, 0.1, 0.4, -0.2, 7.0], dtype=torch.float64)
    groups = [0, 0, 0, 0, 1, 1, 1, 2]

    def advantages(coefficient: float) -> torch.Tensor:
        costs = (coefficient * penalties)[:, None]
        return estimate(one_token(scores, groups, kl_penalties=costs)).advantages[:, 0]

    spread = statistics.stdev([1.0, 2.0, 6.0]) + STD_EPSILON if divide_by_std else 1.0
    expected = [(s - 3.0) / spread - (p - 0.3) for s, p in ((1.0, 0.3), (2.0, 0.0), (6.0, 0.6))]
    flat = [-(p - 0.1) for p in (0.1, 0.4, -0.2)]
    assert advantages(1.0).tolist() == pytest.approx([*expected, 0.0, *flat, 0.0], abs=1e-12)
    # Linear in the coefficient, also where all scores are equal.
    slope = advantages(1.0) - advantages(0.0)
    torch.testing.assert_close(advantages(0.01) - advantages(0.0), 0.01 * slope, rtol=1e-9, atol=1e-12)
    assert estimate(one_token(scores, groups)).advantages[4:7, 0].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.ones(3)}, "scores"),
        ({"group_ids": torch.zeros(2, 1).long()}, "group_ids"),
        ({"group_ids": torch.zeros(2)}, "integers"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, "mask"),
        ({"kl_penalties": torch.ones(2)}, "kl_penalties"),
        ({"values": torch.ones(2, 2)}, "values"),
        ({"baseline_scores": torch.ones(1)}, "baseline_scores"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(one_token([1.0, 2.0], [0, 0]), **change)


def test_a_mask_of_numbers_is_refused() -> None:
    with pytest.raises(TypeError, match="bool"):
        changed(one_token([1.0, 2.0], [0, 0]), mask=torch.ones(2, 1))
