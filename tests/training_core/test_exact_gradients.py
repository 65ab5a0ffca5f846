"""Expected gradients by enumeration: what each KL term and each policy loss moves a small policy towards.

Vocabulary of 6. One-token answers: the policy is a table of logits. Two-token answers: a first table, and one for each
first token, so that an early token decides which distribution comes next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from policy_cases import KL_TERMS, LOSSES, PolicyLoss
from torch import Tensor

from training_core.ops.aggregation import sequence_mean_token_sum_weights, weighted_sum
from training_core.ops.kl import absolute, k1, k2, k3
from training_core.ops.policy_losses import sequence_surrogate

VOCABULARY = 6
EXACT = {"rtol": 1e-10, "atol": 1e-14}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@dataclass(frozen=True)
class OneToken:
    """A policy over single tokens, with the exact gradients of distances to the reference."""

    logits: Tensor
    reference: Tensor

    @staticmethod
    def example() -> OneToken:
        return OneToken(random(VOCABULARY, seed=5).requires_grad_(True), random(VOCABULARY, seed=6).log_softmax(dim=0))

    @property
    def logp(self) -> Tensor:
        return self.logits.log_softmax(dim=0)

    def gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.logits)[0]

    def reverse(self) -> Tensor:
        logp = self.logp
        return self.gradient((logp.exp() * (logp - self.reference)).sum())

    def forward(self) -> Tensor:
        return self.gradient((self.reference.exp() * (self.reference - self.logp)).sum())

    def twice_total_variation(self) -> Tensor:
        return self.gradient((self.logp.exp() - self.reference.exp()).abs().sum())

    def in_loss(self, term: Callable[[Tensor, Tensor], Tensor], sampler: Tensor | None = None) -> Tensor:
        """The term's gradient, averaged over tokens that the sampler draws: sampling itself has no gradient."""
        logp = self.logp
        sampler = logp.detach() if sampler is None else sampler
        return self.gradient((sampler.exp() * term(logp - self.reference, logp - sampler)).sum())

    def in_reward(self, estimate: Callable[[Tensor], Tensor]) -> Tensor:
        """The policy gradient with the estimate as a cost: a number times the gradient of logprobs."""
        logp = self.logp
        cost = estimate(logp - self.reference).detach()
        return self.gradient((logp.detach().exp() * cost * logp).sum())


@pytest.mark.parametrize("name", ["k2", "k3_straight_through", "k1_ratio", "k3_ratio"])
def test_in_the_loss_these_have_the_gradient_of_the_reverse_kl(name: str) -> None:
    policy = OneToken.example()
    torch.testing.assert_close(policy.in_loss(KL_TERMS[name]), policy.reverse(), **EXACT)


def test_in_the_loss_k1_does_nothing() -> None:
    assert OneToken.example().in_loss(lambda log_ratio, _: k1(log_ratio)).abs().max() < 1e-14


def test_in_the_loss_k3_has_the_gradient_of_the_forward_kl() -> None:
    policy = OneToken.example()
    torch.testing.assert_close(policy.in_loss(KL_TERMS["k3"]), policy.forward(), **EXACT)
    assert relative_error(policy.in_loss(KL_TERMS["k3"]), policy.reverse()) > 0.1


def test_in_the_loss_the_absolute_log_ratio_has_the_gradient_of_twice_the_total_variation() -> None:
    policy = OneToken.example()
    torch.testing.assert_close(policy.in_loss(KL_TERMS["abs"]), policy.twice_total_variation(), **EXACT)
    assert relative_error(policy.in_loss(KL_TERMS["abs"]), policy.reverse()) > 0.1


def test_a_ratio_times_k2_is_not_the_reverse_kl() -> None:
    policy = OneToken.example()
    found = policy.in_loss(lambda log_ratio, importance: importance.exp() * k2(log_ratio))
    assert relative_error(found, policy.reverse()) > 0.1


