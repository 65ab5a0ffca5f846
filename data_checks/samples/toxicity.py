"""How toxic answers are, by the linear model that comes with alt-profanity-check (English words, offline)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_checks.samples.statistics import QUANTILE, FloatArray, clustered_standard_error

TOXIC = 0.8
"""Probability from which an answer counts as toxic."""
MIN_PROMPTS = 10
"""Below, the gap's standard error is a guess."""


@dataclass(frozen=True)
class ToxicityResult:
    """Means and shares of both sides, and what is lacking."""

    numbers: dict[str, float | int | None]
    skipped: dict[str, str]
    gaps: FloatArray
    """Of each row with both answers chosen - rejected, NaN for other rows."""


def toxicity(rows: pa.Table, clusters: NDArray[np.int64]) -> ToxicityResult:
    """Score the answers.

    Args:
        rows: columns chosen_text, rejected_text and label. An answer judged alone (rejected_text null) counts as
            chosen where its label is true and as rejected where it is false.
        clusters: of each row, the cluster of its prompt.

    Returns:
        Numbers `toxicity_*`: probabilities, 0 to 1. The gap is the mean over pairs of chosen - rejected (over judged
        answers: the difference of the means); its lower bound is one-sided with 99 % confidence, clustered by prompt.
    """
    first = probabilities(rows["chosen_text"])
    second = probabilities(rows["rejected_text"])
    paired = ~np.isnan(first) & ~np.isnan(second)
    good, bad = of_label(rows, True) & ~paired, of_label(rows, False) & ~paired
    chosen = np.concatenate([first[paired], first[good]])
    rejected = np.concatenate([second[paired], first[bad]])
    numbers: dict[str, float | int | None] = {}
    skipped: dict[str, str] = {}
    for side, scores in (("chosen", chosen), ("rejected", rejected)):
        for name, values in (("mean", scores), ("high_fraction", scores >= TOXIC)):
            numbers[f"toxicity_{side}_{name}"] = float(values.mean()) if len(values) else None
            if not len(values):
                skipped[f"toxicity_{side}_{name}"] = f"the sample has no {side} answers"
    gaps = np.where(paired, first - second, np.nan)
    if len(chosen) and len(rejected):
        gap, error = gap_and_error(first, gaps, paired, good, bad, clusters)
        num_prompts = len(np.unique(clusters[paired | good | bad]))
        enough = num_prompts >= MIN_PROMPTS
        numbers |= {"toxicity_gap": gap, "toxicity_gap_lower_bound": gap - QUANTILE * error if enough else None}
        if not enough:
            skipped["toxicity_gap_lower_bound"] = f"{num_prompts} prompts: {MIN_PROMPTS} are needed for a bound"
    else:
        numbers |= {"toxicity_gap": None, "toxicity_gap_lower_bound": None}
        skipped |= dict.fromkeys(
            ("toxicity_gap", "toxicity_gap_lower_bound"), "the sample has answers of one side only"
        )
    return ToxicityResult(numbers, skipped, gaps)


def gap_and_error(
    first: FloatArray,
    gaps: FloatArray,
    paired: NDArray[np.bool_],
    good: NDArray[np.bool_],
    bad: NDArray[np.bool_],
    clusters: NDArray[np.int64],
) -> tuple[float, float]:
    """Return the gap and its clustered standard error: of pairs where there are any, else of judged answers."""
    if paired.any():
        return float(gaps[paired].mean()), clustered_standard_error(gaps[paired], clusters[paired])
    parts = [(first[side], clusters[side]) for side in (good, bad)]
    errors = [clustered_standard_error(values, keys) for values, keys in parts]
    return float(parts[0][0].mean() - parts[1][0].mean()), math.hypot(*errors)


def of_label(rows: pa.Table, value: bool) -> NDArray[np.bool_]:
    """Return whether each row's label is `value`; no row's where rows have none."""
    if "label" not in rows.column_names:
        return np.zeros(rows.num_rows, bool)
    return np.asarray(pc.fill_null(pc.equal(rows["label"].cast(pa.bool_()), value), False), dtype=bool)


def probabilities(column: pa.ChunkedArray) -> FloatArray:
    """Return the probability that each text is toxic, NaN where there is none."""
    present = pc.is_valid(column).to_numpy().astype(bool)
    scores = np.full(len(column), np.nan)
    if present.any():
        from profanity_check import predict_prob

        scores[present] = predict_prob(column.drop_null().to_pylist())
    return scores
