"""What an answer is rewarded for: a list of parts, each with a weight.

reward_parts.py has what all parts share, reward_rules.py and verifiers.py the parts that need no model of the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from training_core.config.base import Config
from training_core.config.reward_parts import RewardPartConfig
from training_core.config.reward_rules import (
    ContainsReward,
    CustomReward,
    ExactMatchReward,
    FormatReward,
    LengthReward,
    RegexReward,
    RepetitionReward,
    SentimentReward,
    SoftOverlongReward,
    TruncationReward,
)
from training_core.config.verifiers import CodeTestsReward, HttpReward, MathVerifyReward, NumericMatchReward


class RewardModelReward(RewardPartConfig):
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
    max_tokens_per_batch: int = Field(default=4096, ge=1)
    """Most tokens, padding included, that are scored in one forward pass: memory against speed."""
    disagreement_penalty: float = Field(default=0.0, ge=0.0)
    """With an ensemble (`reward_model.num_members`): how many standard deviations over its members are subtracted from
    the mean of their scores before it is normalised, so that an answer that only some members like gains little. The
    members' scores are in units of their own standard deviation. The spread is logged as
    `reward/<name>_disagreement_mean`, in the reward's unit. Default: 0, the mean alone; Eisenstein et al. 2023 (arXiv
    2312.09244) subtract the standard deviation, Coste et al. 2024 (arXiv 2310.02743) the variance."""

    @model_validator(mode="after")
    def _one_scale(self) -> RewardModelReward:
        if self.normalise and self.scale is not None:
            raise ValueError("`scale` and `normalise: true` would scale twice: write `normalise: false` beside `scale`")
        return self


_Rule = (
    LengthReward
    | RegexReward
    | ContainsReward
    | ExactMatchReward
    | NumericMatchReward
    | MathVerifyReward
    | CodeTestsReward
    | HttpReward
    | FormatReward
    | TruncationReward
    | SoftOverlongReward
    | RepetitionReward
    | SentimentReward
    | CustomReward
)

RuleConfig = Annotated[_Rule, Field(discriminator="kind")]
"""What needs no model of the pipeline: a reward in training, a measure of its own in evaluation."""

RewardConfig = Annotated[RewardModelReward | _Rule, Field(discriminator="kind")]

METRIC_DEFAULTS = {"weight": 1.0, "scale": None, "clip": None, "on_missing": "missing"}
"""What a rule says of its place in a sum of rewards: it has none as a metric of an evaluation."""


def check_part_names(rewards: list[RewardConfig]) -> list[RewardConfig]:
    """Check that a list of rewards is not empty and that no two parts share a name.

    Raises:
        ValueError: it is, or they do (pydantic turns this into a validation error with the field's path).
    """
    if not rewards:
        raise ValueError("at least one reward is needed, for example `- kind: reward_model`")
    if all(reward.weight == 0.0 for reward in rewards):
        raise ValueError("every reward has weight 0, so all answers would score the same: give one a weight")
    return check_names_differ(rewards)


def check_names_differ(rewards: list[RewardConfig]) -> list[RewardConfig]:
    """Check that no two parts share a name.

    Raises:
        ValueError: they do.
    """
    names = [reward.part_name for reward in rewards]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"two rewards are called {', '.join(doubled)}: give each a `name` of its own")
    return rewards


def check_plain_metrics(rules: list[RuleConfig]) -> list[RuleConfig]:
    """Check that metrics of an evaluation, which are not summed, set nothing that only a sum of rewards reads.

    Raises:
        ValueError: one does (pydantic turns this into a validation error with the field's path).
    """
    for index, rule in enumerate(rules):
        unread = [name for name, default in METRIC_DEFAULTS.items() if getattr(rule, name) != default]
        if unread:
            raise ValueError(
                f"metric {index} ({rule.part_name}) sets {', '.join(unread)}: an evaluation measures each rule by "
                "itself, unscaled; leave it out"
            )
    return rules


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
