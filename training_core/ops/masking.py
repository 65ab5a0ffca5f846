"""Masks: bool, true = counts. A masked position may hold anything, NaN included.

Shapes: B rows (answers), T answer tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_mask(mask: Tensor, values: Tensor | None = None) -> None:
    """Check that a mask is bool and fits.

    Args:
        mask: [batch, time] or any shape.
        values: tensor that the mask is for, of the same shape.

    Raises:
        TypeError: the mask is not bool.
        ValueError: shapes differ.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"a mask must be bool (true = counts), got {mask.dtype}; write `mask != 0`")
    if values is not None and values.shape != mask.shape:
        raise ValueError(f"mask {tuple(mask.shape)} and values {tuple(values.shape)} must have the same shape")


def lengths_to_mask(lengths: Tensor, num_columns: int) -> Tensor:
    """Mark the first `lengths[i]` positions of row i.

    Args:
        lengths: [batch], integers in [0, num_columns].
        num_columns: width T of the mask.

    Returns:
        [batch, num_columns] bool.

    Raises:
        ValueError: a length is outside the range.

    Example:
        >>> lengths_to_mask(torch.tensor([2, 0]), 3).tolist()
        [[True, True, False], [False, False, False]]
    """
    if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > num_columns):
        raise ValueError(f"lengths must lie in [0, {num_columns}], got {int(lengths.min())} to {int(lengths.max())}")
    return torch.arange(num_columns, device=lengths.device)[None, :] < lengths[:, None]


def masked_fill_zero(values: Tensor, mask: Tensor) -> Tensor:
    """Put 0 where the mask is false, in value and in gradient.

    values_masked = values where mask, else 0. Selecting instead of multiplying keeps a NaN at a masked position out
    of sums; its gradient there is exactly 0.

    Args:
        values: any shape, float; masked positions may hold anything.
        mask: same shape, bool.

    Returns:
        Same shape and unit; 0 at masked positions.

    Gradient:
        Passes to `values` where the mask is true.

    Example:
        >>> masked_fill_zero(torch.tensor([1.0, float("nan")]), torch.tensor([True, False])).tolist()
        [1.0, 0.0]
    """
    check_mask(mask, values)
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum the values where the mask is true.

    Special cases:
        An all-false mask gives 0.

    Args:
        values: any shape, float; masked positions may hold anything.
        mask: same shape, bool.
        dim: dimension to sum over; all of them when None.

    Returns:
        A scalar, or `values` without `dim`.

    Gradient:
        1 to `values` where the mask is true, 0 elsewhere.

    Example:
        >>> masked_sum(torch.tensor([1.0, 2.0, float("inf")]), torch.tensor([True, True, False])).item()
        3.0
    """
    filled = masked_fill_zero(values, mask)
    return filled.sum() if dim is None else filled.sum(dim=dim)
