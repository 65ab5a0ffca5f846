"""Exact gradients: every answer of a small policy is enumerated, so expectations are sums.

The policy writes one or two tokens of a vocabulary of four; token 0 ends the answer. The objective is
E[score] - beta * KL(policy || reference) over whole answers. Its true gradient comes from autograd through the sum over
the answers; that of an estimator from sum_t A_t * grad log pi_t, averaged over everything that can be sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from training_core.ops.advantages import (
    EstimatorInputs,
    gae,
    group_centred,
    leave_one_out,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
)
from training_core.ops.kl import k1
from training_core.ops.masking import masked_sum
from training_core.ops.normalising import whiten
from training_core.ops.returns import discounted_reward_to_go, token_rewards

VOCABULARY, END, BETA = 4, 0, 0.3
ANSWERS = [(END,), *itertools.product(range(1, VOCABULARY), range(VOCABULARY))]
TOKENS = torch.tensor([[*answer, END][:2] for answer in ANSWERS])
MASK = torch.tensor([[True, len(answer) == 2] for answer in ANSWERS])


class Toy:
    """A policy of 4 + 4 * 4 logits, a reference, and a score for every answer."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.logits = normal(1 + VOCABULARY, VOCABULARY).requires_grad_()
        self.scores = 2.0 * normal(len(ANSWERS)) + 1.0
        self.reference = self.logprobs(normal(1 + VOCABULARY, VOCABULARY)).detach()
        self.policy = self.logprobs(self.logits)
        self.log_ratio = (self.policy - self.reference).detach()
        self.probabilities = masked_sum(self.policy, MASK, dim=1).exp()

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return [answers, 2]: row 0 of the logits is the first token's, row 1 + v that of the token after v."""
        table = logits.log_softmax(dim=-1)
        return torch.stack([table[0, TOKENS[:, 0]], table[1 + TOKENS[:, 0], TOKENS[:, 1]]], dim=1)

    def gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.logits, retain_graph=True)[0]

    def true_gradient(self) -> Tensor:
        divergence = masked_sum(self.policy - self.reference, MASK, dim=1)
        return self.gradient((self.probabilities * (self.scores - BETA * divergence)).sum())

    def policy_gradient(self, advantages: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Return sum over samples of weight * sum_t A_t * grad log pi_t."""
        terms = masked_sum(advantages * self.policy[rows], MASK[rows], dim=1)
        return self.gradient((weights * terms).sum())

    def expected(self, estimate: Callable[..., Any], group_size: int, **knobs: Any) -> Tensor:
        """Return the estimator's expected gradient over all groups of independent answers."""
        choices = torch.tensor(list(itertools.product(range(len(ANSWERS)), repeat=group_size)))
        rows = choices.reshape(-1)
        weights = self.probabilities.detach()[choices].prod(dim=1).repeat_interleave(group_size) / group_size
        result = estimate(self.inputs(rows, group_size), **knobs)
        return self.policy_gradient(result.advantages, rows, weights)

    def inputs(self, rows: Tensor, group_size: int = 1, **changes: Any) -> EstimatorInputs:
        num_rows = len(rows)
        plain: dict[str, Any] = {
            "scores": self.scores[rows],
            "present": torch.ones(num_rows, dtype=torch.bool),
            "group_ids": torch.arange(num_rows) // group_size,
            "mask": MASK[rows],
            "kl_penalties": BETA * k1(self.log_ratio[rows]),
            "values": torch.zeros(num_rows, 2, dtype=torch.float64),
            "baseline_scores": torch.full((num_rows,), float(self.scores[3]), dtype=torch.float64),
        }
        return EstimatorInputs(**{**plain, **changes})

    def over_answers(self, advantages: Tensor) -> Tensor:
        """Return the expected gradient of one advantage a token of each answer."""
        return self.policy_gradient(advantages, torch.arange(len(ANSWERS)), self.probabilities.detach())

    def state_values(self) -> Tensor:
        """Return [answers, 2]: the expected reward to go before each token, KL penalties included."""
        returns = self.scores - BETA * masked_sum(self.log_ratio, MASK, dim=1)
        probabilities = self.probabilities.detach()
        start = (probabilities * returns).sum()
        values = torch.stack([start.expand(len(ANSWERS)), torch.zeros(len(ANSWERS)).double()], dim=1)
        for first in range(1, VOCABULARY):
            rows = TOKENS[:, 0] == first
            paid = -BETA * self.log_ratio[rows][0, 0]
            mean = (probabilities[rows] * returns[rows]).sum() / probabilities[rows].sum()
            values[rows, 1] = mean - paid
        return values


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


EVERY_ANSWER = torch.arange(len(ANSWERS))


def assert_exact(got: Tensor, expected: Tensor) -> None:
    assert float(expected.abs().max()) > 0.05
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_the_answers_are_all_there_are(toy: Toy) -> None:
    assert len(ANSWERS) == 13
    assert float(toy.probabilities.detach().sum()) == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("group_size", [2, 3])
def test_leave_one_out_is_exact(toy: Toy, group_size: int) -> None:
    assert_exact(toy.expected(leave_one_out, group_size), toy.true_gradient())


@pytest.mark.parametrize("group_size", [2, 3])
def test_group_centred_falls_short_by_the_share_of_the_answer_itself(toy: Toy, group_size: int) -> None:
    expected = (group_size - 1) / group_size * toy.true_gradient()
    assert_exact(toy.expected(group_centred, group_size), expected)


def test_token_rewards_with_reward_to_go_are_exact(toy: Toy) -> None:
    inputs = toy.inputs(EVERY_ANSWER)
    rewards = token_rewards(inputs.scores, inputs.present, inputs.mask, inputs.kl_penalties)
    to_go = discounted_reward_to_go(rewards, inputs.mask, 1.0)
    assert_exact(toy.over_answers(to_go), toy.true_gradient())
    # REINFORCE++ divides it by the spread of the step and shifts it; the shift is a constant baseline.
    whitened = reinforce_plus_plus(inputs, 1.0).advantages
    assert_exact(whitened, whiten(to_go, inputs.mask))
    spread = to_go[MASK].std() + 1e-6
    assert_exact(toy.over_answers(whitened * spread), toy.true_gradient())


def test_remax_is_exact(toy: Toy) -> None:
    assert_exact(toy.over_answers(remax(toy.inputs(EVERY_ANSWER), 1.0).advantages), toy.true_gradient())


def test_gae_is_exact_without_a_critic(toy: Toy) -> None:
    result = gae(toy.inputs(EVERY_ANSWER), 1.0, 1.0, whiten=False)
    assert_exact(toy.over_answers(result.advantages), toy.true_gradient())


def test_gae_with_smoothing_1_is_exact_for_any_critic(toy: Toy) -> None:
    generator = torch.Generator().manual_seed(2)
    by_state = torch.randn(1 + VOCABULARY, generator=generator, dtype=torch.float64)
    values = torch.stack([by_state[:1].expand(len(ANSWERS)), by_state[1 + TOKENS[:, 0]]], dim=1)
    inputs = toy.inputs(EVERY_ANSWER, values=values)
    assert_exact(toy.over_answers(gae(inputs, 1.0, 1.0, whiten=False).advantages), toy.true_gradient())
    biased = toy.over_answers(gae(inputs, 1.0, 0.5, whiten=False).advantages)
    assert float((biased - toy.true_gradient()).abs().max()) > 0.05


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 1.0])
def test_gae_is_exact_for_the_true_critic(toy: Toy, smoothing: float) -> None:
    inputs = toy.inputs(EVERY_ANSWER, values=toy.state_values())
    assert_exact(toy.over_answers(gae(inputs, 1.0, smoothing, whiten=False).advantages), toy.true_gradient())


