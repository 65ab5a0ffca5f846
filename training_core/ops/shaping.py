"""Penalties on an answer's length.

Shapes: N answers.
"""

from __future__ import annotations

from torch import Tensor


def soft_overlong_penalty(num_tokens: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """Compute DAPO's soft overlong punishment.

    start = max_tokens - buffer_tokens; penalty = 0 up to start, (start - num_tokens) / buffer_tokens up to max_tokens,
    -1 above.

    Special cases:
        num_tokens = max_tokens gives -1. Never above 0 nor below -1.

    Args:
        num_tokens: [answers], length in tokens.
        max_tokens: the token limit L_max, at least 1.
        buffer_tokens: tokens over which the penalty grows, L_cache, in [1, max_tokens].

    Returns:
        [answers] float64, reward units.

    Raises:
        ValueError: `buffer_tokens` out of range.

    Source:
        Yu et al. 2025, DAPO, equation 13, arXiv 2503.14476.

    Example:
        >>> import torch
        >>> soft_overlong_penalty(torch.tensor([6, 9, 10]), max_tokens=10, buffer_tokens=4).tolist()
        [-0.0, -0.75, -1.0]
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens must lie in [1, {max_tokens}] (the token limit), got {buffer_tokens}")
    start = max_tokens - buffer_tokens
    return -((num_tokens.double() - start) / buffer_tokens).clamp(0.0, 1.0)
