"""How token losses become one number: L = sum over tokens of w * loss.

The weights w are computed once for a whole optimizer step from its mask. Every micro-batch adds its own part of the
sum, so gradients do not depend on how rows are split, padded or ordered.

Shapes: B rows (answers) of the whole optimizer step, T answer tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training_core.ops.masking import check_mask, masked_fill_zero


def _spread(row_weights: Tensor, mask: Tensor) -> Tensor:
    """Give every unmasked token of a row the row's weight; 0 elsewhere."""
    return masked_fill_zero(row_weights[:, None].expand(mask.shape), mask)


def _row_counts(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return ([batch] float64 tokens a row, float64 number of rows with a token, at least 1)."""
    check_mask(mask)
    lengths = mask.sum(dim=1).double()
    return lengths, (lengths > 0).sum().double().clamp(min=1.0)


def token_mean_weights(mask: Tensor) -> Tensor:
    """Weigh every token of the step the same.

    w = 1 / (number of tokens of the step).

    Special cases:
        All rows of one length: equals `sequence_mean_token_mean_weights`. No token: all weights are 0.

    Args:
        mask: [batch, time] bool over the whole optimizer step.

    Returns:
        [batch, time] float64, summing to 1; 0 at masked positions.

    Source:
        Yu et al. 2025, DAPO, equation 12, arXiv 2503.14476.

    Example:
        >>> token_mean_weights(torch.tensor([[True, True], [True, False]])).sum().item()
        1.0
    """
    lengths, _ = _row_counts(mask)
    return _spread(torch.ones_like(lengths) / lengths.sum().clamp(min=1.0), mask)


def sequence_mean_token_mean_weights(mask: Tensor) -> Tensor:
    """Weigh every answer the same, and every token within it.

    w = 1 / (rows with a token * tokens of the row).

    Special cases:
        Rows without a token do not count. No token at all: all weights are 0.

    Args:
        mask: [batch, time] bool over the whole optimizer step.

    Returns:
        [batch, time] float64, summing to 1; 0 at masked positions.

    Source:
        Shao et al. 2024, equation 3, arXiv 2402.03300.

    Example:
        >>> sequence_mean_token_mean_weights(torch.tensor([[True, True], [True, False]])).tolist()
        [[0.25, 0.25], [0.5, 0.0]]
    """
    lengths, num_rows = _row_counts(mask)
    return _spread(1.0 / (num_rows * lengths.clamp(min=1.0)), mask)


def sequence_mean_token_sum_weights(mask: Tensor) -> Tensor:
    """Take the mean over answers of the sum over tokens.

    w = 1 / (rows with a token).

    Special cases:
        Rows without a token do not count. No token at all: all weights are 0.

    Args:
        mask: [batch, time] bool over the whole optimizer step.

    Returns:
        [batch, time] float64; 0 at masked positions.

    Source:
        The policy gradient of whole answers (Williams 1992, REINFORCE).

    Example:
        >>> sequence_mean_token_sum_weights(torch.tensor([[True, True], [True, False]])).tolist()
        [[0.5, 0.5], [0.5, 0.0]]
    """
    lengths, num_rows = _row_counts(mask)
    return _spread(torch.ones_like(lengths) / num_rows, mask)


def constant_weights(mask: Tensor, *, num_tokens: int) -> Tensor:
    """Divide the sum over tokens by rows times a constant.

    w = 1 / (rows with a token * num_tokens).

    Special cases:
        Equals `sequence_mean_token_sum_weights` divided by `num_tokens`, and `token_mean_weights` when every row has
        `num_tokens` tokens.

    Args:
        mask: [batch, time] bool over the whole optimizer step.
        num_tokens: the constant, at least 1, in tokens.

    Returns:
        [batch, time] float64; 0 at masked positions.

    Raises:
        ValueError: `num_tokens` is below 1.

    Source:
        Liu et al. 2025, Dr. GRPO, section 3.2, arXiv 2503.20783.

    Example:
        >>> constant_weights(torch.tensor([[True, True]]), num_tokens=4).tolist()
        [[0.25, 0.25]]
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
    return sequence_mean_token_sum_weights(mask) / num_tokens


def weighted_sum(losses: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Add up token losses with the step's weights: this micro-batch's part of the step's loss.

    L_part = sum over unmasked tokens of weights * losses.

    Args:
        losses: [batch, time]; may hold anything where the mask is false.
        weights: [batch, time], the rows of the step's weights that belong to this micro-batch.
        mask: [batch, time] bool.

    Returns:
        A scalar of the losses' dtype.

    Gradient:
        To `losses` where the mask is true.

    Example:
        >>> weighted_sum(torch.tensor([[2.0, float("nan")]]), torch.ones(1, 2), torch.tensor([[True, False]])).item()
        2.0
    """
    return (masked_fill_zero(losses, mask) * masked_fill_zero(weights, mask).to(losses.dtype)).sum()
