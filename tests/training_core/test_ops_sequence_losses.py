"""Losses on the ratio of whole answers, against loops over answers and against the token-level ones."""

from __future__ import annotations

import math

import pytest
import torch
from policy_cases import AGGREGATIONS, LOSSES, Batch
from torch import Tensor

from training_core.ops.aggregation import sequence_mean_token_mean_weights, token_mean_weights
from training_core.ops.policy_losses import clipped_surrogate, gspo, gspo_token, sequence_surrogate

SEQUENCE_LOSSES = {"sequence_surrogate": sequence_surrogate, "gspo": gspo, "gspo_token": gspo_token}
BOUNDS = {"sequence_surrogate": (0.3, 0.3), "gspo": (0.1, 0.05), "gspo_token": (0.1, 0.05)}
LENGTHS = [6, 3, 0, 5, 4, 1, 2]


def loop_answer(name: str, log_ratios: list[float], advantages: list[float]) -> tuple[list[float], list[bool]]:
    """The losses of one answer's tokens, read off the formulas."""
    low, high = BOUNDS[name]
    power = 1.0 if name == "sequence_surrogate" else 1.0 / len(log_ratios)
    ratio = math.prod(math.exp(value) for value in log_ratios) ** power
    bounded = min(max(ratio, 1.0 - low), 1.0 + high)
    objectives = [min(ratio * advantage, bounded * advantage) for advantage in advantages]
    # Between plain and bounded only rounding can make a difference where the ratio is inside the bounds.
    clipped = [bounded * a < ratio * a and not math.isclose(bounded, ratio) for a in advantages]
    return [-objective for objective in objectives], clipped


@pytest.mark.parametrize("name", SEQUENCE_LOSSES)
@pytest.mark.parametrize("per_token", [False, True])
def test_answer_losses_equal_a_plain_loop(name: str, per_token: bool) -> None:
    batch = Batch(LENGTHS, drift=0.3)
    advantages = batch.token_advantages if per_token else batch.advantages
    losses, is_clipped = LOSSES[name](batch.parameter, batch.old, advantages, batch.mask)
    for i, length in enumerate(LENGTHS):
        if length == 0:
            continue
        log_ratios = (batch.parameter - batch.old)[i, :length].tolist()
        expected, clipped = loop_answer(name, log_ratios, advantages[i, :length].tolist())
        assert losses[i, :length].tolist() == pytest.approx(expected, rel=1e-12)
        assert is_clipped[i, :length].tolist() == clipped
    assert (losses[~batch.mask] == 0).all()
    assert is_clipped.any()
    assert not is_clipped[batch.mask].all()


@pytest.mark.parametrize("name", SEQUENCE_LOSSES)
@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_of_one_token_each_is_the_clipped_surrogate(name: str, drift: float) -> None:
    batch = Batch([1, 0, 1, 1, 1, 1], drift=drift)
    weights = token_mean_weights(batch.mask)

    def run(loss: object) -> tuple[Tensor, Tensor, Tensor]:
        parameter = batch.parameter.clone().requires_grad_(True)
        losses, is_clipped = loss(  # type: ignore[operator]
            parameter, batch.old, batch.advantages, batch.mask, clip_low=0.1, clip_high=0.2
        )
        (losses * weights).sum().backward()
        assert parameter.grad is not None
        return losses.detach(), is_clipped, parameter.grad

    for found, expected in zip(run(SEQUENCE_LOSSES[name]), run(clipped_surrogate), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["sequence_surrogate", "gspo"])
def test_answer_gradients_are_those_of_the_value(name: str) -> None:
    batch = Batch([4, 2, 0, 3], drift=0.3)
    parameter = batch.parameter.clone().requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda logprobs: LOSSES[name](logprobs, batch.old, batch.token_advantages, batch.mask)[0], parameter
    )


def test_gspo_aggregated_as_published_is_the_papers_objective() -> None:
    """The mean over answers of min(s A, clip(s) A), one number an answer, differentiated by plain autograd."""
    batch = Batch([6, 3, 5, 4, 1, 2], drift=0.2)
    value, gradient = batch.gradient(LOSSES["gspo"], sequence_mean_token_mean_weights(batch.mask))
    parameter = batch.parameter.clone().requires_grad_(True)
    objectives = []
    for i in range(batch.num_rows):
        counted = batch.mask[i]
        ratio = (parameter[i][counted] - batch.old[i][counted]).mean().exp()
        advantage = batch.advantages[i, 0]
        objectives.append(torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.05) * advantage))
    loss = -torch.stack(objectives).mean()
    loss.backward()
    assert value == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-15)


