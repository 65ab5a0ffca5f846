"""Rewards without a model that look at an answer's text or length."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from training_core.config.base import Config
from training_core.config.reward_parts import MatchReward, Pattern, RewardPartConfig


class LengthReward(RewardPartConfig):
    """Closeness to a wanted length: 1 inside the range, falling linearly to 0 at `slack_tokens` outside of it."""

    kind: Literal["length"]
    """Chooses this rule: closeness to a wanted length."""
    min_tokens: int = Field(default=0, ge=0)
    """Shortest answer with the full reward, in tokens without the end-of-turn token."""
    max_tokens: int = Field(ge=1)
    """Longest answer with the full reward, in tokens without the end-of-turn token."""
    slack_tokens: int = Field(default=16, ge=1)
    """Tokens outside the range at which the reward reaches 0."""

    @model_validator(mode="after")
    def _range(self) -> LengthReward:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        return self


class RegexReward(RewardPartConfig):
    """1 when the answer matches a regular expression, else 0."""

    kind: Literal["regex"]
    """Chooses this rule: a match of a regular expression."""
    pattern: Pattern
    """Python regular expression (module `re`)."""
    match: Literal["search", "full"] = "search"
    """`search`: somewhere in the answer. `full`: the whole answer, surrounding white space removed."""
    ignore_case: bool = False
    """Treat upper and lower case alike."""


class ContainsReward(RewardPartConfig):
    """The share of given phrases that the answer contains."""

    kind: Literal["contains"]
    """Chooses this rule: the share of phrases that occur."""
    phrases: list[str] = Field(min_length=1)
    """Phrases to look for, none of them empty."""
    ignore_case: bool = True
    """Treat upper and lower case alike."""

    @field_validator("phrases")
    @classmethod
    def _not_empty(cls, phrases: list[str]) -> list[str]:
        if any(not phrase.strip() for phrase in phrases):
            raise ValueError("phrases must not be empty: every answer contains the empty phrase")
        return phrases


class ExactMatchReward(MatchReward):
    """1 when the answer equals the prompt row's reference, else 0; missing when the row has none."""

    kind: Literal["exact_match"]
    """Chooses this rule: equality with the row's reference."""
    ignore_case: bool = False
    """Treat upper and lower case alike. White space at both ends is always ignored, runs of it count as one space."""


class FormatSection(Config):
    """One section of an answer."""

    start: str = Field(min_length=1)
    """Text that opens the section, for example `<think>` or `## Result`."""
    end: str | None = Field(default=None, min_length=1)
    """Text that closes it. Default: the next section's start, or the end of the answer."""


class FormatReward(RewardPartConfig):
    """1 when the answer has all sections in order, each marker exactly once and none of them empty, else 0."""

    kind: Literal["format"]
    """Chooses this rule: sections in order."""
    sections: list[FormatSection] = Field(min_length=1)
    """The sections, in the order in which they must come."""
    text_outside: bool = False
    """Allow text before, between and after the sections. White space is always allowed."""

    @field_validator("sections")
    @classmethod
    def _markers_differ(cls, sections: list[FormatSection]) -> list[FormatSection]:
        markers = [marker for section in sections for marker in (section.start, section.end) if marker is not None]
        for index, marker in enumerate(markers):
            if any(marker in other for position, other in enumerate(markers) if position != index):
                raise ValueError(
                    f"the marker {marker!r} occurs in another marker, so it could not occur exactly once: choose "
                    "markers that do not contain each other"
                )
        return sections


class TruncationReward(RewardPartConfig):
    """-1 for an answer that the token limit cut, else 0."""

    kind: Literal["truncation"]
    """Chooses this rule: a penalty for answers cut by the token limit."""


class SoftOverlongReward(RewardPartConfig):
    """DAPO's soft overlong punishment: 0 up to a length, falling linearly to -1 at the token limit (Yu et al. 2025,
    arXiv 2503.14476, equation 13)."""

    kind: Literal["soft_overlong"]
    """Chooses this rule: a penalty that grows towards the token limit."""
    buffer_tokens: int = Field(ge=1)
    """Tokens before `max_new_tokens` over which the penalty grows (L_cache of DAPO, arXiv 2503.14476, equation 13)."""


class RepetitionReward(RewardPartConfig):
    """Minus the share of an answer's word n-grams that repeat an earlier one: 0 to -1 (after Welleck et al. 2020,
    arXiv 1908.04319)."""

    kind: Literal["repetition"]
    """Chooses this rule: a penalty for repeated word n-grams."""
    ngram: int = Field(default=4, ge=1)
    """Words in an n-gram. Default: 4, as in the seq-rep-4 measure of Welleck et al. 2020 (arXiv 1908.04319)."""


class SentimentReward(RewardPartConfig):
    """VADER's compound sentiment of the answer, -1 to 1, from its word list; no model (Hutto and Gilbert 2014)."""

    kind: Literal["sentiment"]
    """Chooses this rule: VADER's sentiment."""


class CustomReward(RewardPartConfig):
    """A function of your own, without a fork."""

    kind: Literal["custom"]
    """Chooses this rule: a function of your own."""
    import_path: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:function`; called as `function(prompts, answers, context, **parameters)`, it returns one float or
    None (no score) an answer, or a `Scores` that also says why some are missing. See training_core/rewards/base.py."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""
