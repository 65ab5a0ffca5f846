"""The contract of a reward: prompts and answers in, one score or None an answer out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from training_core.records import Message, StopReason


class Cause(StrEnum):
    """Why an answer has no score."""

    NO_REFERENCE = "no_reference"
    """The prompt row has nothing to compare with."""
    UNREADABLE_REFERENCE = "unreadable_reference"
    """What the row has cannot be read: a fault of the data."""
    TIMEOUT = "timeout"
    """Checking the answer took too long: neither right nor wrong."""
    ERROR = "error"
    """The scorer failed."""


class Scores(list[float | None]):
    """Scores of some answers, and why those that are None are.

    Args:
        values: one score an answer, None where there is none.
        causes: one an answer, None where there is a score or nothing is known.

    Raises:
        ValueError: another number of causes than of scores, or a cause beside a score.

    >>> scores = Scores([1.0, None, None], [None, Cause.TIMEOUT, Cause.NO_REFERENCE])
    >>> scores, scores.num_caused(Cause.TIMEOUT, Cause.ERROR)
    ([1.0, None, None], 1)
    """

    def __init__(self, values: Iterable[float | None], causes: Iterable[Cause | None] = ()) -> None:
        super().__init__(values)
        self.causes = list(causes) or [None] * len(self)
        if len(self.causes) != len(self):
            raise ValueError(f"{len(self)} scores with {len(self.causes)} causes: give one an answer, None for none")
        for value, cause in zip(self, self.causes, strict=True):
            if value is not None and cause is not None:
                raise ValueError(f"the score {value} has a cause for being missing, {cause.value!r}: give one of them")

    def num_caused(self, *causes: Cause) -> int:
        """Return how many answers have no score for one of `causes`."""
        return sum(cause in causes for cause in self.causes)


class MeasuredScores(list[float | None]):
    """Scores of some answers, and what else their scorer says of each answer.

    Args:
        values: one score an answer, None where there is none.
        measures: by name, one value an answer, None where there is none. Each is logged as
            `reward/<part>_<name>_mean`.
    """

    def __init__(self, values: Iterable[float | None], measures: Mapping[str, Sequence[float | None]]) -> None:
        super().__init__(values)
        self.measures = dict(measures)


def no_poll() -> None:
    """Do nothing: nobody asks for a stop."""


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
    poll: Callable[[], None] = no_poll
    """To be called every second or so by a reward that takes long, in the thread that called the reward. What it raises
    (a stop request, for example) ends the scoring: let it through, and leave no process behind."""


RewardFunction = Callable[[Sequence[Sequence[Message]], Sequence[str], RewardContext], list[float | None]]
"""`(prompts, answers, context)` -> scores in the order of the answers. None means that there is no score: the answer is
left out of group statistics, never counted as 0. A `Scores` is such a list that also says why, and the shares of
time-outs and errors are logged; a `MeasuredScores` is one with more numbers to log. Answers come without the
end-of-turn token."""
