"""What policy losses on a probability ratio have in common.

Shapes: B rows (whole answers), T answer tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training_core.ops.masking import masked_fill_zero


def check_clip_bounds(clip_low: float, clip_high: float) -> None:
    """Check that [1 - clip_low, 1 + clip_high] is a range of ratios around 1.

    Raises:
        ValueError: clip_low is not in (0, 1), or clip_high not above 0.
    """
    if not 0.0 < clip_low < 1.0 or clip_high <= 0.0:
        raise ValueError(f"clip_low ({clip_low}) must lie in (0, 1) and clip_high ({clip_high}) above 0")


def token_log_ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return log policy - log old policy at every token, 0 at masked positions.

    Masked before anything is exponentiated: a NaN or a huge value there must not reach the gradient.

    Args:
        logprobs: [batch, time] of the policy that is trained, nats.
        old_logprobs: [batch, time] of the policy that sampled, nats.
        mask: [batch, time] bool.

    Returns:
        [batch, time], nats.

    Gradient:
        To `logprobs` where the mask is true.
    """
    return masked_fill_zero(logprobs - old_logprobs.detach(), mask)


def token_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return one advantage a token, [batch, time], detached and 0 at masked positions.

    Args:
        advantages: [batch, time] or [batch, 1].
        mask: [batch, time] bool.
    """
    return masked_fill_zero(advantages.detach().expand(mask.shape), mask)


def answer_log_ratios(log_ratios: Tensor, mask: Tensor, *, per_token: bool) -> Tensor:
    """Return the log-ratio of whole answers, the same at every position of a row.

    log s_i = sum_t log_ratio_{i,t}, divided by the number of the row's tokens when `per_token`. Summed in float64:
    clip ranges of sequence-level losses are as small as 3e-4.

    Special cases:
        A row without a token: 0.

    Args:
        log_ratios: [batch, time], nats, 0 at masked positions.
        mask: [batch, time] bool.
        per_token: whether to take the mean over tokens instead of the sum.

    Returns:
        [batch, time] float64, nats (nats a token when `per_token`).

    Gradient:
        To `log_ratios`.
    """
    total = log_ratios.double().sum(dim=1)
    if per_token:
        total = total / mask.sum(dim=1).clamp(min=1)
    return total[:, None].expand(mask.shape)


def clipped_objective(
    log_ratios: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the clipped loss of given ratios.

    r = exp(log_ratio); loss = max(-A * r, -A * clip(r, 1 - clip_low, 1 + clip_high)); where A < 0 and with `dual_clip`,
    min(loss, -dual_clip * A).

    Special cases:
        A = 0: the loss is 0 for any ratio. A clipped token with a ratio that overflows has the clipped value and a
        gradient of exactly 0, not NaN.

    Args:
        log_ratios: [batch, time], nats; may hold anything at masked positions.
        advantages: [batch, time], 0 at masked positions.
        mask: [batch, time] bool.
        clip_low: bound below the ratio 1.
        clip_high: bound above the ratio 1.
        dual_clip: largest multiple of -A, above 1; None for none.

    Returns:
        (loss, is_clipped), each [batch, time].

    Gradient:
        To `log_ratios` where nothing is clipped.
    """
    # Where there is nothing to gain, the ratio is not looked at: 0 * inf would be NaN.
    log_ratios = masked_fill_zero(log_ratios, mask & (advantages != 0.0))
    ratios = log_ratios.detach().exp()
    plain = -advantages * ratios
    bounded = torch.maximum(plain, -advantages * ratios.clamp(1.0 - clip_low, 1.0 + clip_high))
    if dual_clip is not None:
        bounded = torch.where(advantages < 0.0, torch.minimum(bounded, -dual_clip * advantages), bounded)
    is_clipped = bounded != plain
    # A second exponential of the tokens that count, as the gradient of an infinite one is NaN even when unused.
    loss = torch.where(is_clipped, bounded, -advantages * masked_fill_zero(log_ratios, ~is_clipped).exp())
    return loss, is_clipped
