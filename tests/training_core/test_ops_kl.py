"""KL estimators against exact sums over a six-token distribution: what each is worth as a value and as a gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from training_core.ops.kl import k1, k2, k3
from training_core.registries import KL_LOSSES

VOCABULARY = 6


def distributions() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_(True)
    reference = torch.log_softmax(torch.randn(VOCABULARY, generator=generator, dtype=torch.float64), dim=0)
    return logits, reference


def gradient_of(value: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(value, logits)[0]


def exact_gradients() -> tuple[Tensor, Tensor]:
    logits, reference = distributions()
    logp = torch.log_softmax(logits, dim=0)
    reverse = gradient_of((logp.exp() * (logp - reference)).sum(), logits)
    logp = torch.log_softmax(logits, dim=0)
    forward = gradient_of((reference.exp() * (reference - logp)).sum(), logits)
    return reverse, forward


def expected_gradient_in_loss(name: str) -> Tensor:
    """The gradient of a loss term, averaged over tokens drawn from the policy: sampling carries no gradient."""
    logits, reference = distributions()
    logp = torch.log_softmax(logits, dim=0)
    term = k1(logp - reference) if name == "k1" else KL_LOSSES[name](logp - reference, logp - logp.detach())
    return gradient_of((logp.detach().exp() * term).sum(), logits)


@pytest.mark.parametrize("name", ["k2", "k3_ratio"])
def test_reverse_estimators_have_the_gradient_of_the_reverse_kl(name: str) -> None:
    reverse, _ = exact_gradients()
    torch.testing.assert_close(expected_gradient_in_loss(name), reverse, rtol=1e-12, atol=1e-14)


def test_only_k3_with_ratio_stays_exact_when_the_policy_has_moved_since_the_rollout() -> None:
    logits, reference = distributions()
    generator = torch.Generator().manual_seed(1)
    drift = 0.3 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    sampler = torch.log_softmax(logits.detach() + drift, dim=0)
    reverse, forward = exact_gradients()

    def gradient(name: str) -> Tensor:
        logp = torch.log_softmax(logits, dim=0)
        return gradient_of((sampler.exp() * KL_LOSSES[name](logp - reference, logp - sampler)).sum(), logits)

    torch.testing.assert_close(gradient("k3_ratio"), reverse, rtol=1e-12, atol=1e-14)
    assert (gradient("k2") - reverse).norm() > 0.1 * reverse.norm()
    assert (gradient("k3") - forward).norm() > 0.05 * forward.norm()


def test_plain_k3_has_the_gradient_of_the_forward_kl() -> None:
    reverse, forward = exact_gradients()
    torch.testing.assert_close(expected_gradient_in_loss("k3"), forward, rtol=1e-12, atol=1e-14)
    assert (expected_gradient_in_loss("k3") - reverse).norm() > 0.1 * reverse.norm()


def test_k1_in_the_loss_does_nothing() -> None:
    assert expected_gradient_in_loss("k1").abs().max() < 1e-14


@pytest.mark.parametrize("estimate", [k1, k3])
def test_k1_and_k3_are_worth_the_exact_kl(estimate: Callable[[Tensor], Tensor]) -> None:
    logits, reference = distributions()
    logp = torch.log_softmax(logits.detach(), dim=0)
    exact = (logp.exp() * (logp - reference)).sum()
    assert (logp.exp() * estimate(logp - reference)).sum().item() == pytest.approx(exact.item(), rel=1e-12)


def test_k1_in_the_reward_has_the_gradient_of_the_reverse_kl_of_whole_answers() -> None:
    """Two-token answers: REINFORCE with minus the summed k1 as reward goes down the exact sequence KL."""
    generator = torch.Generator().manual_seed(2)
    first = torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_(True)
    second = torch.randn(3, 3, generator=generator, dtype=torch.float64).requires_grad_(True)
    ref_first = torch.log_softmax(torch.randn(3, generator=generator, dtype=torch.float64), dim=0)
    ref_second = torch.log_softmax(torch.randn(3, 3, generator=generator, dtype=torch.float64), dim=1)

    def answers() -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(first, dim=0)[:, None] + torch.log_softmax(second, dim=1)
        return logp, ref_first[:, None] + ref_second

    logp, reference = answers()
    exact = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), (first, second))
    logp, reference = answers()
    penalty = k1(logp - reference).detach()
    estimated = torch.autograd.grad((logp.detach().exp() * penalty * logp).sum(), (first, second))
    for one, other in zip(exact, estimated, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("estimate", [k1, k2, k3])
def test_every_estimator_is_zero_between_equal_policies(estimate: Callable[[Tensor], Tensor]) -> None:
    assert estimate(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


def test_nothing_is_clamped_far_from_the_reference() -> None:
    log_ratio = torch.tensor([-4.0, 4.0], dtype=torch.float64, requires_grad=True)
    k3(log_ratio).sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad[0].item() == pytest.approx(1 - torch.e**4, rel=1e-9)
    assert k3(torch.tensor(1e-6, dtype=torch.float64)).item() == pytest.approx(5e-13, rel=1e-3)
    assert k2(torch.tensor(-4.0)).item() == 8.0
