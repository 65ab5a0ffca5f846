"""KL estimators as values: loops, special cases, nothing clamped. Their gradients: test_exact_gradients.py."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from policy_cases import KL_TERMS
from torch import Tensor

from training_core.ops.kl import absolute, k1, k1_with_ratio, k2, k3, k3_straight_through, k3_with_ratio

FORMULAS: dict[Callable[[Tensor], Tensor], Callable[[float], float]] = {
    k1: lambda x: x,
    k2: lambda x: x * x / 2,
    k3: lambda x: math.exp(-x) - 1 + x,
    absolute: lambda x: x if x > 0 else -x,
    k3_straight_through: lambda x: math.exp(-x) - 1 + x,
}
WITH_RATIO: dict[Callable[[Tensor, Tensor], Tensor], Callable[[float], float]] = {
    k1_with_ratio: FORMULAS[k1],
    k3_with_ratio: FORMULAS[k3],
}


def log_ratios(num: int = 40) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def distributions() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    policy, reference = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(2))
    return torch.log_softmax(policy, dim=0), torch.log_softmax(reference, dim=0)


@pytest.mark.parametrize("estimate", FORMULAS)
def test_estimators_equal_a_plain_loop(estimate: Callable[[Tensor], Tensor]) -> None:
    values = log_ratios()
    assert estimate(values).tolist() == pytest.approx([FORMULAS[estimate](x) for x in values.tolist()], rel=1e-12)


@pytest.mark.parametrize("estimate", WITH_RATIO)
def test_ratio_estimators_equal_a_plain_loop(estimate: Callable[[Tensor, Tensor], Tensor]) -> None:
    values, importance = log_ratios().view(2, -1)
    pairs = zip(values.tolist(), importance.tolist(), strict=True)
    expected = [math.exp(y) * WITH_RATIO[estimate](x) for x, y in pairs]
    assert estimate(values, importance).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("estimate", [k1, k3, k3_straight_through])
def test_these_are_worth_the_exact_kl(estimate: Callable[[Tensor], Tensor]) -> None:
    policy, reference = distributions()
    exact = (policy.exp() * (policy - reference)).sum()
    assert (policy.exp() * estimate(policy - reference)).sum().item() == pytest.approx(exact.item(), rel=1e-12)


@pytest.mark.parametrize("estimate", [k1_with_ratio, k3_with_ratio])
def test_with_the_ratio_they_are_worth_it_when_another_policy_sampled(estimate: Callable[..., Tensor]) -> None:
    policy, reference = distributions()
    sampler = torch.log_softmax(log_ratios(6), dim=0)
    exact = (policy.exp() * (policy - reference)).sum()
    found = (sampler.exp() * estimate(policy - reference, policy - sampler)).sum()
    assert found.item() == pytest.approx(exact.item(), rel=1e-12)


def test_signs_and_order_of_the_estimators() -> None:
    values = log_ratios()
    assert (k1(values) < 0).any()
    for estimate in (k2, k3, absolute, k3_straight_through):
        assert (estimate(values) > 0).all()
    assert (absolute(values) >= k1(values)).all()
    policy, reference = distributions()
    exact = (policy.exp() * (policy - reference)).sum()
    assert (policy.exp() * absolute(policy - reference)).sum() > exact
    # k2 is close to the KL for policies that are close, and not for others.
    near = torch.log_softmax(reference + 1e-3 * policy, dim=0)
    near_exact = (near.exp() * (near - reference)).sum().item()
    assert (near.exp() * k2(near - reference)).sum().item() == pytest.approx(near_exact, rel=1e-2)
    assert (policy.exp() * k2(policy - reference)).sum().item() != pytest.approx(exact.item(), rel=0.1)


@pytest.mark.parametrize("name", KL_TERMS)
def test_every_estimator_is_zero_between_equal_policies(name: str) -> None:
    assert KL_TERMS[name](torch.zeros(3), torch.tensor([-0.5, 0.0, 0.5])).tolist() == [0.0, 0.0, 0.0]


def test_the_ratio_changes_no_value_when_the_policy_is_the_sampler() -> None:
    values = log_ratios()
    assert torch.equal(k1_with_ratio(values, 0 * values), k1(values))
    assert torch.equal(k3_with_ratio(values, 0 * values), k3(values))


def test_straight_through_has_the_value_of_k3_and_the_gradient_of_k2_to_the_bit() -> None:
    values = log_ratios().requires_grad_(True)
    found = k3_straight_through(values)
    assert torch.equal(found, k3(values))
    assert torch.equal(*(torch.autograd.grad(x.sum(), values)[0] for x in (found, k2(values))))


@pytest.mark.parametrize("estimate", [k1, k2, k3, absolute])
def test_gradients_are_those_of_the_value(estimate: Callable[[Tensor], Tensor]) -> None:
    assert torch.autograd.gradcheck(estimate, log_ratios().requires_grad_(True))


@pytest.mark.parametrize("estimate", [k1_with_ratio, k3_with_ratio])
def test_gradients_with_a_ratio_are_those_of_the_value(estimate: Callable[[Tensor, Tensor], Tensor]) -> None:
    values, importance = log_ratios().view(2, -1)
    assert torch.autograd.gradcheck(estimate, (values.requires_grad_(True), importance.requires_grad_(True)))


def test_nothing_is_clamped_far_from_the_reference() -> None:
    log_ratio = torch.tensor([-4.0, 4.0], dtype=torch.float64, requires_grad=True)
    k3(log_ratio).sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad[0].item() == pytest.approx(1 - torch.e**4, rel=1e-9)
    assert k3(torch.tensor(1e-6, dtype=torch.float64)).item() == pytest.approx(5e-13, rel=1e-3)
    assert k2(torch.tensor(-4.0)).item() == 8.0
