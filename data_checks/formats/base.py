"""What a format is: how it is told from others, and how one of its rows becomes examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from data_checks.rows import Dropped, FeedbackRow, Finding, PairRow, PromptItem, RawRow, Reason, StepwiseRow

Kind = Literal["pairs", "feedback", "prompts", "stepwise"]
"""What the rows of a format become: pairs, judged answers, prompts alone, answers judged step by step."""

LabelKind = Literal["pair", "ranked", "unpaired", "rl_prompt", "stepwise"]
"""What a judgement says: this answer of two, this one of many by rank, this one alone, nothing, each step."""

Result = PairRow | FeedbackRow | PromptItem | StepwiseRow | Finding | Dropped
"""One example: something to judge further, or why there is nothing."""


class RowError(ValueError):
    """A row is not what its format says; the message becomes the finding's detail and never quotes a value."""

    def __init__(self, detail: str, reason: Reason = Reason.WRONG_TYPE) -> None:
        super().__init__(detail)
        self.finding = Finding(reason, detail)


@dataclass(frozen=True, slots=True)
class Options:
    """What the config says beside a file's path, as far as formats need it."""

    source: str
    """Name of the data where a row names none."""
    label: str | None = None
    """Which of several judgements counts, for formats that hold more than one."""
    score: str | None = None
    """Which of several ratings counts, for formats that hold more than one."""
    max_pairs_per_row: int = 6
    """Most pairs that one row with several ranked answers becomes."""
    rating_threshold: float | None = None
    """Ratings from here on are good, for rows without another judgement; None: not said."""


@dataclass(frozen=True)
class Sign:
    """Something that rows of a format may show."""

    words: str
    """What the rows do, as the end of `5 of 9 sampled rows …`."""
    shows: Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class Format:
    """One layout of rows in the wild."""

    name: str
    kind: Kind
    summary: str
    """The columns and what they mean, in one line, for the docs and for error messages."""
    columns: frozenset[str]
    """What the format reads; other columns go to `extra`."""
    fits: Callable[[dict[str, Any]], bool]
    """Whether a readable row has the format's structure: names and types of columns, not the quality of its content."""
    convert: Callable[[RawRow, Options], list[Result]]
    """At least one example for a readable row, whatever it holds; raises nothing but RowError, which is its finding."""
    refines: frozenset[str] = frozenset()
    """Names of more general formats whose structure such rows have too: this one is meant then."""
    labels: tuple[str, ...] = ()
    """What `label` may be; not empty: the config must name one, since the judgements may disagree."""
    scores: tuple[str, ...] = ()
    """What `score` may be; the first is the default."""
    label_kind: LabelKind = "pair"
    """What the format's judgements are, for the column of that name."""
    needs: tuple[str, ...] = ()
    """The columns that rows of the format are known by, for evidence and error messages."""
    signs: tuple[Sign, ...] = ()
    """What else is counted over sampled rows and told as evidence."""
