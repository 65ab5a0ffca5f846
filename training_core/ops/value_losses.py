"""Losses of the critic: one value a token. Adding them up is another function (ops/aggregation.py).

Shapes: B rows (answers), T answer tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training_core.ops.masking import masked_fill_zero


def squared_error(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Compute half the squared distance of each value to its target.

    loss = 0.5 * (value - return)^2.

    Special cases:
        Value equal to its target: 0, gradient 0.

    Args:
        values: [batch, time] of the critic that is trained, reward units.
        returns: [batch, time] targets, reward units.
        mask: [batch, time] bool; the other tensors may hold anything where it is false.

    Returns:
        [batch, time], reward units squared; 0 at masked positions.

    Gradient:
        To `values`: value - return.

    Source:
        Schulman et al. 2017, equation 9 (L_VF), arXiv 1707.06347.

    Example:
        >>> squared_error(torch.tensor([[3.0]]), torch.tensor([[1.0]]), torch.tensor([[True]])).item()
        2.0
    """
    # The difference is selected before it is squared: a NaN at a masked position must not reach the gradient.
    return 0.5 * masked_fill_zero(values - returns.detach(), mask).square()


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Compute PPO's value loss, which stops a value that has gone further than `clip` from where it was.

    bounded = old_value + clamp(value - old_value, -clip, clip);
    loss = 0.5 * max((value - return)^2, (bounded - return)^2).

    Special cases:
        clip = None, or so wide that no value reaches it: `squared_error`, and nothing is clipped. values = old_values:
        `squared_error`. Never below `squared_error`.

    Args:
        values: [batch, time] of the critic that is trained, reward units.
        old_values: [batch, time] of the critic before the first update on these answers, reward units.
        returns: [batch, time] targets, reward units.
        mask: [batch, time] bool; the other tensors may hold anything where it is false.
        clip: largest change that passes a gradient, reward units, above 0; None for no bound.

    Returns:
        (loss, is_clipped), each [batch, time]: 0 and false at masked positions. `is_clipped` marks tokens whose loss is
        that of the bounded value, so that they pass no gradient.

    Gradient:
        To `values`: value - return, 0 where clipped.

    Raises:
        ValueError: `clip` is not above 0.

    Source:
        Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", section 3, arXiv 2005.12729.

    Example:
        >>> def at(value):
        ...     return torch.tensor([[value]])
        >>> loss, is_clipped = clipped_value_loss(at(1.0), at(0.0), at(2.0), at(True), clip=0.5)
        >>> loss.item(), is_clipped.item()
        (1.125, True)
    """
    plain = squared_error(values, returns, mask)
    if clip is None:
        return plain, torch.zeros_like(mask)
    if not clip > 0.0:
        raise ValueError(f"clip must be above 0 (reward units), or null for no bound; got {clip}")
    old = masked_fill_zero(old_values.detach(), mask)
    change = masked_fill_zero(values.detach() - old_values.detach(), mask)
    bounded = squared_error(old + change.clamp(-clip, clip), returns, mask)
    # Only outside the bound: inside it the two differ by rounding, and a token must not count as clipped for that.
    is_clipped = (change.abs() > clip) & (bounded > plain)
    return torch.where(is_clipped, bounded, plain), is_clipped
