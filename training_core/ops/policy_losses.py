"""Policy losses: one value a token. Adding them up is another function (ops/aggregation.py).

Shapes: B rows (answers), T answer tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training_core.ops.masking import masked_fill_zero


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped surrogate loss at every token.

    ratio = exp(logprobs - old_logprobs); loss = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high)).

    Special cases:
        old_logprobs = logprobs.detach(): the value is -A and the gradient that of -A * logprobs (REINFORCE); nothing is
        clipped. Wide clip bounds: importance-weighted REINFORCE.

    Args:
        logprobs: [batch, time] of the policy that is trained, nats.
        old_logprobs: [batch, time] of the policy that sampled, nats.
        advantages: [batch, time] or [batch, 1], without unit.
        mask: [batch, time] bool; the other tensors may hold anything where it is false.
        clip_low: bound below the ratio 1, in (0, 1).
        clip_high: bound above the ratio 1, above 0.

    Returns:
        (loss, is_clipped), each [batch, time]: 0 and false at masked positions. `is_clipped` marks tokens whose loss is
        the clipped one, so that they pass no gradient.

    Gradient:
        To `logprobs` only.

    Raises:
        ValueError: clip bounds out of range.

    Source:
        Schulman et al. 2017, equation 7, arXiv 1707.06347; separate bounds: Yu et al. 2025, DAPO, equation 10,
        arXiv 2503.14476.

    Example:
        >>> one = torch.ones(1, 1)
        >>> loss, clipped = clipped_surrogate(one.log() + 0.5, 0 * one, one, one > 0, clip_low=0.2, clip_high=0.2)
        >>> round(loss.item(), 4), clipped.item()
        (-1.2, True)
    """
    if not 0.0 < clip_low < 1.0 or clip_high <= 0.0:
        raise ValueError(f"clip_low ({clip_low}) must lie in (0, 1) and clip_high ({clip_high}) above 0")
    # Before the exponential: a NaN or a huge value at a masked position must not reach the gradient.
    log_ratio = masked_fill_zero(logprobs - old_logprobs.detach(), mask)
    weight = masked_fill_zero(advantages.detach().expand(mask.shape), mask)
    ratio = log_ratio.exp()
    plain = -weight * ratio
    clipped = -weight * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = masked_fill_zero(torch.maximum(plain, clipped), mask)
    return loss, (clipped > plain) & mask
