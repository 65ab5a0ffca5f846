"""Rules that compare an answer with the row's reference, or look at its sections."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from training_core.config.reward_parts import MatchReward
from training_core.config.reward_rules import ExactMatchReward, FormatReward, FormatSection
from training_core.config.verifiers import NumericMatchReward
from training_core.records import Message
from training_core.rewards.base import Cause, RewardContext, RewardFunction, Scores
from training_core.rewards.number_text import nearly_equal, number_at

Judgement = float | Cause


def extract(answer: str, pattern: re.Pattern[str] | None) -> str | None:
    r"""Return the first group at the last place where `pattern` matches; the whole answer without a pattern.

    >>> pattern = re.compile("<answer>(.*?)</answer>", re.DOTALL)
    >>> extract("<answer>1</answer> or <answer>2</answer>", pattern), extract("3", pattern), extract("3", None)
    ('2', None, '3')
    """
    if pattern is None:
        return answer
    last = None
    for match in pattern.finditer(answer):
        last = match
    return None if last is None else last[1] or ""


def extract_pattern(config: MatchReward) -> re.Pattern[str] | None:
    return None if config.extract_pattern is None else re.compile(config.extract_pattern, re.DOTALL)


def as_scores(judgements: Sequence[Judgement]) -> Scores:
    """Return scores with the causes of those that are missing."""
    return Scores(
        [None if isinstance(found, Cause) else found for found in judgements],
        [found if isinstance(found, Cause) else None for found in judgements],
    )


def match_rule(config: MatchReward, judge: Callable[[str, Any], Judgement]) -> RewardFunction:
    """Return a rule that judges what is extracted from each answer against the row's reference.

    Args:
        config: where the reference stands and what is extracted.
        judge: (extracted text, reference) -> score, or why there is none.
    """
    pattern = extract_pattern(config)

    def one(answer: str, extra: dict[str, Any]) -> Judgement:
        reference = extra.get(config.reference_key)
        if reference is None:
            return Cause.NO_REFERENCE
        text = extract(answer, pattern)
        # Judged all the same: whether the reference can be read must not depend on the answer.
        judgement = judge(text or "", reference)
        return 0.0 if text is None and not isinstance(judgement, Cause) else judgement

    def score(prompts: Sequence[Sequence[Message]], answers: Sequence[str], context: RewardContext) -> Scores:
        return as_scores([one(answer, extra) for answer, extra in zip(answers, context.extras, strict=True)])

    return score


def build_exact_match(config: ExactMatchReward) -> RewardFunction:
    def fold(text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if config.ignore_case else text

    return match_rule(config, lambda text, reference: float(fold(text) == fold(str(reference))))


def read_reference(reference: Any, config: NumericMatchReward) -> Fraction | None:
    """Return the number that a row's reference is or holds: at the marker where it has one, else the last one."""
    if isinstance(reference, bool):
        return None
    # str() of a float is the shortest text that means it: 0.1 is then a tenth, as in an answer.
    text = str(reference)
    at_marker = number_at(text, config.marker, config.percent)
    return number_at(text, None, config.percent) if at_marker is None else at_marker


def build_numeric_match(config: NumericMatchReward) -> RewardFunction:
    tolerances = {"absolute": config.absolute_tolerance, "relative": config.relative_tolerance}

    def judge(text: str, reference: Any) -> Judgement:
        expected = read_reference(reference, config)
        if expected is None:
            return Cause.UNREADABLE_REFERENCE
        value = number_at(text, config.marker, config.percent)
        return float(value is not None and nearly_equal(value, expected, **tolerances))

    return match_rule(config, judge)


def has_format(answer: str, sections: Sequence[FormatSection], *, text_outside: bool) -> bool:
    """Return whether an answer has every section in order, each marker exactly once, and none of them empty.

    >>> think = FormatSection(start="<think>", end="</think>")
    >>> answers = ["<think>so</think>", "<think> </think>", "<think>a</think><think>b</think>", "ah <think>so</think>"]
    >>> [has_format(answer, [think], text_outside=False) for answer in answers]
    [True, False, False, False]
    """
    outside, rest = [], answer
    for index, section in enumerate(sections):
        if answer.count(section.start) != 1 or (section.end is not None and answer.count(section.end) != 1):
            return False
        before, found, rest = rest.partition(section.start)
        if not found:
            return False
        outside.append(before)
        if section.end is not None:
            content, found, rest = rest.partition(section.end)
            if not found:
                return False
        else:
            following = sections[index + 1].start if index + 1 < len(sections) else None
            end = len(rest) if following is None else rest.find(following)
            content, rest = rest[:end], rest[end:]
            if end < 0:
                return False
        if not content.strip():
            return False
    return text_outside or not "".join([*outside, rest]).strip()


def build_format(config: FormatReward) -> RewardFunction:
    def score(
        prompts: Sequence[Sequence[Message]], answers: Sequence[str], context: RewardContext
    ) -> list[float | None]:
        return [float(has_format(answer, config.sections, text_outside=config.text_outside)) for answer in answers]

    return score