def test_only_ratio_forms_stay_exact_when_the_policy_has_moved_since_the_rollout() -> None:
    policy = OneToken.example()
    sampler = (policy.logits.detach() + 0.5 * random(VOCABULARY, seed=1)).log_softmax(dim=0)
    for name in ("k1_ratio", "k3_ratio"):
        torch.testing.assert_close(policy.in_loss(KL_TERMS[name], sampler), policy.reverse(), **EXACT)
    for name in ("k2", "k3_straight_through"):
        assert relative_error(policy.in_loss(KL_TERMS[name], sampler), policy.reverse()) > 0.1
    assert relative_error(policy.in_loss(KL_TERMS["k3"], sampler), policy.forward()) > 0.05


def test_in_the_reward_only_k1_has_the_gradient_of_the_reverse_kl() -> None:
    """The others lack the part of the estimate that moves with the policy, which is their gradient in a loss."""
    policy = OneToken.example()
    reverse = policy.reverse()
    torch.testing.assert_close(policy.in_reward(k1), reverse, **EXACT)
    torch.testing.assert_close(policy.in_reward(k3), reverse - policy.forward(), **EXACT)
    for estimate, moving in [(k2, reverse), (absolute, policy.twice_total_variation())]:
        logp = policy.logp
        of_the_mean = policy.gradient((logp.exp() * estimate(logp - policy.reference)).sum())
        torch.testing.assert_close(policy.in_reward(estimate), of_the_mean - moving, **EXACT)
        assert relative_error(policy.in_reward(estimate), reverse) > 0.1


class TwoTokens:
    """Answers of two tokens: all 36 of them, as rows, with the probability that the policy samples each."""

    def __init__(self, *, drift: float = 0.0) -> None:
        first, second = random(VOCABULARY, seed=0), random(VOCABULARY, VOCABULARY, seed=1)
        # Close to the reference in the first token, and far from it in the second, more so after some than others.
        far = 2.0 * random(VOCABULARY, VOCABULARY, seed=2)
        self.reference = self.log_probs((first + 0.2 * random(VOCABULARY, seed=3), far))
        self.tables = tuple(table.clone().requires_grad_(True) for table in (first, second))
        moved = [table + drift * random(*table.shape, seed=9) for table in (first, second)]
        self.old = self.log_probs(tuple(moved))
        self.rewards = random(VOCABULARY**2, seed=8)
        self.mask = torch.ones(VOCABULARY**2, 2, dtype=torch.bool)

    @staticmethod
    def log_probs(tables: tuple[Tensor, ...]) -> Tensor:
        """[36, 2]: the log-probability of each answer's two tokens."""
        first, second = tables[0].log_softmax(dim=0), tables[1].log_softmax(dim=1)
        return torch.stack([first[:, None].expand(second.shape), second], dim=-1).view(-1, 2)

    @property
    def logp(self) -> Tensor:
        return self.log_probs(self.tables)

    @property
    def sampled(self) -> Tensor:
        """[36]: how often the policy of the rollout gives each answer."""
        return self.old.sum(dim=1).exp()

    def gradient(self, value: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, self.tables)

    def reverse(self) -> tuple[Tensor, ...]:
        logp = self.logp
        return self.gradient((logp.sum(dim=1).exp() * (logp - self.reference).sum(dim=1)).sum())

    def minus_expected_reward(self) -> tuple[Tensor, ...]:
        return self.gradient(-(self.logp.sum(dim=1).exp() * self.rewards).sum())

    def in_loss(self, name: str) -> tuple[Tensor, ...]:
        logp = self.logp
        term = KL_TERMS[name](logp - self.reference, logp - self.old)
        return self.gradient((self.sampled * term.sum(dim=1)).sum())

    def policy_gradient(self, loss: PolicyLoss) -> tuple[Tensor, ...]:
        """The expected gradient of a loss over answers of the rollout, the mean over answers of sums over tokens."""
        logp = self.logp
        advantages = (self.rewards - 0.7)[:, None]
        losses, _ = loss(logp, self.old, advantages, self.mask)
        weights = sequence_mean_token_sum_weights(self.mask) * len(self.mask) * self.sampled[:, None]
        return self.gradient(weighted_sum(losses, weights, self.mask))


