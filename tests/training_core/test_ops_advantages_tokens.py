"""Token estimators: the formula written as a loop, what each reduces to, missing baselines and values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from estimators import changed, one_token, random_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training_core.ops.advantages import (
    EstimatorInputs,
    gae,
    group_centred,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
)
from training_core.ops.masking import lengths_to_mask
from training_core.ops.normalising import whiten
from training_core.ops.returns import discounted_reward_to_go, token_rewards

SEEDS = st.integers(0, 10_000)
FRACTIONS = st.sampled_from([0.0, 0.9, 1.0])


def answers(lengths: list[int], scores: list[float], groups: list[int], **changes: Any) -> EstimatorInputs:
    return changed(one_token(scores, groups), mask=lengths_to_mask(torch.tensor(lengths), max(lengths)), **changes)


def counted_mask(inputs: EstimatorInputs) -> Tensor:
    return inputs.mask & inputs.present[:, None]


def by_loop(inputs: EstimatorInputs, base: list[float | None], discount: float) -> Tensor:
    """base_i - the discounted penalties to come, at every token; NaN where base is None (takes no part)."""
    result = torch.full(inputs.mask.shape, math.nan, dtype=torch.float64)
    assert inputs.kl_penalties is not None
    for i, start in enumerate(base):
        places = [t for t, is_token in enumerate(inputs.mask[i].tolist()) if is_token]
        for k, t in enumerate(places):
            to_come = [discount**n * float(inputs.kl_penalties[i, s]) for n, s in enumerate(places[k:])]
            result[i, t] = math.nan if start is None else start - sum(to_come)
    return result


def whitened(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), 0.0, whiten(values, ~values.isnan()))


@given(SEEDS, FRACTIONS)
@settings(max_examples=40, deadline=None)
def test_reinforce_plus_plus_is_whitened_reward_to_go(seed: int, discount: float) -> None:
    inputs = random_inputs(seed)
    to_go = by_loop(inputs, [0.0 if p else None for p in inputs.present.tolist()], discount)
    for i in range(len(inputs.mask)):
        places = inputs.mask[i].nonzero()[:, 0].tolist()
        for k, t in enumerate(reversed(places)):
            to_go[i, t] += discount**k * float(inputs.scores[i])
    got = reinforce_plus_plus(inputs, discount).advantages
    torch.testing.assert_close(got, whitened(to_go), rtol=1e-9, atol=1e-9)


@given(SEEDS, FRACTIONS)
@settings(max_examples=40, deadline=None)
def test_the_baseline_form_compares_first_and_whitens_last(seed: int, discount: float) -> None:
    inputs = random_inputs(seed)
    scored = [bool(p) and bool(m.any()) for p, m in zip(inputs.present, inputs.mask, strict=True)]
    base: list[float | None] = []
    for i, group in enumerate(inputs.group_ids.tolist()):
        members = [j for j, g in enumerate(inputs.group_ids.tolist()) if g == group and scored[j]]
        mean = sum(float(inputs.scores[j]) for j in members) / max(len(members), 1)
        base.append(float(inputs.scores[i]) - mean if scored[i] and len(members) > 1 else None)
    got = reinforce_plus_plus_baseline(inputs, discount).advantages
    torch.testing.assert_close(got, whitened(by_loop(inputs, base, discount)), rtol=1e-9, atol=1e-9)


@given(SEEDS, FRACTIONS)
@settings(max_examples=40, deadline=None)
def test_remax_is_the_distance_to_the_greedy_answer(seed: int, discount: float) -> None:
    inputs = random_inputs(seed)
    assert inputs.baseline_scores is not None
    difference = (inputs.scores - inputs.baseline_scores).tolist()
    base = [None if math.isnan(x) else x for x in difference]
    got = remax(inputs, discount)
    expected = by_loop(inputs, base, discount).nan_to_num(0.0)
    torch.testing.assert_close(got.advantages, expected, rtol=1e-10, atol=1e-12)
    takes_part = inputs.mask.any(dim=1) & ~(inputs.scores - inputs.baseline_scores).isnan()
    assert got.num_without_score == int((~takes_part).sum())


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_remax_without_discount_is_reward_to_go_minus_the_baseline(seed: int) -> None:
    inputs = random_inputs(seed)
    inputs = changed(inputs, baseline_scores=torch.arange(7.0).double())
    mask = counted_mask(inputs)
    rewards = token_rewards(inputs.scores, inputs.present, inputs.mask, inputs.kl_penalties)
    to_go = discounted_reward_to_go(rewards, mask, 1.0)
    expected = torch.where(mask, to_go - torch.arange(7.0)[:, None], 0.0)
    torch.testing.assert_close(remax(inputs, 1.0).advantages, expected, rtol=1e-12, atol=1e-12)


def test_a_score_equal_to_the_greedy_one_gives_exactly_zero() -> None:
    scores = [0.7, 0.1, 1e6 + 0.1]
    baseline = torch.tensor(scores, dtype=torch.float64)
    result = remax(answers([3, 1, 2], scores, [0, 1, 2], baseline_scores=baseline), discount=0.5)
    assert result.advantages.abs().sum() == 0.0


def test_a_missing_baseline_counts_as_without_score() -> None:
    baseline = torch.tensor([1.0, math.nan, 2.0], dtype=torch.float64)
    result = remax(answers([1, 1, 1], [4.0, 4.0, 4.0], [0, 0, 1], baseline_scores=baseline), discount=1.0)
    assert result.advantages[:, 0].tolist() == [3.0, 0.0, 2.0]
    assert (result.num_without_score, result.num_groups, result.num_singletons) == (1, 2, 2)


@given(SEEDS, FRACTIONS, st.booleans())
@settings(max_examples=40, deadline=None)
def test_gae_with_smoothing_1_is_reward_to_go_minus_value(seed: int, discount: float, is_whitened: bool) -> None:
    inputs = random_inputs(seed)
    assert inputs.values is not None
    mask = counted_mask(inputs)
    rewards = token_rewards(inputs.scores, inputs.present, inputs.mask, inputs.kl_penalties)
    to_go = discounted_reward_to_go(rewards, mask, discount)
    expected = torch.where(mask, to_go - inputs.values, 0.0)
    result = gae(inputs, discount, smoothing=1.0, whiten=is_whitened)
    expected = whiten(expected, mask) if is_whitened else expected
    torch.testing.assert_close(result.advantages, expected, rtol=1e-9, atol=1e-9)
    # The critic's targets are those before whitening.
    assert result.returns is not None
    torch.testing.assert_close(result.returns, to_go, rtol=0, atol=1e-12)


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_gae_without_a_critic_is_reinforce_plus_plus(seed: int) -> None:
    inputs = random_inputs(seed)
    result = gae(changed(inputs, values=torch.zeros_like(inputs.mask.double())), 1.0, 1.0, whiten=True)
    assert result.advantages.tolist() == reinforce_plus_plus(inputs, 1.0).advantages.tolist()


def test_gae_targets_of_answers_without_a_score_are_zero() -> None:
    inputs = one_token([None, 2.0], [0, 0], values=torch.tensor([[5.0], [1.0]]))
    result = gae(inputs, 1.0, 0.95, whiten=False)
    assert result.returns is not None
    assert result.returns.tolist() == [[0.0], [2.0]]
    assert result.advantages.tolist() == [[0.0], [1.0]]


def test_reinforce_plus_plus_without_kl_is_whitened_scores() -> None:
    scores, mask = [1.0, 4.0, -2.0, 3.5], torch.ones(4, 3, dtype=torch.bool)
    equally_long = reinforce_plus_plus(answers([3, 3, 3, 3], scores, [0, 0, 1, 1]), 1.0).advantages
    repeated = torch.tensor(scores, dtype=torch.float64)[:, None].expand(4, 3)
    torch.testing.assert_close(equally_long, whiten(repeated, mask), rtol=1e-12, atol=1e-12)
    one = reinforce_plus_plus(one_token(scores, [0, 0, 1, 1]), 1.0).advantages
    torch.testing.assert_close(one, whiten(repeated[:, :1], mask[:, :1]), rtol=1e-12, atol=1e-12)
    # Tokens for answers changes the degrees of freedom alone: 11 of 12 instead of 3 of 4.
    factor = math.sqrt((3 / 4) / (11 / 12))
    torch.testing.assert_close(one, equally_long[:, :1] * factor, rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [0.7, 0.1, 1e6 + 0.1])
def test_equal_scores_give_exactly_zero_after_whitening(value: float) -> None:
    inputs = answers([3, 1, 2, 2, 3, 1, 1, 2], [value] * 8, [0, 0, 0, 0, 1, 1, 1, 1])
    plain, baseline = reinforce_plus_plus(inputs, 1.0), reinforce_plus_plus_baseline(inputs, 0.5)
    critic = gae(changed(inputs, values=torch.zeros_like(inputs.mask.double())), 1.0, 1.0, whiten=True)
    for result in (plain, baseline, critic):
        assert result.advantages.abs().sum() == 0.0
        assert (result.num_groups, result.num_zero_variance_groups) == (2, 2)
    # The groups need not agree with each other where each is compared with itself.
    apart = answers([3, 1, 2, 2, 3, 1, 1, 2], [value] * 4 + [5.0] * 4, [0, 0, 0, 0, 1, 1, 1, 1])
    assert reinforce_plus_plus_baseline(apart, 0.5).advantages.abs().sum() == 0.0


def test_the_baseline_form_special_cases() -> None:
    scores, mask = [1.0, 4.0, -2.0, 3.5], torch.ones(4, 1, dtype=torch.bool)
    one_group = reinforce_plus_plus_baseline(one_token(scores, [5] * 4), 1.0).advantages
    expected = whiten(torch.tensor(scores, dtype=torch.float64)[:, None], mask)
    torch.testing.assert_close(one_group, expected, rtol=1e-12, atol=1e-12)
    # Equally long: a group of equal scores stays at 0 beside others. Else it gets minus the mean over the step.
    flat = reinforce_plus_plus_baseline(answers([2, 2, 2, 2], [1.0, 5.0, 3.0, 3.0], [0, 0, 1, 1]), 1.0)
    assert flat.advantages[2:].abs().max() < 1e-12
    uneven = reinforce_plus_plus_baseline(answers([1, 3, 2, 2], [1.0, 5.0, 3.0, 3.0], [0, 0, 1, 1]), 1.0)
    assert uneven.advantages[2:, :2].max() < -0.1


def test_a_group_of_one_has_no_baseline() -> None:
    inputs = answers([1, 3, 2], [1.0, 5.0, 9.0], [0, 0, 1], kl_penalties=torch.full((3, 3), 0.5))
    result = reinforce_plus_plus_baseline(inputs, 1.0)
    without = reinforce_plus_plus_baseline(
        answers([1, 3], [1.0, 5.0], [0, 0], kl_penalties=torch.full((2, 3), 0.5)), 1.0
    )
    assert result.advantages[2].tolist() == [0.0, 0.0, 0.0]
    assert result.advantages[:2].tolist() == without.advantages.tolist()
    assert result.num_singletons == 1


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_the_baseline_form_is_whitened_group_centred_without_kl(seed: int) -> None:
    inputs = changed(random_inputs(seed, num_rows=8), kl_penalties=None)
    inputs = changed(inputs, group_ids=torch.zeros(8, dtype=torch.long))
    mask = counted_mask(inputs)
    if int(mask.any(dim=1).sum()) > 1:
        expected = whiten(group_centred(inputs).advantages, mask)
        torch.testing.assert_close(reinforce_plus_plus_baseline(inputs, 0.3).advantages, expected)


def test_what_an_estimator_needs_is_asked_for() -> None:
    plain = one_token([1.0, 2.0], [0, 0])
    with pytest.raises(ValueError, match="greedy"):
        remax(plain, 1.0)
    with pytest.raises(ValueError, match="critic"):
        gae(plain, 1.0, 1.0, whiten=True)
    with pytest.raises(ValueError, match="a baseline score is not finite"):
        remax(changed(plain, baseline_scores=torch.tensor([1.0, math.inf])), 1.0)
    with pytest.raises(ValueError, match="a value is not finite"):
        gae(changed(plain, values=torch.tensor([[1.0], [math.nan]])), 1.0, 1.0, whiten=True)


@pytest.mark.parametrize("bad", [-0.1, 1.5])
def test_knobs_out_of_range_are_refused(bad: float) -> None:
    inputs = one_token([1.0, 2.0], [0, 0], values=torch.ones(2, 1), baseline_scores=torch.ones(2))
    for estimate in (reinforce_plus_plus, reinforce_plus_plus_baseline, remax):
        with pytest.raises(ValueError, match="discount"):
            estimate(inputs, bad)
    with pytest.raises(ValueError, match="discount"):
        gae(inputs, bad, 1.0, whiten=True)
    with pytest.raises(ValueError, match="smoothing"):
        gae(inputs, 1.0, bad, whiten=True)
