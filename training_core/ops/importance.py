"""Correction for answers that were sampled by another policy than the one the loss takes for the sampler.

The engine that samples and the trainer that computes log-probs are two programs: their probabilities differ by
rounding, by routing, or because the engine held older weights. The loss of a token times the ratio of the two is right
on average again; the ratio is bounded, as a few large ones would carry the whole step.

Shapes: B rows (whole answers), T answer tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from training_core.ops.masking import masked_fill_zero, masked_sum

Level = Literal["token", "sequence"]
Mode = Literal["truncate", "mask"]


def importance_weights(
    policy_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    level: Level,
    mode: Mode,
    low: float | None,
    high: float,
) -> Tensor:
    """Compute bounded importance weights, to multiply token losses with.

    ratio = exp(policy - sampler) of the token or, at level `sequence`, of the whole answer (the sum over its tokens).
    Mode `truncate`: min(ratio, high), and max with `low` when given. Mode `mask`: ratio where low <= ratio <= high, 0
    elsewhere. A weight of 0 takes a token's loss away and not its place in the denominator: no other token gains weight
    by it.

    Bounds are compared with logarithms, so no weight overflows. At level `sequence` log-ratios add up: of a long answer
    the ratio is often far from 1 though each token's is close to it, and then the weight is `high` (truncate) or 0
    (mask, or a ratio below what float64 can hold) for all of its tokens.

    Special cases:
        Both policies equal: 1 at every token. One token: both levels agree. All ratios within the bounds: both modes
        agree and give the plain ratio. `low` with `truncate` raises small weights: that keeps tokens the policy would
        hardly sample any more, a bias that most trainers leave out.

    Args:
        policy_logprobs: [batch, time] of the policy as the trainer computes it when the answers are taken over, nats.
        sampler_logprobs: [batch, time] as the sampling engine reported them, nats.
        mask: [batch, time] bool; both tensors may hold anything where it is false.
        level: ratio of each `token`, or of the whole answer (`sequence`).
        mode: what happens beyond the bounds: `truncate` or `mask`.
        low: lower bound of the ratio, in [0, 1]; None for none.
        high: upper bound of the ratio, at least 1.

    Returns:
        [batch, time] float64, without unit; 0 at masked positions. Finite.

    Gradient:
        None; inputs are detached.

    Raises:
        ValueError: a bound out of range, an unknown level or mode, or a log-ratio at a counted token that is no number.

    Source:
        Truncated importance sampling: Ionides 2008; for the two engines of RL: Yao et al. 2025, "Your Efficient RL
        Framework Secretly Brings You Off-Policy RL Training". Masking outside a range: Ling Team 2025, IcePop in
        "Every Step Evolves", arXiv 2510.18855.

    Example:
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> policy, sampler = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -3.0]])
        >>> importance_weights(policy, sampler, mask, level="token", mode="truncate", low=None, high=2.0).tolist()
        [[1.0, 2.0]]
        >>> importance_weights(policy, sampler, mask, level="sequence", mode="mask", low=0.5, high=2.0).tolist()
        [[0.0, 0.0]]
    """
    _check(level, mode, low, high)
    log_ratio = masked_fill_zero(policy_logprobs.detach().double() - sampler_logprobs.detach().double(), mask)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand(mask.shape)
    if bool(log_ratio.isnan().any()):
        raise ValueError("the log-ratio of a counted token, or of an answer, is no number: look at both log-probs")
    log_low = math.log(low) if low else -math.inf
    is_above, is_below = log_ratio > math.log(high), log_ratio < log_low
    # May be infinite above `high`; selected away below, where exp(log(high)) could miss `high` by a rounding.
    weights = log_ratio.exp()
    if mode == "truncate":
        weights = torch.where(is_above, high, weights)
        weights = torch.where(is_below, low or 0.0, weights)
    else:
        weights = masked_fill_zero(weights, ~(is_above | is_below))
    return masked_fill_zero(weights, mask)


def _check(level: str, mode: str, low: float | None, high: float) -> None:
    if level not in ("token", "sequence") or mode not in ("truncate", "mask"):
        raise ValueError(f"level ({level!r}) must be token or sequence and mode ({mode!r}) truncate or mask")
    if not high >= 1.0 or math.isinf(high) or (low is not None and not 0.0 <= low <= 1.0):
        raise ValueError(
            f"high ({high}) must be finite and at least 1, low ({low}) in [0, 1] or None: equal policies have ratio 1"
        )


@dataclass(frozen=True)
class EffectiveSample:
    """Sums of weights. Those of two micro-batches, or ranks, add up to those of both."""

    sum_weights: float = 0.0
    sum_squares: float = 0.0
    count: int = 0
    """Tokens counted, those with weight 0 among them."""

    def __add__(self, other: EffectiveSample) -> EffectiveSample:
        return EffectiveSample(
            self.sum_weights + other.sum_weights, self.sum_squares + other.sum_squares, self.count + other.count
        )

    @property
    def fraction(self) -> float:
        """(sum w)^2 / (count * sum w^2): 1 for equal weights, 0 when all are 0, and 1 when nothing was counted."""
        if self.count == 0:
            return 1.0
        return self.sum_weights**2 / (self.count * self.sum_squares) if self.sum_squares > 0.0 else 0.0


def effective_sample_parts(weights: Tensor, mask: Tensor) -> EffectiveSample:
    """Compute the sums of which the effective share of the samples is made.

    sum w, sum w^2 and their number over unmasked tokens.

    Special cases:
        No token: all 0.

    Args:
        weights: [batch, time], from `importance_weights`; may hold anything where the mask is false.
        mask: [batch, time] bool. Answers instead of tokens are counted with a mask of one token each.

    Returns:
        The sums. Those of parts of a batch add up with `+` to those of the batch.

    Gradient:
        None.

    Source:
        Kish 1965, the effective sample size (sum w)^2 / sum w^2.

    Example:
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> effective_sample_parts(torch.tensor([[1.0, 3.0]]), mask)
        EffectiveSample(sum_weights=4.0, sum_squares=10.0, count=2)
    """
    values = weights.detach().double()
    return EffectiveSample(float(masked_sum(values, mask)), float(masked_sum(values.square(), mask)), int(mask.sum()))


def effective_sample_fraction(weights: Tensor, mask: Tensor) -> float:
    """Compute which share of equally weighted samples would say as much as these do.

    (sum w)^2 / (n * sum w^2).

    Special cases:
        Equal weights: 1. One weight of n above 0: 1 / n. All weights 0: 0. No token: 1, as nothing was weighed down.

    Args:
        weights: [batch, time], from `importance_weights`; may hold anything where the mask is false.
        mask: [batch, time] bool.

    Returns:
        A number in [0, 1]. Of parts of a batch take `effective_sample_parts`: fractions do not add up.

    Gradient:
        None.

    Source:
        Kish 1965, the effective sample size, divided by the number of samples.

    Example:
        >>> effective_sample_fraction(torch.tensor([[1.0, 3.0]]), torch.ones(1, 2, dtype=torch.bool))
        0.8
    """
    return effective_sample_parts(weights, mask).fraction
