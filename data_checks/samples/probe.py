"""The shortcut probe: how well do trivial features of the two answers alone tell which one is preferred?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_checks.samples.pairs import COUNTS, FEATURES, Pairs
from data_checks.samples.statistics import FloatArray, clustered_standard_error, credits, folds, lower_bound, pair_auc

NUM_FOLDS = 5
MIN_PAIRS = 20
MIN_PROMPTS = 10
"""Below either, nothing can be learnt and held out."""


@dataclass(frozen=True)
class ProbeResult:
    """What the probe learnt."""

    scores: FloatArray
    """Of each pair, from a model that saw no pair of its prompt's cluster; positive: for the chosen answer."""
    validation_scores: FloatArray
    """Of each validation pair (NaN for the others), from a model that saw the training split only."""
    numbers: dict[str, float | int | None]
    details: dict[str, Any]


def design(pairs: Pairs) -> FloatArray:
    """Return one row a pair: differences chosen - rejected of log(1 + count), and of the flags.

    The logarithm keeps a few very long answers from deciding the fit. Swapping the answers negates the row.
    """
    columns = [
        np.log1p(pairs.chosen[name]) - np.log1p(pairs.rejected[name]) if name in COUNTS else pairs.difference(name)
        for name in FEATURES
    ]
    return np.column_stack(columns)


def fit(rows: FloatArray) -> FloatArray:
    """Return the weights of a logistic regression on pairs and swapped pairs, without intercept.

    Columns are divided by their root mean square (not centred, which would break the symmetry); weights apply to the
    columns as they came. Penalty: scikit-learn's default, C = 1 on the scaled columns.
    """
    from sklearn.linear_model import LogisticRegression

    scale = np.sqrt((rows**2).mean(axis=0))
    scale[scale == 0] = 1.0
    scaled = rows / scale
    both = np.concatenate([scaled, -scaled])
    label = np.repeat([1, 0], len(rows))
    model = LogisticRegression(fit_intercept=False, solver="liblinear", tol=1e-6).fit(both, label)
    return np.asarray(model.coef_[0] / scale)


def probe(pairs: Pairs) -> ProbeResult:
    """Cross-validate the probe.

    Five folds by cluster of prompts, so no prompt is on both sides. Accuracy and area under the ROC curve are of held-
    out scores; their standard errors count clusters, not pairs. Since both orders of each pair are seen, 0.5 means that
    nothing was learnt, however unbalanced the data.

    Args:
        pairs: at least MIN_PAIRS of at least MIN_PROMPTS clusters.

    Returns:
        Numbers `shortcut_*`, and as details each feature's own figures: `weight` (standardised: change of log-odds for
        one root mean square of the difference), `accuracy` alone (direction and pairs as they are: descriptive).
    """
    rows = design(pairs)
    fold = folds(pairs.cluster, NUM_FOLDS)
    scores = np.zeros(len(pairs))
    best_credits = np.zeros(len(pairs))
    for number in range(NUM_FOLDS):
        held_out = fold == number
        scores[held_out] = rows[held_out] @ fit(rows[~held_out])
        best, direction = best_feature(rows[~held_out])
        best_credits[held_out] = credits(direction * rows[held_out, best])
    accuracy = float(credits(scores).mean())
    error = clustered_standard_error(credits(scores), pairs.cluster)
    auc, auc_error = pair_auc(scores, pairs.cluster)
    best, direction = best_feature(rows)
    numbers: dict[str, float | int | None] = {
        "shortcut_accuracy": accuracy,
        "shortcut_accuracy_standard_error": error,
        "shortcut_accuracy_lower_bound": lower_bound(accuracy, error, pairs.num_clusters, len(pairs)),
        "shortcut_auc": auc,
        "shortcut_auc_standard_error": auc_error,
        "shortcut_auc_lower_bound": lower_bound(auc, auc_error, pairs.num_clusters, len(pairs)),
        "shortcut_best_feature_accuracy": float(best_credits.mean()),
    }
    details = {
        "num_pairs": len(pairs),
        "num_prompts": pairs.num_clusters,
        "best_feature": FEATURES[best],
        "best_feature_prefers": "more" if direction > 0 else "less",
        "features": feature_table(pairs, rows),
    }
    return ProbeResult(scores, validation_scores(rows, pairs.validation), numbers, details)


def best_feature(rows: FloatArray) -> tuple[int, int]:
    """Return the column that alone is right most often, and whether more (1) or less (-1) of it is preferred."""
    balance = np.sign(rows).sum(axis=0)
    best = int(np.argmax(np.abs(balance)))
    return best, 1 if balance[best] >= 0 else -1


def feature_table(pairs: Pairs, rows: FloatArray) -> list[dict[str, Any]]:
    """Return one entry a feature, those with the largest weight first."""
    weights = fit(rows) * np.sqrt((rows**2).mean(axis=0))
    table = [
        {
            "feature": name,
            "weight": float(weights[number]),
            "accuracy": float(credits(rows[:, number]).mean()),
            "chosen_mean": float(pairs.chosen[name].mean()),
            "rejected_mean": float(pairs.rejected[name].mean()),
            "chosen_share": float((pairs.chosen[name] > 0).mean()),
            "rejected_share": float((pairs.rejected[name] > 0).mean()),
        }
        for number, name in enumerate(FEATURES)
    ]
    return sorted(table, key=lambda entry: (-abs(entry["weight"]), entry["feature"]))


def validation_scores(rows: FloatArray, validation: NDArray[np.bool_]) -> FloatArray:
    """Return the scores of validation pairs by a model of the training pairs; NaN where there is none."""
    scores = np.full(len(rows), np.nan)
    if validation.any() and int((~validation).sum()) >= MIN_PAIRS:
        scores[validation] = rows[validation] @ fit(rows[~validation])
    return scores
