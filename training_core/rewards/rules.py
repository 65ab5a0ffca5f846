"""Rewards that need no model: plain functions of the answers, and the builders that configs name.

The functions are pure. Evaluation uses the same ones as measures of its own.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from typing import Any

from training_core.config.reward_rules import (
    ContainsReward,
    CustomReward,
    LengthReward,
    RegexReward,
    RepetitionReward,
    SentimentReward,
    SoftOverlongReward,
    TruncationReward,
)
from training_core.errors import EvaluationError, TidegateError
from training_core.imports import check_parameters, import_function
from training_core.records import Message, StopReason
from training_core.rewards.base import RewardContext, RewardFunction

logger = logging.getLogger(__name__)

Prompts = Sequence[Sequence[Message]]
Answers = Sequence[str]


def length_score(num_tokens: int, *, min_tokens: int, max_tokens: int, slack_tokens: int) -> float:
    """Return 1 inside [min_tokens, max_tokens], falling linearly to 0 at `slack_tokens` outside.

    >>> [length_score(n, min_tokens=4, max_tokens=8, slack_tokens=4) for n in (4, 8, 10, 12, 40, 2)]
    [1.0, 1.0, 0.5, 0.0, 0.0, 0.5]
    """
    outside = max(min_tokens - num_tokens, num_tokens - max_tokens, 0)
    return max(0.0, 1.0 - outside / slack_tokens)


def repetition_fraction(text: str, ngram: int = 4) -> float:
    """Return the share of word n-grams that occurred before in the text; 0 for texts shorter than one n-gram.

    >>> round(repetition_fraction("a b c d a b c d", ngram=4), 3)
    0.2
    """
    words = text.lower().split()
    ngrams = [tuple(words[start : start + ngram]) for start in range(len(words) - ngram + 1)]
    return 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


@functools.lru_cache(maxsize=1)
def _vader() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def sentiment_score(text: str) -> float:
    """Return VADER's compound sentiment of `text`, in [-1, 1]; 0 for an empty text.

    >>> sentiment_score("I love this wonderful day") > 0.5 > sentiment_score("I hate this awful day")
    True
    """
    return float(_vader().polarity_scores(text)["compound"])


def build_length(config: LengthReward) -> RewardFunction:
    limits = {"min_tokens": config.min_tokens, "max_tokens": config.max_tokens, "slack_tokens": config.slack_tokens}

    def score(prompts: Prompts, answers: Answers, context: RewardContext) -> list[float | None]:
        return [length_score(n, **limits) for n in context.num_tokens]

    return score


def build_regex(config: RegexReward) -> RewardFunction:
    pattern = re.compile(config.pattern, re.IGNORECASE if config.ignore_case else 0)

    def score(prompts: Prompts, answers: Answers, context: RewardContext) -> list[float | None]:
        if config.match == "full":
            return [float(pattern.fullmatch(answer.strip()) is not None) for answer in answers]
        return [float(pattern.search(answer) is not None) for answer in answers]

    return score


def build_contains(config: ContainsReward) -> RewardFunction:
    def fold(text: str) -> str:
        return text.casefold() if config.ignore_case else text

    phrases = [fold(phrase) for phrase in config.phrases]

    def score(prompts: Prompts, answers: Answers, context: RewardContext) -> list[float | None]:
        return [sum(phrase in fold(answer) for phrase in phrases) / len(phrases) for answer in answers]

    return score


def build_truncation(config: TruncationReward) -> RewardFunction:
    def score(prompts: Prompts, answers: Answers, context: RewardContext) -> list[float | None]:
        return [-1.0 if reason == StopReason.LENGTH else 0.0 for reason in context.stop_reasons]

    return score


def build_soft_overlong(config: SoftOverlongReward) -> RewardFunction:
    def score(prompts: Prompts, answers: Answers, context: RewardContext) -> list[float | None]:
        import torch

        from training_core.ops.shaping import soft_overlong_penalty

        # The end-of-turn token counts against the limit too.
        ended = [reason == StopReason.EOS for reason in context.stop_reasons]
        lengths = torch.tensor([n + int(eos) for n, eos in zip(context.num_tokens, ended, strict=True)])
        penalty = soft_overlong_penalty(lengths, max_tokens=context.max_new_tokens, buffer_tokens=config.buffer_tokens)
        return [float(value) for value in penalty]

    return score


def build_repetition(config: RepetitionReward) -> RewardFunction:
    def score(prompts: Prompts, answers: Answers, context: RewardContext) -> list[float | None]:
        return [-repetition_fraction(answer, config.ngram) for answer in answers]

    return score


def build_sentiment(config: SentimentReward) -> RewardFunction:
    def score(prompts: Prompts, answers: Answers, context: RewardContext) -> list[float | None]:
        return [sentiment_score(answer) for answer in answers]

    return score


def build_custom(config: CustomReward) -> RewardFunction:
    function = import_function(config.import_path, "reward")
    check_parameters(function, config.parameters, f"reward {config.part_name}", config.import_path)

    def score(prompts: Prompts, answers: Answers, context: RewardContext) -> list[float | None]:
        try:
            found = function(prompts, answers, context, **config.parameters)
            return found if isinstance(found, list) else list(found)
        except TidegateError:
            raise
        except Exception as error:
            logger.warning("reward function %s failed", config.import_path, exc_info=True)
            raise EvaluationError(
                f"reward function {config.import_path} raised {error!r} on {len(answers)} answers. Return None for an "
                "answer that has no score; the traceback is in the stage's log.jsonl"
            ) from error

    return score
