"""Policy losses: one value a token. Adding them up is another function (ops/aggregation.py).

All have one signature: (logprobs, old_logprobs, advantages, mask, **knobs) -> (loss, is_clipped). Losses on the ratio
of whole answers are in ops/sequence_losses.py and are found here too.

With all ratios 1 (the first update after a rollout) every one of them has the gradient of -A * logprobs; what differs
is what happens once the policy has moved away from the one that sampled.

Shapes: B rows (whole answers), T answer tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training_core.ops.masking import masked_fill_zero
from training_core.ops.ratios import check_clip_bounds, clipped_objective, token_advantages, token_log_ratios
from training_core.ops.sequence_losses import gspo, gspo_token, sequence_surrogate

__all__ = [
    "cispo",
    "clipped_surrogate",
    "gspo",
    "gspo_token",
    "importance_weighted",
    "reinforce",
    "sapo",
    "sequence_surrogate",
]

# 4 * r * exp(-1000) is 0 in float64 for every r below 1e100: beyond it the gate's gradient is 0 in any format.
SATURATED_GATE = 1000.0


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped surrogate loss at every token.

    ratio = exp(logprobs - old_logprobs); loss = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high)). With
    `dual_clip` and A < 0: min(loss, -dual_clip * A), as PPO alone leaves a bad token's loss without a bound when its
    ratio is large.

    Special cases:
        old_logprobs = logprobs.detach(): the value is -A and the gradient that of -A * logprobs (REINFORCE); nothing is
        clipped. Wide clip bounds: `importance_weighted`. `dual_clip` changes nothing where A >= 0 or the ratio is at
        most `dual_clip`. A = 0: 0 for any ratio.

    Args:
        logprobs: [batch, time] of the policy that is trained, nats.
        old_logprobs: [batch, time] of the policy that sampled, nats.
        advantages: [batch, time] or [batch, 1], without unit.
        mask: [batch, time] bool; the other tensors may hold anything where it is false.
        clip_low: bound below the ratio 1, in (0, 1).
        clip_high: bound above the ratio 1, above 0.
        dual_clip: largest multiple of -A that the loss of a token with A < 0 reaches, above 1; None for no such bound.

    Returns:
        (loss, is_clipped), each [batch, time]: 0 and false at masked positions. `is_clipped` marks tokens whose loss is
        one of the bounds, so that they pass no gradient.

    Gradient:
        To `logprobs` only.

    Raises:
        ValueError: clip bounds or `dual_clip` out of range.

    Source:
        Schulman et al. 2017, equation 7, arXiv 1707.06347; separate bounds: Yu et al. 2025, DAPO, equation 10,
        arXiv 2503.14476; dual clip: Ye et al. 2020, "Mastering Complex Control in MOBA Games", arXiv 1912.09729.

    Example:
        >>> one = torch.ones(1, 1)
        >>> loss, clipped = clipped_surrogate(one.log() + 0.5, 0 * one, one, one > 0, clip_low=0.2, clip_high=0.2)
        >>> round(loss.item(), 4), clipped.item()
        (-1.2, True)
    """
    check_clip_bounds(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip ({dual_clip}) must be above 1, or None for no such bound")
    return clipped_objective(
        token_log_ratios(logprobs, old_logprobs, mask),
        token_advantages(advantages, mask),
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the plain policy gradient's loss at every token.

    loss = -A * logprobs.

    Special cases:
        `old_logprobs` is not read. The gradient is that of every other loss here when all ratios are 1; it is that of
        the expected reward only when the answers come from the policy itself.

    Args:
        logprobs: [batch, time] of the policy that is trained, nats.
        old_logprobs: [batch, time]; not read.
        advantages: [batch, time] or [batch, 1], without unit.
        mask: [batch, time] bool; the other tensors may hold anything where it is false.

    Returns:
        (loss, is_clipped), each [batch, time]: 0 at masked positions; `is_clipped` is false everywhere.

    Gradient:
        To `logprobs` only.

    Source:
        Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning".

    Example:
        >>> one = torch.ones(1, 1)
        >>> reinforce(-3 * one, one, 2 * one, one > 0)[0].item()
        6.0
    """
    weight = token_advantages(advantages, mask)
    loss = -weight * masked_fill_zero(logprobs, mask & (weight != 0.0))
    return loss, torch.zeros_like(mask)


def importance_weighted(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the importance-weighted policy loss at every token, without a bound.

    ratio = exp(logprobs - old_logprobs); loss = -A * ratio.

    Special cases:
        All ratios 1: the value is -A and the gradient that of `reinforce`. Equals `clipped_surrogate` wherever that
        clips nothing. A = 0: 0 for any ratio.

    Args:
        logprobs: [batch, time] of the policy that is trained, nats.
        old_logprobs: [batch, time] of the policy that sampled, nats.
        advantages: [batch, time] or [batch, 1], without unit.
        mask: [batch, time] bool; the other tensors may hold anything where it is false.

    Returns:
        (loss, is_clipped), each [batch, time]: 0 at masked positions; `is_clipped` is false everywhere. A log-ratio
        above 88 (float32) overflows to an infinite loss, which stops the training instead of being hidden.

    Gradient:
        To `logprobs` only.

    Source:
        Schulman et al. 2017, equation 6, arXiv 1707.06347 (there L^CPI).

    Example:
        >>> one = torch.ones(1, 1)
        >>> round(importance_weighted(one.log() + 0.5, 0 * one, one, one > 0)[0].item(), 4)
        -1.6487
    """
    weight = token_advantages(advantages, mask)
    log_ratios = token_log_ratios(logprobs, old_logprobs, mask & (weight != 0.0))
    return -weight * log_ratios.exp(), torch.zeros_like(mask)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | None,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Compute CISPO's loss at every token: the importance weight is bounded, the token keeps its gradient.

    weight = sg(clip(ratio, 1 - clip_low, 1 + clip_high)); loss = -weight * A * logprobs, with sg for "no gradient".

    Both bounds are distances from 1, as in the paper. Other trainers mean other things by the same names: TRL's
    `epsilon_high` is the largest weight itself (5.0 there is clip_high 4.0 here), and TRL and open-instruct know no
    lower bound.

    Special cases:
        All ratios 1: value and gradient of `reinforce`. No lower bound and a wide upper one: the gradient of
        `importance_weighted`.

    Args:
        logprobs: [batch, time] of the policy that is trained, nats.
        old_logprobs: [batch, time] of the policy that sampled, nats.
        advantages: [batch, time] or [batch, 1], without unit.
        mask: [batch, time] bool; the other tensors may hold anything where it is false.
        clip_low: bound below the ratio 1, in (0, 1); None for no lower bound, which is how the paper ran it.
        clip_high: bound above the ratio 1, above 0.

    Returns:
        (loss, is_clipped), each [batch, time]: 0 and false at masked positions. `is_clipped` marks tokens whose weight
        is a bound; unlike PPO's they still pass a gradient.

    Gradient:
        To `logprobs` only: -weight * A.

    Raises:
        ValueError: clip bounds out of range.

    Source:
        MiniMax 2025, MiniMax-M1, equations 4 and 5, arXiv 2506.13585.

    Example:
        >>> one = torch.ones(1, 1)
        >>> loss, clipped = cispo(-one, -2 * one, one, one > 0, clip_low=None, clip_high=0.5)
        >>> loss.item(), clipped.item()
        (1.5, True)
    """
    check_clip_bounds(0.5 if clip_low is None else clip_low, clip_high)
    ratios = token_log_ratios(logprobs, old_logprobs, mask).detach().exp()
    bounded = ratios.clamp(None if clip_low is None else 1.0 - clip_low, 1.0 + clip_high)
    loss, _ = reinforce(logprobs, old_logprobs, token_advantages(advantages, mask) * bounded, mask)
    return loss, bounded != ratios


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> tuple[Tensor, Tensor]:
    """Compute SAPO's loss at every token: a smooth gate on the ratio instead of a clip.

    loss = -A * gate(ratio); gate(r) = 4 / tau * sigmoid(tau * (r - 1)), with tau = temperature_positive where A > 0 and
    temperature_negative elsewhere. The gradient's weight, 4 * p * (1 - p) * r with p the sigmoid, is 1 at r = 1 and
    falls to 0 on both sides; a higher temperature falls faster.

    Special cases:
        All ratios 1: the value is -2 * A / tau and the gradient that of `reinforce`. Temperatures near 0: the gradient
        of `importance_weighted`. A ratio that overflows: the value -4 * A / tau, gradient 0. A = 0: 0.

    Args:
        logprobs: [batch, time] of the policy that is trained, nats.
        old_logprobs: [batch, time] of the policy that sampled, nats.
        advantages: [batch, time] or [batch, 1], without unit.
        mask: [batch, time] bool; the other tensors may hold anything where it is false.
        temperature_positive: tau of tokens with A > 0, above 0. Default: the paper's 1.0.
        temperature_negative: tau of the others, above 0. Default: the paper's 1.05: raising the tokens that were not
            sampled is the less stable direction.

    Returns:
        (loss, is_clipped), each [batch, time]: 0 at masked positions; `is_clipped` is false everywhere.

    Gradient:
        To `logprobs` only.

    Raises:
        ValueError: a temperature is not above 0.

    Source:
        Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv 2511.20347. The gate, its factor 4 / tau, the sign
        rule and the defaults agree with what Trinity-RFT, ms-swift and AReaL document of it.

    Example:
        >>> one = torch.ones(1, 1)
        >>> sapo(-one, -one, one, one > 0)[0].item()
        -2.0
    """
    if not (temperature_positive > 0.0 and temperature_negative > 0.0):
        raise ValueError(
            f"temperature_positive ({temperature_positive}) and temperature_negative ({temperature_negative}) must be "
            "above 0"
        )
    weight = token_advantages(advantages, mask)
    log_ratios = token_log_ratios(logprobs, old_logprobs, mask & (weight != 0.0))
    temperatures = torch.full_like(log_ratios, temperature_negative).masked_fill_(weight > 0.0, temperature_positive)
    # An infinite ratio has a gate of 1, but its gradient would come out as 0 * inf.
    is_saturated = temperatures * torch.expm1(log_ratios.detach()) > SATURATED_GATE
    gate = torch.sigmoid(temperatures * torch.expm1(masked_fill_zero(log_ratios, ~is_saturated)))
    gate = torch.where(is_saturated, torch.ones_like(gate), gate)
    return -weight * (4.0 / temperatures) * gate, torch.zeros_like(mask)
