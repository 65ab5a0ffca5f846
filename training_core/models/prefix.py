"""Forward passes that compute the ids which all sequences start with only once.

A chat template opens every conversation alike: in short answers to short prompts its system message is a third of all
tokens. Its keys and values are the same for every sequence, since no token looks ahead.

Shapes: B rows, W ids of a row after the prefix, D hidden width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

MIN_PREFIX_TOKENS = 8
"""Below this, a second pass costs more than it saves."""


def common_prefix(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return the ids that all sequences start with, never the whole of one.

    Fewer than `MIN_PREFIX_TOKENS`, or fewer than two sequences, give no prefix.

    >>> start = list(range(10))
    >>> common_prefix([[*start, 11, 12], [*start, 13]]) == start
    True
    >>> common_prefix([start, [*start, 13]]) == start[:9]
    True
    >>> common_prefix([[1, 2, 3], [1, 2, 4]])
    []
    """
    if len(sequences) < 2:
        return []
    # The first and the last in order differ as early as any two do.
    low, high = min(sequences, key=tuple), max(sequences, key=tuple)
    limit = min(map(len, sequences)) - 1
    length = 0
    while length < limit and low[length] == high[length]:
        length += 1
    return list(low[:length]) if length >= MIN_PREFIX_TOKENS else []


class SharedPrefix:
    """Keys and values of a prefix, for inference.

    Args:
        backbone: a decoder without its head, in evaluation mode, whose attention takes a cache.
        ids: the prefix; empty for none.
    """

    def __init__(self, backbone: Any, ids: Sequence[int]) -> None:
        self.num_tokens = len(ids)
        self._backbone = backbone
        self._cache: Any = None
        if ids:
            self._cache = DynamicCache(config=backbone.config)
            input_ids = torch.tensor([list(ids)], device=backbone.device)
            with torch.no_grad():
                backbone(input_ids=input_ids, past_key_values=self._cache, use_cache=True)

    @torch.no_grad()
    def hidden(self, input_ids: Tensor) -> Tensor:
        """Return the last hidden states [B, W, D] of rows that follow the prefix.

        Equal to those of the whole sequences up to rounding.

        Args:
            input_ids: [B, W] int64 without the prefix, padded on the right: causal attention shows padding to no real
                token, so there is no mask.
        """
        if self._cache is None:
            plain: Tensor = self._backbone(input_ids=input_ids, use_cache=False).last_hidden_state
            return plain
        cache = copy.deepcopy(self._cache)
        cache.batch_select_indices(torch.zeros(len(input_ids), dtype=torch.long, device=input_ids.device))
        positions = torch.arange(self.num_tokens, self.num_tokens + input_ids.shape[1], device=input_ids.device)
        hidden: Tensor = self._backbone(
            input_ids=input_ids,
            position_ids=positions.expand(len(input_ids), -1),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return hidden