def test_sequence_surrogate_aggregated_as_published_is_the_mean_over_answers() -> None:
    batch = Batch([6, 3, 5, 4, 1, 2], drift=0.2)
    value, gradient = batch.gradient(LOSSES["sequence_surrogate"], sequence_mean_token_mean_weights(batch.mask))
    parameter = batch.parameter.clone().requires_grad_(True)
    objectives = []
    for i in range(batch.num_rows):
        counted = batch.mask[i]
        ratio = (parameter[i][counted].sum() - batch.old[i][counted].sum()).exp()
        advantage = batch.advantages[i, 0]
        objectives.append(torch.minimum(ratio * advantage, ratio.clamp(0.7, 1.3) * advantage))
    loss = -torch.stack(objectives).mean()
    loss.backward()
    assert value == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-15)


def test_with_one_advantage_an_answer_gspo_and_gspo_token_agree() -> None:
    batch = Batch(LENGTHS, drift=0.3)
    weights = sequence_mean_token_mean_weights(batch.mask)
    by_answer, by_token = (batch.gradient(LOSSES[name], weights) for name in ("gspo", "gspo_token"))
    assert by_answer[0] == pytest.approx(by_token[0], rel=1e-12)
    torch.testing.assert_close(by_answer[1], by_token[1], rtol=1e-12, atol=1e-15)
    clipped = [
        LOSSES[name](batch.parameter, batch.old, batch.advantages, batch.mask)[1] for name in ("gspo", "gspo_token")
    ]
    assert torch.equal(*clipped)


def test_gspo_token_gives_each_token_its_own_advantage() -> None:
    """The gradient of token t is -s_i * A_t, where nothing is clipped, and independent of the other tokens' A."""
    batch = Batch([4, 3], drift=0.02)
    parameter = batch.parameter.clone().requires_grad_(True)
    losses, is_clipped = LOSSES["gspo_token"](parameter, batch.old, batch.token_advantages, batch.mask)
    losses.sum().backward()
    assert not is_clipped.any()
    for i in range(2):
        counted = batch.mask[i]
        ratio = (batch.parameter[i] - batch.old[i])[counted].mean().exp()
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad[i][counted], -ratio * batch.token_advantages[i][counted])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_on_policy_gspo_token_is_reinforce_for_token_advantages_in_every_aggregation(aggregation: str) -> None:
    batch = Batch(drift=0.0)
    batch.advantages = batch.token_advantages
    weights = AGGREGATIONS[aggregation](batch.mask, batch.group_ids)
    _, gradient = batch.gradient(LOSSES["gspo_token"], weights)
    torch.testing.assert_close(gradient, torch.where(batch.mask, -batch.token_advantages * weights, 0.0))


def test_clipped_answers_pass_no_gradient_at_any_token() -> None:
    batch = Batch(LENGTHS, drift=0.3)
    for name in SEQUENCE_LOSSES:
        parameter = batch.parameter.clone().requires_grad_(True)
        losses, is_clipped = LOSSES[name](parameter, batch.old, batch.advantages, batch.mask)
        losses.sum().backward()
        assert parameter.grad is not None
        assert (parameter.grad[is_clipped] == 0).all()
        assert (parameter.grad[batch.mask & ~is_clipped] != 0).all()


def test_the_ratio_of_a_long_answer_may_overflow_where_it_is_clipped() -> None:
    mask = torch.ones(1, 2000, dtype=torch.bool)
    logprobs = torch.zeros(1, 2000, requires_grad=True)
    losses, is_clipped = sequence_surrogate(
        logprobs, logprobs.detach() - 1.0, torch.ones(1, 1), mask, clip_low=0.2, clip_high=0.2
    )
    losses.sum().backward()
    assert is_clipped.all()
    torch.testing.assert_close(losses, torch.full_like(losses, -1.2))
    assert logprobs.grad is not None
    assert (logprobs.grad == 0).all()


def test_a_small_clip_range_is_told_from_rounding_over_a_long_float32_answer() -> None:
    """Bounds of 3e-4 and 4e-4 on a mean over 4096 tokens: just inside is not clipped, just outside is."""
    mask = torch.ones(1, 4096, dtype=torch.bool)
    old = torch.full((1, 4096), -3.0)
    for shift, clipped in [(3.9e-4, False), (4.1e-4, True)]:
        # Multiples of 2 ** -20 near 3 are exact in float32.
        logprobs = old.clone()
        logprobs[0, :2048] += 2 * round(shift * 2**20) / 2**20
        _, is_clipped = gspo(logprobs, old, torch.ones(1, 1), mask, clip_low=3e-4, clip_high=4e-4)
        assert is_clipped.all().item() is clipped


def test_the_ratio_of_a_float32_answer_is_summed_in_float64() -> None:
    mask = torch.ones(1, 5000, dtype=torch.bool)
    logprobs = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)) / 1000
    total = math.fsum(logprobs[0].tolist())
    for loss, expected in [(gspo, math.exp(total / 5000)), (sequence_surrogate, math.exp(total))]:
        losses, _ = loss(logprobs, 0 * logprobs, torch.ones(1, 1), mask, clip_low=0.9, clip_high=9.0)
        assert losses[0, 0].item() == pytest.approx(-expected, rel=1e-13)