def test_the_baseline_form_before_whitening_falls_short_in_the_score_alone(toy: Toy) -> None:
    """Group mean off the score, KL to go in full: (n - 1) / n of the score's gradient and all of the KL's."""
    choices = torch.tensor(list(itertools.product(range(len(ANSWERS)), repeat=2)))
    rows = choices.reshape(-1)
    weights = toy.probabilities.detach()[choices].prod(dim=1).repeat_interleave(2) / 2
    inputs = toy.inputs(rows, 2)
    centred = inputs.scores - inputs.scores.reshape(-1, 2).mean(dim=1).repeat_interleave(2)
    assert inputs.kl_penalties is not None
    estimate = centred[:, None] - discounted_reward_to_go(inputs.kl_penalties, inputs.mask, 1.0)
    whitened = reinforce_plus_plus_baseline(inputs, 1.0).advantages
    assert_exact(whitened, whiten(torch.where(inputs.mask, estimate, 0.0), inputs.mask))
    divergence = (toy.probabilities * masked_sum(toy.policy - toy.reference, MASK, dim=1)).sum()
    score = (toy.probabilities * toy.scores).sum()
    assert_exact(toy.policy_gradient(estimate, rows, weights), toy.gradient(0.5 * score - BETA * divergence))


def test_the_kl_of_the_token_alone_is_wrong(toy: Toy) -> None:
    """It is right for the last token and misses how the first one changes what comes later."""
    inputs = toy.inputs(EVERY_ANSWER)
    assert inputs.kl_penalties is not None
    immediate = inputs.scores[:, None] - inputs.kl_penalties
    error = toy.over_answers(immediate) - toy.true_gradient()
    assert float(error[0].norm()) > 0.1 * float(toy.true_gradient()[0].norm())
    assert float(error[1:].abs().max()) < 1e-12
