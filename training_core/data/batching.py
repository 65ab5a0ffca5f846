"""Sequences of token ids to padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from training_core.errors import DataError


def pad_sequences(
    sequences: Sequence[Sequence[int]], pad_token_id: int, side: Literal["left", "right"] = "right"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(input_ids, mask)`, both [batch, time], as wide as the longest sequence.

    Args:
        sequences: each with at least one id.
        pad_token_id: fills the rest; which id it is makes no difference to a model that is given the mask.
        side: where the padding goes.

    Returns:
        int64 ids and a bool mask that is true at real tokens. The mask follows lengths, never ids: a pad id inside
        a sequence is a real token.

    Raises:
        DataError: no sequence, or an empty one.

    >>> ids, mask = pad_sequences([[5, 6, 7], [8]], pad_token_id=0)
    >>> ids.tolist(), mask.tolist()
    ([[5, 6, 7], [8, 0, 0]], [[True, True, True], [True, False, False]])
    """
    if not sequences or not all(sequences):
        raise DataError("a batch needs at least one sequence, and every sequence at least one token")
    width = max(map(len, sequences))
    input_ids = torch.full((len(sequences), width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(sequences), width), dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        columns = slice(0, len(sequence)) if side == "right" else slice(width - len(sequence), width)
        input_ids[row, columns] = torch.tensor(sequence, dtype=torch.int64)
        mask[row, columns] = True
    return input_ids, mask


def batches_by_tokens(lengths: Sequence[int], max_tokens_per_batch: int) -> list[list[int]]:
    """Return batches of indices, longest first, so that each batch has at most that many tokens, padding included.

    A sequence longer than the bound is a batch of its own. Ties keep the input's order, so the result depends on the
    lengths only.

    Raises:
        ValueError: the bound is not positive.

    >>> batches_by_tokens([2, 9, 3, 3], max_tokens_per_batch=9)
    [[1], [2, 3, 0]]
    """
    if max_tokens_per_batch < 1:
        raise ValueError(f"max_tokens_per_batch must be positive, got {max_tokens_per_batch}")
    batches: list[list[int]] = []
    for index in by_length(range(len(lengths)), lengths):
        # The first of a batch is its longest: it decides the width.
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= max_tokens_per_batch:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def micro_batches(indices: Sequence[int], lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return `indices` in chunks of at most `size`, longest first, so that a chunk holds similar lengths.

    Args:
        indices: the items of one optimizer step.
        lengths: length of every item, looked up by index.
        size: items in a chunk.

    Raises:
        ValueError: `size` is not positive.

    >>> micro_batches([0, 1, 2], lengths=[4, 9, 7], size=2)
    [[1, 2], [0]]
    """
    if size < 1:
        raise ValueError(f"size must be positive, got {size}")
    ordered = by_length(indices, lengths)
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def by_length(indices: Sequence[int] | range, lengths: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda index: -lengths[index])
