"""Checks that stop a training run which no longer does what it says."""

from __future__ import annotations

import math
from collections.abc import Mapping

from training_core.errors import ArtifactError, EvaluationError, TrainingDivergedError, WeightVersionError

MAX_KL_AT_START_NATS = 1e-3
"""Policy and reference are the same weights before the first update; what is left is rounding."""


def check_finite_loss(loss: float, step: int) -> None:
    """Raise TrainingDivergedError when a loss is NaN or infinite; no update was made from it."""
    if not math.isfinite(loss):
        raise TrainingDivergedError(
            f"step {step}: the loss is {loss}; no update was made from it. Lower algorithm.optimizer."
            "learning_rate, or look at the last lines of metrics.jsonl for what grew"
        )


def check_sampler_agrees(kl_nats: float, limit_nats: float, step: int) -> None:
    """Raise WeightVersionError when sampler and trainer give the sampled tokens too different probabilities."""
    if not kl_nats <= limit_nats:  # Not a number is no agreement either.
        raise WeightVersionError(
            f"step {step}: sampler and trainer disagree by {kl_nats:.4f} nats a token, more than "
            f"algorithm.sentinels.sampler_mismatch.limit_nats = {limit_nats}. The engine samples with other weights or "
            "at another temperature than the trainer assumes; use rollout.dtype float32 to rule out rounding"
        )


def check_reference_is_start(kl_nats: float, step: int) -> None:
    """Raise ArtifactError when the untrained policy already differs from the reference."""
    if not kl_nats <= MAX_KL_AT_START_NATS:
        raise ArtifactError(
            f"step {step}: KL(policy || reference) is {kl_nats:.5f} nats a token before the first update; it must be "
            "0. The reference is not the checkpoint that the policy started from"
        )


def check_any_score(num_missing: int, num_answers: int, step: int, causes: Mapping[str, str] | None = None) -> None:
    """Raise EvaluationError when no answer of a step has a score: there is nothing to learn from.

    Args:
        num_missing: answers without a score.
        num_answers: of the step.
        step: from 1.
        causes: rewards that gave no score to any answer, with what is known of why.
    """
    if num_missing == num_answers:
        known = "; ".join(f"reward {name!r} gave none ({why})" for name, why in (causes or {}).items())
        raise EvaluationError(
            f"step {step}: none of the {num_answers} answers has a score. {known or 'Each lacks one of its rewards'}. "
            "Check the rewards (prompt rows without the reference they name, a custom function that always returns "
            "None, answers longer than the reward model's positions)"
        )


def check_any_baseline(num_missing: int, num_groups: int, step: int) -> None:
    """Raise EvaluationError when no greedy answer of a step has a score: every answer would be left out."""
    if num_missing == num_groups:
        raise EvaluationError(
            f"step {step}: none of the {num_groups} most probable answers, which are the baselines, has a score, so "
            "there is nothing to compare with. Check the rewards on them: samples.jsonl shows the sampled answers alone"
        )
