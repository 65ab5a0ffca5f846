"""What can be measured on an answer without a model: length, truncation, repetition and the gold rules."""

from __future__ import annotations

from collections.abc import Sequence

from training_core.config.evaluation import LENGTH_METRIC, REPETITION_METRIC, TRUNCATED_METRIC, GoldMetricConfig
from training_core.evaluation.samples import EvaluationPrompt, ModelSamples, add_scores
from training_core.records import PromptRow, StopReason
from training_core.registries import REWARD_RULES
from training_core.rewards.base import RewardContext
from training_core.rewards.rules import repetition_fraction

NGRAM = 4


def measure_answers(
    model: str,
    table: ModelSamples,
    rows: Sequence[PromptRow],
    prompts: Sequence[EvaluationPrompt],
    rules: Sequence[GoldMetricConfig],
    max_new_tokens: int,
) -> None:
    """Add `length_tokens`, `truncated` (0 or 1), `repetition` (share of repeated word 4-grams) and the gold rules.

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
    }
    for metric, values in built_in.items():
        add_scores(model, table, metric, values, prompts)
