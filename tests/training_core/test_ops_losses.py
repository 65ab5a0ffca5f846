"""Token-level policy losses, and the invariance of every loss, KL term and aggregation to how rows are cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import policy_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import AGGREGATIONS, KL_TERMS, LOSSES, WITH_A_RATIO, Batch
from torch import Tensor

from training_core.ops.masking import masked_sum
from training_core.ops.policy_losses import cispo, clipped_surrogate, importance_weighted, reinforce, sapo
from training_core.ops.shaping import soft_overlong_penalty
from training_core.registries import AGGREGATIONS as REGISTERED_AGGREGATIONS
from training_core.registries import KL_LOSSES, POLICY_LOSSES

SPLITS = [[[0], [1], [2], [3], [4], [5]], [[5, 4, 3], [2, 1, 0]], [[0, 5], [1, 2, 3, 4]], [[3, 1, 4, 0, 5, 2]]]
ONE = torch.ones(1, 1, dtype=torch.float64)


def test_every_registered_name_is_among_the_cases() -> None:
    assert set(POLICY_LOSSES) <= set(LOSSES)
    assert set(KL_LOSSES) <= set(KL_TERMS)
    assert set(REGISTERED_AGGREGATIONS) <= set(AGGREGATIONS)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kl", KL_TERMS)
def test_gradients_do_not_depend_on_split_order_or_padding(aggregation: str, loss: str, kl: str) -> None:
    batch = Batch()
    weights = AGGREGATIONS[aggregation](batch.mask, batch.group_ids)
    value, gradient = batch.gradient(LOSSES[loss], weights, term=KL_TERMS[kl])
    assert torch.isfinite(gradient).all()
    assert (gradient[~batch.mask] == 0).all()
    assert gradient.abs().sum() > 0
    for splits, padding in zip(SPLITS, [(0, 0), (0, 3), (3, 0), (1, 2)], strict=True):
        other_value, other = batch.gradient(LOSSES[loss], weights, term=KL_TERMS[kl], splits=splits, padding=padding)
        assert other_value == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(other, gradient, rtol=1e-12, atol=1e-15)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("loss", LOSSES)
def test_any_lengths_cuts_and_padding_give_the_same_gradient(loss: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)))) | {0, len(lengths)})
    padding = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    aggregation = AGGREGATIONS[data.draw(st.sampled_from(sorted(AGGREGATIONS)))]
    batch = Batch(lengths, seed=data.draw(st.integers(0, 1000)))
    weights = aggregation(batch.mask, batch.group_ids)
    value, gradient = batch.gradient(LOSSES[loss], weights)
    splits = [order[start:end] for start, end in itertools.pairwise(cuts)]
    other_value, other = batch.gradient(LOSSES[loss], weights, splits=splits, padding=padding)
    assert other_value == pytest.approx(value, rel=1e-11, abs=1e-13)
    torch.testing.assert_close(other, gradient, rtol=1e-11, atol=1e-13)
    assert (gradient[~batch.mask] == 0).all()


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf, 1e308])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_stands_under_the_mask_changes_nothing(loss: str, fill: float) -> None:
    results = []
    for value in (0.0, fill):
        batch = Batch(fill=value)
        results.append(batch.gradient(LOSSES[loss], AGGREGATIONS["token_mean"](batch.mask)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_without_a_token_have_no_loss_and_no_gradient(loss: str) -> None:
    batch = Batch([0, 0])
    value, gradient = batch.gradient(LOSSES[loss], torch.ones_like(batch.parameter))
    assert value == 0.0
    assert gradient.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("loss", LOSSES)
def test_with_all_ratios_one_every_loss_has_the_gradient_of_reinforce(loss: str) -> None:
    batch = Batch(drift=0.0)
    weights = AGGREGATIONS["sequence_mean_token_mean"](batch.mask)
    _, gradient = batch.gradient(LOSSES[loss], weights)
    # The ratio of a whole answer is moved by each of its tokens as much as by all of them: a sum, not a mean.
    expected_weights = AGGREGATIONS["sequence_mean_token_sum"](batch.mask) if loss == "sequence_surrogate" else weights
    expected = torch.where(batch.mask, -batch.advantages * expected_weights, 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("loss", WITH_A_RATIO)
def test_with_all_ratios_one_nothing_is_clipped_and_the_value_is_minus_the_advantage(loss: str) -> None:
    batch = Batch(drift=0.0)
    losses, is_clipped = LOSSES[loss](batch.parameter, batch.old, batch.advantages, batch.mask)
    # SAPO's gate is 2 / tau at ratio 1.
    gate = torch.where(batch.advantages > 0.0, 2.0, 2.0 / 1.05) if loss == "sapo" else torch.tensor(1.0)
    torch.testing.assert_close(losses, torch.where(batch.mask, -batch.advantages * gate, 0.0))
    assert not is_clipped.any()


def loop_token_loss(name: str, logprob: float, old: float, advantage: float) -> tuple[float, bool]:
    """The loss of one token, read off the formulas."""
    ratio = math.exp(logprob - old)
    if name in ("clipped_surrogate", "dual_clip"):
        bounded = min(max(ratio, 0.8), 1.28)
        objective = min(ratio * advantage, bounded * advantage)
        if name == "dual_clip" and advantage < 0:
            objective = max(objective, 1.1 * advantage)
        return -objective, objective != ratio * advantage
    if name == "reinforce":
        return -advantage * logprob, False
    if name == "importance_weighted":
        return -advantage * ratio, False
    if name.startswith("cispo"):
        low = 0.0 if name == "cispo_without_lower_bound" else 0.8
        weight = min(max(ratio, low), 1.28)
        return -weight * advantage * logprob, weight != ratio
    temperature = 1.0 if advantage > 0 else 1.05
    return -advantage * 4.0 / temperature / (1.0 + math.exp(-temperature * (ratio - 1.0))), False


TOKEN_LEVEL = [name for name in LOSSES if name not in ("sequence_surrogate", "gspo", "gspo_token")]


@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_token_losses_equal_a_plain_loop(name: str) -> None:
    batch = Batch([6, 3, 0, 5, 4], drift=0.4)
    losses, is_clipped = LOSSES[name](batch.parameter, batch.old, batch.token_advantages, batch.mask)
    for i, t in batch.mask.nonzero().tolist():
        values = (batch.parameter[i, t].item(), batch.old[i, t].item(), batch.token_advantages[i, t].item())
        expected, clipped = loop_token_loss(name, *values)
        assert losses[i, t].item() == pytest.approx(expected, rel=1e-12)
        assert is_clipped[i, t].item() is clipped
    assert (losses[~batch.mask] == 0).all()
    assert is_clipped.any().item() is (name.startswith("cispo") or "cl" in name)


@pytest.mark.parametrize("name", ["clipped_surrogate", "dual_clip", "reinforce", "importance_weighted", "sapo"])
def test_token_gradients_are_those_of_the_value(name: str) -> None:
    batch = Batch([4, 2], drift=0.4)
    parameter = batch.parameter.clone().requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda logprobs: LOSSES[name](logprobs, batch.old, batch.token_advantages, batch.mask)[0], parameter
    )


def gradient_at(loss: Callable[..., tuple[Tensor, Tensor]], log_ratio: float, advantage: float) -> tuple[float, float]:
    logprob = (ONE * log_ratio).requires_grad_(True)
    value, _ = loss(logprob, 0 * ONE, advantage * ONE, ONE > 0)
    value.backward()
    assert logprob.grad is not None
    return value.item(), logprob.grad.item()


def test_cispo_keeps_the_gradient_of_a_token_whose_weight_is_bounded() -> None:
    for loss, log_ratio, weight in [
        ("cispo", 2.0, 1.28),
        ("cispo", -2.0, 0.8),
        ("cispo_without_lower_bound", -2.0, math.exp(-2.0)),
        ("cispo", 0.1, math.exp(0.1)),
    ]:
        value, gradient = gradient_at(LOSSES[loss], log_ratio, -1.5)
        assert gradient == pytest.approx(1.5 * weight, rel=1e-12)
        assert value == pytest.approx(1.5 * weight * log_ratio, rel=1e-12)


def test_wide_bounds_and_low_temperatures_are_importance_weighting() -> None:
    batch = Batch(drift=0.4)
    weights = AGGREGATIONS["token_mean"](batch.mask)
    _, expected = batch.gradient(importance_weighted, weights)
    for loss, tolerance in [
        (lambda *values: clipped_surrogate(*values, clip_low=0.999, clip_high=1e6), 1e-12),
        (lambda *values: cispo(*values, clip_low=None, clip_high=1e6), 1e-12),
        (lambda *values: sapo(*values, temperature_positive=1e-4, temperature_negative=1e-4), 1e-6),
    ]:
        torch.testing.assert_close(batch.gradient(loss, weights)[1], expected, rtol=tolerance, atol=1e-15)


def test_dual_clip_binds_only_where_a_bad_token_has_become_likely() -> None:
    for advantage, log_ratio in [(1.0, 2.0), (1.0, -2.0), (-1.0, 0.05), (-1.0, -2.0)]:
        plain = gradient_at(LOSSES["clipped_surrogate"], log_ratio, advantage)
        assert gradient_at(LOSSES["dual_clip"], log_ratio, advantage) == plain
    assert gradient_at(LOSSES["clipped_surrogate"], 2.0, -1.0) == pytest.approx((math.exp(2.0), math.exp(2.0)))
    assert gradient_at(LOSSES["dual_clip"], 2.0, -1.0) == (1.1, 0.0)


def test_clipped_tokens_pass_no_gradient() -> None:
    assert gradient_at(LOSSES["clipped_surrogate"], 0.5, 1.0) == (-1.28, 0.0)
    assert gradient_at(LOSSES["clipped_surrogate"], -0.5, -1.0) == (0.8, 0.0)
    assert gradient_at(LOSSES["clipped_surrogate"], -0.5, 1.0) == pytest.approx((-math.exp(-0.5),) * 2)


def test_ratios_that_overflow_give_numbers_wherever_the_formula_does() -> None:
    assert gradient_at(LOSSES["clipped_surrogate"], 1e4, 1.0) == (-1.28, 0.0)
    assert gradient_at(LOSSES["dual_clip"], 1e4, -1.0) == (1.1, 0.0)
    assert gradient_at(LOSSES["cispo"], 1e4, -1.0) == pytest.approx((1.28e4, 1.28))
    assert gradient_at(LOSSES["sapo"], 1e4, 2.0) == (-8.0, 0.0)
    for loss in LOSSES:
        assert gradient_at(LOSSES[loss], 1e4, 0.0) == (0.0, 0.0)
    # Unbounded ones say so instead of hiding it: the loss is infinite, which stops the training.
    assert gradient_at(LOSSES["clipped_surrogate"], 1e4, -1.0)[0] == math.inf
    assert gradient_at(LOSSES["importance_weighted"], 1e4, 1.0)[0] == -math.inf


def test_reinforce_reads_no_old_log_probs() -> None:
    losses, is_clipped = reinforce(-2 * ONE, math.nan * ONE, 3 * ONE, ONE > 0)
    assert (losses.item(), is_clipped.item()) == (6.0, False)


def test_a_token_that_the_policy_calls_impossible_costs_nothing_without_an_advantage() -> None:
    for loss in LOSSES.values():
        losses, _ = loss(-math.inf * ONE, -ONE, 0 * ONE, ONE > 0)
        assert losses.item() == 0.0


def test_advantages_of_one_column_are_those_of_every_token() -> None:
    batch = Batch()
    for loss in LOSSES.values():
        whole = loss(batch.parameter, batch.old, batch.advantages, batch.mask)
        column = loss(batch.parameter, batch.old, batch.advantages[:, :1], batch.mask)
        assert torch.equal(whole[0], column[0])


@pytest.mark.parametrize(
    ("loss", "knobs"),
    [
        *((loss, {"clip_low": low, "clip_high": 0.2}) for loss in ("clipped_surrogate", "cispo") for low in (0.0, 1.0)),
        *((loss, {"clip_low": 0.2, "clip_high": 0.0}) for loss in ("sequence_surrogate", "gspo", "gspo_token")),
        ("cispo", {"clip_low": None, "clip_high": 0.0}),
        ("clipped_surrogate", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.0}),
        ("sapo", {"temperature_positive": 0.0}),
        ("sapo", {"temperature_negative": -1.0}),
    ],
)
def test_knobs_out_of_range_are_refused(loss: str, knobs: dict[str, float | None]) -> None:
    with pytest.raises(ValueError, match=r"clip_low|dual_clip|temperature_positive"):
        getattr(policy_cases.policy_losses, loss)(ONE, ONE, ONE, ONE > 0, **knobs)


def test_a_mask_must_be_bool() -> None:
    with pytest.raises(TypeError, match="bool"):
        masked_sum(torch.ones(2), torch.ones(2))


def test_soft_overlong_penalty_by_hand() -> None:
    penalty = soft_overlong_penalty(torch.tensor([0, 12, 16, 20, 30]), max_tokens=20, buffer_tokens=8)
    assert penalty.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0])
    with pytest.raises(ValueError, match="buffer_tokens"):
        soft_overlong_penalty(torch.tensor([1]), max_tokens=20, buffer_tokens=21)
