"""Rewards of single tokens, and what is still to come from a token on.

A masked position (padding, or tool output inside an answer) is not a step: what comes after it reaches the tokens
before it without a further discount.

Shapes: N answers, T longest answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training_core.ops.masking import check_mask, masked_fill_zero


def finite_or_zero(values: Tensor, mask: Tensor, what: str) -> Tensor:
    """Select the values that count, and refuse one that is not finite.

    Special cases:
        Where the mask is false anything may stand, NaN included; the result is 0 there.

    Args:
        values: any shape, float.
        mask: same shape, bool.
        what: name of a value, for the error.

    Returns:
        Same shape and unit, float64, detached.

    Raises:
        ValueError: a value that counts is NaN or infinite, or shapes differ.

    Example:
        >>> finite_or_zero(torch.tensor([1.5, float("nan")]), torch.tensor([True, False]), "a score").tolist()
        [1.5, 0.0]
    """
    filled = masked_fill_zero(values.detach().double(), mask)
    if not bool(torch.isfinite(filled).all()):
        count = int((~torch.isfinite(filled)).sum())
        raise ValueError(f"{what} is not finite ({count} of {int(mask.sum())}); report what has no value as missing")
    return filled


def token_rewards(scores: Tensor, present: Tensor, mask: Tensor, kl_penalties: Tensor | None) -> Tensor:
    """Give every token its reward: minus its KL penalty, and the score of the answer on the last token.

    r_t = [t is the last unmasked token] * score - kl_penalty_t.

    Special cases:
        The rewards of an answer add up to score - sum of its penalties. An answer without a token or without a score:
        0 everywhere. No penalties: 0 everywhere but on the last token.

    Args:
        scores: [answers] float, reward units; may hold anything where `present` is false.
        present: [answers] bool, true where there is a score.
        mask: [answers, time] bool, the answer's tokens.
        kl_penalties: [answers, time] float, reward units: coefficient times KL estimate of each token; may hold
            anything at masked positions and in answers without a score. None for none.

    Returns:
        [answers, time] float64, reward units; 0 at masked positions.

    Gradient:
        None; inputs are detached.

    Raises:
        ValueError: a present score, or a penalty of a token of a scored answer, is not finite, or shapes differ.

    Source:
        Ziegler et al. 2019, equation 2, arXiv 1909.08593; per token: Ouyang et al. 2022, appendix C, arXiv 2203.02155.

    Example:
        >>> mask = torch.tensor([[True, True, False]])
        >>> token_rewards(torch.tensor([5.0]), torch.tensor([True]), mask, torch.tensor([[0.5, 1.0, 9.0]])).tolist()
        [[-0.5, 4.0, 0.0]]
    """
    check_mask(mask)
    score = finite_or_zero(scores, present, "a score")
    if mask.ndim != 2 or mask.shape[0] != scores.shape[0]:
        raise ValueError(f"mask {tuple(mask.shape)} must be [answers, time] with {scores.shape[0]} answers")
    counted = mask & present[:, None]
    # Unmasked tokens from here to the end: 1 at the last one. An empty answer has none, so no slot takes its score.
    is_last = counted & (mask.flip(1).cumsum(1).flip(1) == 1)
    rewards = masked_fill_zero(score[:, None].expand(mask.shape), is_last)
    return rewards if kl_penalties is None else rewards - finite_or_zero(kl_penalties, counted, "a KL penalty")


def discounted_reward_to_go(rewards: Tensor, mask: Tensor, discount: float) -> Tensor:
    """Add up the rewards from each token on.

    G_t = r_t + discount * G_next, where next is the next unmasked token; 0 after the last one.

    Special cases:
        discount = 1: the sum of the rewards from the token on. discount = 0: the rewards themselves. Masked positions
        between tokens change nothing.

    Args:
        rewards: [answers, time] float, reward units; may hold anything at masked positions.
        mask: [answers, time] bool.
        discount: weight of the next token's return, in [0, 1].

    Returns:
        [answers, time] float64, reward units; 0 at masked positions.

    Gradient:
        None; inputs are detached.

    Raises:
        ValueError: the discount is out of range or shapes differ.

    Source:
        Sutton and Barto 2018, "Reinforcement Learning", equation 3.9.

    Example:
        >>> mask = torch.tensor([[True, False, True]])
        >>> discounted_reward_to_go(torch.tensor([[1.0, 9.0, 4.0]]), mask, 0.5).tolist()
        [[3.0, 0.0, 4.0]]
    """
    _check_fraction("discount", discount)
    _check_rows(mask)
    filled = masked_fill_zero(rewards.detach().double(), mask)
    returns = torch.zeros_like(filled)
    running = filled.new_zeros(filled.shape[0])
    for t in reversed(range(filled.shape[1])):
        running = torch.where(mask[:, t], filled[:, t] + discount * running, running)
        returns[:, t] = running
    return masked_fill_zero(returns, mask)


def generalised_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, discount: float, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates and the targets of the critic.

    delta_t = r_t + discount * V_next - V_t; A_t = delta_t + discount * smoothing * A_next; target_t = A_t + V_t, where
    next is the next unmasked token. After the last token value and advantage are 0: an answer ends there, also one
    that was cut off.

    Special cases:
        smoothing = 1: reward-to-go minus value, and the target is the reward-to-go. smoothing = 0: the temporal
        difference delta. Values of 0 and smoothing = 1: the reward-to-go.

    Args:
        rewards: [answers, time] float, reward units; may hold anything at masked positions.
        values: [answers, time] float, reward units: the critic's value of the state before each token; may hold
            anything at masked positions.
        mask: [answers, time] bool.
        discount: gamma, in [0, 1].
        smoothing: lambda, in [0, 1]; less variance and more bias of the critic when small.

    Returns:
        (advantages, targets), each [answers, time] float64, reward units; 0 at masked positions.

    Gradient:
        None; inputs are detached.

    Raises:
        ValueError: discount or smoothing is out of range, or shapes differ.

    Source:
        Schulman et al. 2016, equations 11 to 16, arXiv 1506.02438.

    Example:
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> advantages, targets = generalised_advantages(torch.tensor([[0.0, 1.0]]), 0.5 * mask, mask, 1.0, 0.5)
        >>> advantages.tolist(), targets.tolist()
        ([[0.25, 0.5]], [[0.75, 1.0]])
    """
    _check_fraction("discount", discount)
    _check_fraction("smoothing", smoothing)
    _check_rows(mask)
    reward = masked_fill_zero(rewards.detach().double(), mask)
    value = masked_fill_zero(values.detach().double(), mask)
    advantages = torch.zeros_like(value)
    next_value = value.new_zeros(value.shape[0])
    running = torch.zeros_like(next_value)
    for t in reversed(range(value.shape[1])):
        delta = reward[:, t] + discount * next_value - value[:, t]
        running = torch.where(mask[:, t], delta + discount * smoothing * running, running)
        next_value = torch.where(mask[:, t], value[:, t], next_value)
        advantages[:, t] = running
    advantages = masked_fill_zero(advantages, mask)
    return advantages, advantages + value


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")


def _check_rows(mask: Tensor) -> None:
    check_mask(mask)
    if mask.ndim != 2:
        raise ValueError(f"expected a mask [answers, time], got {tuple(mask.shape)}")
