"""What was saved, measured on the validation rows with the function that will score answers."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training_core.config.reward_model import BradleyTerryLoss, RewardModelConfig
from training_core.models.heads import (
    REWARD_CONFIG,
    RewardModel,
    load_reward_model,
    save_score_scale,
    score_token_ids,
)
from training_core.models.loading import load_tokenizer, pad_token_id, training_device, update_json
from training_core.models.reward_ensemble import (
    combine_scores,
    member_directory,
    save_ensemble_files,
)
from training_core.protocol.atomic import read_json
from training_core.reward_modelling.data import RewardData, present_rows, rating_targets
from training_core.reward_modelling.ratings import stored_scale
from training_core.reward_modelling.validation import (
    RatingScores,
    check_batch_invariance,
    mean_and_std,
    split_pairs,
    validation_sequences,
)

logger = logging.getLogger(__name__)


def score_validation(model: RewardModel, data: RewardData, pad: int, max_tokens_per_batch: int) -> list[float]:
    """Return one score an entry of `validation_sequences`."""
    sequences = validation_sequences(data.validation_pairs, data.validation_feedback)
    return score_token_ids(model, sequences, pad, max_tokens_per_batch)


def self_test_sequences(data: RewardData) -> Sequence[list[int]]:
    """Return answers for `check_batch_invariance`, which takes the first few."""
    if data.validation_pairs is not None:
        return data.validation_pairs.chosen
    return validation_sequences(None, data.validation_feedback)


def describe(
    scores: Sequence[float], data: RewardData, config: RewardModelConfig, trained: dict[str, Any]
) -> dict[str, Any]:
    """Return what the scores of the validation rows come to: of pairs, and of ratings when the loss is of ratings.

    Args:
        scores: one an entry of `validation_sequences`.
        data: the rows.
        config: says which column is rated.
        trained: the training's report, with the scale from scores to ratings.
    """
    pairs = split_pairs(scores, data.validation_pairs)
    report: dict[str, Any] = {} if pairs is None else pairs.summary()
    if data.validation_feedback is not None:
        predicted = predict_ratings(scores, data, trained)
        report.update(rating_scores(predicted, data, config).summary())
    return report


def predict_ratings(scores: Sequence[float], data: RewardData, trained: dict[str, Any]) -> list[float]:
    """Return the predicted rating of every row of the validation feedback; none without such rows."""
    if data.validation_feedback is None:
        return []
    of_feedback = np.asarray(scores[len(scores) - len(data.validation_feedback) :], np.float64)
    return [float(rating) for rating in stored_scale(trained).predict(of_feedback)]


def rating_scores(predicted: Sequence[float], data: RewardData, config: RewardModelConfig) -> RatingScores:
    """Return predicted beside given ratings, rows without one left out."""
    assert data.validation_feedback is not None
    assert not isinstance(config.loss, BradleyTerryLoss)
    targets = rating_targets(data.validation_feedback, config.loss.target)
    rows = present_rows(targets)
    return RatingScores([predicted[row] for row in rows], [float(targets[row]) for row in rows])


def counts(data: RewardData) -> dict[str, int]:
    result = {}
    if data.validation_pairs is not None:
        result["num_validation_pairs"] = len(data.validation_pairs)
    if data.validation_feedback is not None:
        result["num_validation_rows"] = len(data.validation_feedback)
    return result


def measure_member(directory: Path, data: RewardData, config: RewardModelConfig) -> tuple[list[float], dict[str, Any]]:
    """Load a saved reward model, measure it, and write scale and report beside its weights.

    Returns:
        (its scores of the validation answers, the whole report).

    Raises:
        EvaluationError: a score is not finite, all are equal, or scores depend on the batch.
    """
    trained = {key: value for key, value in read_json(directory / REWARD_CONFIG).items() if key != "base_prefix"}
    model = load_reward_model(directory).to(training_device())
    pad = pad_token_id(load_tokenizer(directory))
    scores = score_validation(model, data, pad, config.max_tokens_per_batch)
    model.score_mean, model.score_std = mean_and_std(scores)
    self_test = check_batch_invariance(model, self_test_sequences(data), pad, max(1.0, model.score_std))
    measured = describe(scores, data, config, trained)
    scale = {"score_mean": model.score_mean, "score_std": model.score_std}
    report = {**trained, **measured, **scale, **counts(data), "batch_invariance": self_test}
    report.update(movement(report))
    save_score_scale(model, directory, report)
    return scores, report


def movement(report: dict[str, Any]) -> dict[str, float]:
    """Return by how much the mean score of chosen answers rose in training, and that of rejected ones fell."""
    result = {}
    for name, side, sign in (("chosen_rise", "chosen", 1.0), ("rejected_fall", "rejected", -1.0)):
        if f"{side}_score_mean_before" in report:
            before, after = report[f"{side}_score_mean_before"], report[f"{side}_score_mean"]
            result[name] = sign * (after - before)
    return result


def measure_members(
    output: Path, data: RewardData, config: RewardModelConfig
) -> tuple[Sequence[float], dict[str, Any]]:
    """Measure what the stage saved, one model or several; the report is written beside it too.

    Returns:
        (one score an entry of `validation_sequences`, of several members their common one; the report).

    Raises:
        EvaluationError: as `measure_member`.
    """
    if config.num_members == 1:
        scores, report = measure_member(output, data, config)
        if not config.needs_feedback:
            warn_of_movement(report, "the reward model")
        return scores, report
    measured = [measure_member(member_directory(output, i), data, config) for i in range(config.num_members)]
    for member, (_, report) in enumerate(measured):
        if not config.needs_feedback:
            warn_of_movement(report, f"member {member}")
    save_ensemble_files(output, config.num_members)
    combined, report = ensemble_report([s for s, _ in measured], [report for _, report in measured], data, config)
    update_json(output / REWARD_CONFIG, **report)
    return combined, report


def ensemble_report(
    scores: Sequence[Sequence[float]], reports: Sequence[dict[str, Any]], data: RewardData, config: RewardModelConfig
) -> tuple[Sequence[float], dict[str, Any]]:
    """Return the members' common scores and what they come to together.

    Accuracies, margins and means are those of the ensemble's score, in which each member counts in units of its own
    standard deviation. What is told of the time before or in training is the mean over the members.
    """
    combined = combine_scores(scores, [(report["score_mean"], report["score_std"]) for report in reports])
    mean, std = mean_and_std(combined.means)
    first = reports[0]
    report = {
        **{name: value for name, value in first.items() if name.startswith("num_") or name in COMMON},
        **{name: mean_of(reports, name) for name in first if is_of_training(name)},
        **({} if (pairs := split_pairs(combined.means, data.validation_pairs)) is None else pairs.summary()),
        "score_mean": mean,
        "score_std": std,
        "num_members": len(reports),
        "num_steps": first["num_steps"] * len(reports),
        "disagreement_mean": math.fsum(combined.disagreements) / len(combined.disagreements),
        "batch_invariance": {
            name: max(report["batch_invariance"][name] for report in reports) for name in first["batch_invariance"]
        },
    }
    if "accuracy" in report:
        report["member_accuracies"] = [member["accuracy"] for member in reports]
    if data.validation_feedback is not None:
        ratings = np.mean([predict_ratings(s, data, r) for s, r in zip(scores, reports, strict=True)], axis=0)
        report.update(rating_scores(ratings.tolist(), data, config).summary())
    return combined.means, report


COMMON = ("dtype", "base_weights_sha256")
"""Entries that all members share, besides the counts."""


def is_of_training(name: str) -> bool:
    return name.endswith(("_before", "_mean_first", "_mean_last")) or name in ("chosen_rise", "rejected_fall")


def mean_of(reports: Sequence[dict[str, Any]], name: str) -> float | None:
    """Return the mean over the members; None where a member has no value."""
    values = [report[name] for report in reports]
    return None if any(value is None for value in values) else math.fsum(values) / len(values)


def warn_of_movement(report: dict[str, Any], who: str) -> None:
    """Say so when chosen answers' scores did not rise or rejected ones' did not fall: a margin can grow without."""
    wrong = []
    if report.get("chosen_rise", 1.0) <= 0.0:
        wrong.append(f"chosen answers did not rise ({report['chosen_rise']:+.4g})")
    if report.get("rejected_fall", 1.0) <= 0.0:
        wrong.append(f"rejected answers did not fall ({-report['rejected_fall']:+.4g})")
    if wrong:
        logger.warning(
            "in the training of %s the mean validation score of %s. A Bradley-Terry loss looks at differences only and "
            "may move all scores one way; loss.centring_coefficient holds them around zero",
            who,
            " and that of ".join(wrong),
        )
