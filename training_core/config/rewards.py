"""What an answer is rewarded for: a list of parts, each with a weight."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from training_core.config.base import Config

PART_NAME_PATTERN = r"^[a-z][a-z0-9_]*$"


class _Reward(Config):
    weight: float = 1.0
    """Factor of this part in the sum of parts. Negative turns a reward into a penalty."""
    name: str | None = Field(default=None, pattern=PART_NAME_PATTERN)
    """Name in metrics (`reward/<name>_mean`). Default: the kind. Two parts of one kind need names."""

    @property
    def part_name(self) -> str:
        return self.name or str(getattr(self, "kind"))  # noqa: B009 -- `kind` is declared by each variant


class RewardModelReward(_Reward):
    """The score of the reward model that the pipeline trained.

    Policy and reward model share a tokenizer, so what is scored is exactly the token ids that were sampled. Each answer
    is read at the end-of-turn token that the reward model was trained to be read at. One cut by the token limit is read
    as if it ended there (the token takes the place of its last one where it fills the reward model's positions): it
    gains nothing by not ending, and what it should lose for that is up to the reward `truncation`. (A reward model with
    another tokenizer is given the same as text.) A conversation longer than the reward model's positions has no score:
    it is left out and counted in `reward/missing_fraction`. The backbone has the number format in which it was saved
    and validated, `reward_model.dtype`. Evaluation scores by the same rules.
    """

    kind: Literal["reward_model"]
    """Chooses this reward: the reward model's score."""
    normalise: bool = True
    """Subtract the mean and divide by the standard deviation that the reward model had on its held-out pairs, so that
    weights of parts can be compared. Default: true, as OpenRLHF's `normalize_reward`."""
    clip: float | None = Field(default=None, gt=0.0)
    """Bound on the (normalised) score's absolute value. Default: none."""
    max_tokens_per_batch: int = Field(default=4096, ge=1)
    """Most tokens, padding included, that are scored in one forward pass: memory against speed."""


class LengthReward(_Reward):
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


class RegexReward(_Reward):
    """1 when the answer matches a regular expression, else 0."""

    kind: Literal["regex"]
    """Chooses this rule: a match of a regular expression."""
    pattern: str
    """Python regular expression (module `re`)."""
    match: Literal["search", "full"] = "search"
    """`search`: somewhere in the answer. `full`: the whole answer, surrounding white space removed."""
    ignore_case: bool = False
    """Treat upper and lower case alike."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern


class ContainsReward(_Reward):
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


class ExactMatchReward(_Reward):
    """1 when the answer equals the prompt row's reference, else 0; missing when the row has none."""

    kind: Literal["exact_match"]
    """Chooses this rule: equality with the row's reference."""
    reference_key: str = "reference"
    """Key of the reference text in the prompt row's `extra`."""
    ignore_case: bool = False
    """Treat upper and lower case alike. White space at both ends is always ignored, runs of it count as one space."""


class TruncationReward(_Reward):
    """-1 for an answer that the token limit cut, else 0."""

    kind: Literal["truncation"]
    """Chooses this rule: a penalty for answers cut by the token limit."""


class SoftOverlongReward(_Reward):
    """DAPO's soft overlong punishment: 0 up to a length, falling linearly to -1 at the token limit."""

    kind: Literal["soft_overlong"]
    """Chooses this rule: a penalty that grows towards the token limit."""
    buffer_tokens: int = Field(ge=1)
    """Tokens before `max_new_tokens` over which the penalty grows (L_cache of DAPO, arXiv 2503.14476, equation 13)."""


class RepetitionReward(_Reward):
    """Minus the share of an answer's word n-grams that repeat an earlier one: 0 to -1."""

    kind: Literal["repetition"]
    """Chooses this rule: a penalty for repeated word n-grams."""
    ngram: int = Field(default=4, ge=1)
    """Words in an n-gram. Default: 4, as in the seq-rep-4 measure of Welleck et al. 2020 (arXiv 1908.04319)."""


class SentimentReward(_Reward):
    """VADER's compound sentiment of the answer, -1 to 1, from its word list; no model."""

    kind: Literal["sentiment"]
    """Chooses this rule: VADER's sentiment."""


class CustomReward(_Reward):
    """A function of your own, without a fork."""

    kind: Literal["custom"]
    """Chooses this rule: a function of your own."""
    import_path: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:function`; called as `function(prompts, answers, context, **parameters)`, it returns one float or
    None (no score) an answer. See training_core/rewards/base.py."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""


_Rule = (
    LengthReward
    | RegexReward
    | ContainsReward
    | ExactMatchReward
    | TruncationReward
    | SoftOverlongReward
    | RepetitionReward
    | SentimentReward
    | CustomReward
)

RuleConfig = Annotated[_Rule, Field(discriminator="kind")]
"""What needs no model of the pipeline: a reward in training, a measure of its own in evaluation."""

RewardConfig = Annotated[RewardModelReward | _Rule, Field(discriminator="kind")]


def check_part_names(rewards: list[RewardConfig]) -> list[RewardConfig]:
    """Check that a list of rewards is not empty and that no two parts share a name.

    Raises:
        ValueError: it is, or they do (pydantic turns this into a validation error with the field's path).
    """
    if not rewards:
        raise ValueError("at least one reward is needed, for example `- kind: reward_model`")
    names = [reward.part_name for reward in rewards]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"two rewards are called {', '.join(doubled)}: give each a `name` of its own")
    return rewards


def rule_conflicts(rules: Sequence[Config], max_new_tokens: int, limit_field: str) -> list[tuple[int, str]]:
    """Return what rules ask that no answer of at most `max_new_tokens` tokens can meet.

    Args:
        rules: rewards or metrics.
        max_new_tokens: the token limit of an answer.
        limit_field: the field that sets it, for the messages.

    Returns:
        (index of the rule, message that starts with the rule's field), one a conflict.
    """
    found = []
    for index, rule in enumerate(rules):
        if isinstance(rule, SoftOverlongReward) and rule.buffer_tokens > max_new_tokens:
            text = f"buffer_tokens is {rule.buffer_tokens}, longer than a whole answer: write at most"
            found.append((index, f"{text} {limit_field} = {max_new_tokens}"))
        if isinstance(rule, LengthReward) and rule.min_tokens > max_new_tokens:
            text = f"min_tokens is {rule.min_tokens}, but answers end at {limit_field} = {max_new_tokens}"
            found.append((index, f"{text}: no answer could have the full reward"))
    return found


def check_rules_fit(rules: Sequence[Config], max_new_tokens: int) -> None:
    """Check that answers can meet what rules ask, for a stage's own config; a pipeline's names the fields in full.

    Raises:
        ValueError: they cannot.
    """
    for index, text in rule_conflicts(rules, max_new_tokens, "max_new_tokens"):
        raise ValueError(f"rule {index}: {text}")
