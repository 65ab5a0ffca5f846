"""The contract of a reward: prompts and answers in, one score or None an answer out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from training_core.records import Message, StopReason


@dataclass(frozen=True)
class RewardContext:
    """What a reward may know about the answers besides their text; every list has one entry an answer."""

    num_tokens: Sequence[int]
    """Length in tokens without the end-of-turn token."""
    stop_reasons: Sequence[StopReason]
    extras: Sequence[dict[str, Any]]
    """The prompt row's `extra`, for example a reference answer."""
    max_new_tokens: int
    """The token limit that answers were sampled with."""
    sequences: Sequence[Sequence[int]] = ()
    """Prompt and answer in the policy's token ids exactly as sampled, the end-of-turn token included where the answer
    has one. Given in training; empty for the gold metrics of an evaluation, whose models may have other tokenizers."""


RewardFunction = Callable[[Sequence[Sequence[Message]], Sequence[str], RewardContext], list[float | None]]
"""`(prompts, answers, context)` -> scores in the order of the answers. None means that there is no score: the answer is
left out of group statistics, never counted as 0. Answers come without the end-of-turn token."""
