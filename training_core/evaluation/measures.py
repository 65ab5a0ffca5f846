"""What can be measured on an answer without a model: length, truncation, repetition and the gold rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from training_core.config.evaluation import (
    LENGTH_METRIC,
    REPETITION_METRIC,
    SAME_OPENING_METRIC,
    TRUNCATED_METRIC,
)
from training_core.config.rewards import RuleConfig
from training_core.evaluation.samples import EvaluationPrompt, ModelSamples, add_scores
from training_core.records import PromptRow, StopReason
from training_core.registries import REWARD_RULES
from training_core.rewards.base import RewardContext
from training_core.rewards.rules import repetition_fraction

NGRAM = 4
OPENING_WORDS = 2


def measure_answers(
    model: str,
    table: ModelSamples,
    rows: Sequence[PromptRow],
    prompts: Sequence[EvaluationPrompt],
    rules: Sequence[RuleConfig],
    max_new_tokens: int,
) -> None:
    """Add `length_tokens`, `truncated` (0 or 1), `repetition` (share of repeated word 4-grams),
    `same_opening` (see `opening_shares`) and the gold rules.

    Raises:
        EvaluationError: a rule gave a score that is not finite, or another number of scores than of answers.
    """
    samples = table.samples
    context = RewardContext(
        num_tokens=[sample.num_tokens for sample in samples],
        stop_reasons=[sample.stop_reason for sample in samples],
        extras=[rows[sample.prompt_index].extra for sample in samples],
        max_new_tokens=max_new_tokens,
    )
    answers = [sample.answer for sample in samples]
    messages = [rows[sample.prompt_index].prompt for sample in samples]
    for rule in rules:
        scores = REWARD_RULES[rule.kind](rule)(messages, answers, context)
        add_scores(model, table, rule.part_name, scores, prompts)
    built_in = {
        LENGTH_METRIC: [float(n) for n in context.num_tokens],
        TRUNCATED_METRIC: [float(reason == StopReason.LENGTH) for reason in context.stop_reasons],
        REPETITION_METRIC: [repetition_fraction(answer, NGRAM) for answer in answers],
        SAME_OPENING_METRIC: opening_shares(answers, [sample.prompt_index for sample in samples]),
    }
    for metric, values in built_in.items():
        add_scores(model, table, metric, values, prompts)


def opening_shares(answers: Sequence[str], prompts: Sequence[int]) -> list[float]:
    """Return, for each answer, the share of the answers to other prompts that begin with the same two words.

    The mean is the chance that two answers to different prompts begin alike. A policy that found one phrase the reward
    likes says it everywhere: no measure within an answer sees that.

    Args:
        answers: one model's answers.
        prompts: which prompt each answers, same length.

    >>> opening_shares(["I am glad", "I  am sad", "No.", "i AM"], [0, 1, 2, 3])
    [0.6666666666666666, 0.6666666666666666, 0.0, 0.6666666666666666]
    """
    openings = [" ".join(answer.casefold().split()[:OPENING_WORDS]) for answer in answers]
    alike = Counter(openings)
    alike_within = Counter(zip(prompts, openings, strict=True))
    answers_of = Counter(prompts)
    shares = []
    for prompt, opening in zip(prompts, openings, strict=True):
        num_others = len(answers) - answers_of[prompt]
        same = alike[opening] - alike_within[prompt, opening]
        shares.append(same / num_others if num_others else 0.0)
    return shares