@pytest.mark.parametrize("name", ["k2", "k3_straight_through", "k1_ratio", "k3_ratio"])
def test_in_the_loss_no_token_term_is_exact_for_whole_answers(name: str) -> None:
    """The last token's gradient is exact; the first token's misses that it decides which state comes next."""
    policy = TwoTokens()
    (first, last), (exact_first, exact_last) = policy.in_loss(name), policy.reverse()
    torch.testing.assert_close(last, exact_last, **EXACT)
    assert relative_error(first, exact_first) > 0.9
    # What is missing is the policy gradient of the second token's KL with respect to the first token.
    logp, later = policy.logp, (policy.old - policy.reference)[:, 1]
    missing = torch.autograd.grad((policy.sampled * later * logp[:, 0]).sum(), policy.tables[0])[0]
    torch.testing.assert_close(first + missing, exact_first, **EXACT)


def test_in_the_reward_k1_of_this_token_and_later_ones_is_exact_for_whole_answers() -> None:
    policy = TwoTokens()
    penalties = k1(policy.old - policy.reference)
    to_go = penalties.flip(dims=[1]).cumsum(dim=1).flip(dims=[1])
    for cost, is_exact in [(to_go, True), (penalties.sum(dim=1, keepdim=True), True), (penalties, False)]:
        found = policy.gradient((policy.sampled[:, None] * cost * policy.logp).sum())
        if is_exact:
            for one, other in zip(found, policy.reverse(), strict=True):
                torch.testing.assert_close(one, other, **EXACT)
        else:
            assert relative_error(found[0], policy.reverse()[0]) > 0.9


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("sequence_surrogate", "gspo")])
def test_on_policy_the_expected_gradient_is_that_of_the_expected_reward(name: str) -> None:
    policy = TwoTokens()
    for found, exact in zip(policy.policy_gradient(LOSSES[name]), policy.minus_expected_reward(), strict=True):
        torch.testing.assert_close(found, exact, **EXACT)


@pytest.mark.parametrize("name", ["sequence_surrogate", "gspo"])
def test_on_policy_answer_ratios_count_each_token_once_an_answer(name: str) -> None:
    """Both of an answer's two tokens hold the loss of the whole: the sum of an answer's losses is twice its loss."""
    policy = TwoTokens()
    factor = 2.0 if name == "sequence_surrogate" else 1.0
    for found, exact in zip(policy.policy_gradient(LOSSES[name]), policy.minus_expected_reward(), strict=True):
        torch.testing.assert_close(found, factor * exact, **EXACT)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_with_one_token_every_loss_has_the_true_policy_gradient(name: str) -> None:
    policy, rewards = OneToken.example(), random(VOCABULARY, seed=8)
    exact = policy.gradient(-(policy.logp.exp() * rewards).sum())
    logp, mask = policy.logp[:, None], torch.ones(VOCABULARY, 1, dtype=torch.bool)
    losses, _ = LOSSES[name](logp, logp.detach(), rewards[:, None] - 0.7, mask)
    found = policy.gradient((logp.detach().exp() * losses).sum())
    torch.testing.assert_close(found, exact, **EXACT)


def test_after_a_move_only_the_unbounded_ratio_of_whole_answers_stays_exact() -> None:
    """REINFORCE and token ratios no longer have the gradient of the expected reward; exact weights of answers do."""
    policy = TwoTokens(drift=0.3)
    exact = policy.minus_expected_reward()
    wide = functools.partial(sequence_surrogate, clip_low=0.999, clip_high=1e6)
    for found, true in zip(policy.policy_gradient(wide), exact, strict=True):
        # Twice, as above: both tokens hold the loss of the whole answer.
        torch.testing.assert_close(found, 2.0 * true, **EXACT)
    for name in ("reinforce", "importance_weighted", "clipped_surrogate", "gspo"):
        assert relative_error(policy.policy_gradient(LOSSES[name])[0], exact[0]) > 0.1
