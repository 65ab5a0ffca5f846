"""Scores of several models on the same prompts: what an evaluation hands to the gate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from training_core.evaluation.statistics import FloatArray

CANDIDATE = "candidate"
REFERENCE = "reference"
CHAMPION = "champion"
MODEL_NAMES = (CANDIDATE, REFERENCE, CHAMPION)


@dataclass(frozen=True)
class MetricScores:
    """Scores of one model's answers in one metric."""

    values: FloatArray
    """[prompts, samples]. NaN where `present` is False; elsewhere what was measured, finite or not."""
    present: np.ndarray
    """[prompts, samples] bool: False where the metric has no score for the answer."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[float | None]]) -> MetricScores:
        """Build from one list of samples a prompt; None is a missing score, NaN a measured one that is not finite."""
        present = np.array([[value is not None for value in row] for row in rows], dtype=bool)
        values = np.array([[math.nan if value is None else value for value in row] for row in rows], dtype=np.float64)
        return cls(values, present)

    @property
    def coverage(self) -> float:
        """Share of answers that have a score."""
        return float(self.present.mean()) if self.present.size else 0.0

    @property
    def num_not_finite(self) -> int:
        """How many scores were measured as NaN or infinite."""
        return int((self.present & ~np.isfinite(self.values)).sum())

    def prompt_means(self, fill: float = math.nan) -> FloatArray:
        """Return the mean over samples, [prompts], with missing scores counted as `fill`."""
        means: FloatArray = np.where(self.present, self.values, fill).mean(axis=1)
        return means

    def extremes(self) -> tuple[float, float]:
        """Return the smallest and the largest score; NaN for none."""
        known = self.values[self.present]
        return (float(known.min()), float(known.max())) if known.size else (math.nan, math.nan)


@dataclass(frozen=True)
class ModelScores:
    """All scores of one model."""

    weights_sha256: str
    prompt_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    """Cluster of each prompt: prompts with the same normalised text form one."""
    metrics: Mapping[str, MetricScores]


@dataclass(frozen=True)
class EvaluationScores:
    """Everything that a verdict depends on, besides the gate's own config."""

    models: Mapping[str, ModelScores]
    """By name: `candidate`, `reference` and, when there is one, `champion`."""
    evaluation_digest: str = ""
    """Identifies prompts and settings; recorded in the verdict."""
    metric_names: tuple[str, ...] = field(default=())
    """Metrics that the evaluation was asked for."""
