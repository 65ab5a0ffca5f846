"""Label noise: how many pairs would a model of the other pairs, sure of itself, have labelled the other way?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_checks.samples.pairs import Pairs
from data_checks.samples.statistics import FloatArray, IntArray, clustered_standard_error, credits, folds, lower_bound

NUM_FOLDS = 5
MIN_PAIRS = 500
MIN_ACCURACY = 0.55
"""Held-out accuracy up to which the model cannot tell a wrong label from a hard pair."""
DOUBTFUL = 0.1
"""A pair is doubtful when P(chosen) is below this."""
NUM_SUSPECTS = 100
NUM_WORDS = 2**16
FLOORS: FloatArray = np.arange(0, 46, dtype=np.float64) / 100
SLOPES: FloatArray = np.asarray(np.geomspace(0.05, 500, 120), np.float64)
NUM_BINS = 200
EVIDENCE = 5.41
"""Twice the gain in log-likelihood that a floor above 0 needs: 1 % of data sets without noise reach it (a half and half
mixture of 0 and chi-square with one degree of freedom, since 0 is at the border)."""


@dataclass(frozen=True)
class NoiseResult:
    """What the cross-fitted model says about the labels; `skipped` where it cannot say anything."""

    numbers: dict[str, float | int | None]
    skipped: str | None
    suspects: list[int]
    """Ordinals of the examples with the smallest P(chosen), worst first."""
    doubtful: np.ndarray | None
    """Whether each pair is doubtful."""


def label_noise(pairs: Pairs) -> NoiseResult:
    """Estimate label noise by a cross-fitted model of words; never changes a label.

    1. A logistic regression on the difference of the answers' sets of words (hashed, rows scaled to length 1, no
       intercept), in five folds by cluster of prompts: each pair is scored by a model that saw nothing of its prompt.
    2. Held-out scores s are calibrated by P(label agrees) = e + (1 - 2 e) / (1 + exp(-b s)), b and e by maximum
       likelihood: a share e of labels is flipped at random, whatever the model thinks. Calibrating on the noisy labels
       alone would cap every probability at the share of right labels, and the noisier the data, the fewer pairs would
       look doubtful. e is 0 unless the likelihood asks for it.
    3. P(chosen) = 1 / (1 + exp(-b s)); the pair is doubtful below 0.1.

    e can be told from hard pairs only where the model is certain of some; the share of doubtful pairs is an estimate of
    wrong labels, not proof of any.
    """
    names = ("label_noise_fraction", "label_noise_rate", "label_noise_model_accuracy", "label_noise_calibration_error")
    numbers: dict[str, float | int | None] = dict.fromkeys(names)
    if len(pairs) < MIN_PAIRS or pairs.num_clusters < NUM_FOLDS:
        why = f"{len(pairs)} pairs with a preference: {MIN_PAIRS} are needed to learn from"
        return NoiseResult(numbers, why, [], None)
    scores = held_out_scores(pairs)
    accuracy = float(credits(scores).mean())
    numbers["label_noise_model_accuracy"] = accuracy
    error = clustered_standard_error(credits(scores), pairs.cluster)
    if accuracy <= MIN_ACCURACY or lower_bound(accuracy, error, pairs.num_clusters, len(pairs)) <= 0.5:
        why = f"a model of words is right for {accuracy:.3f} of held-out pairs, hardly more than chance: it cannot tell"
        return NoiseResult(numbers, why, [], None)
    floor, slope = calibrate(scores)
    probability = sigmoid(slope * scores)
    doubtful = probability < DOUBTFUL
    numbers["label_noise_fraction"] = float(doubtful.mean())
    numbers["label_noise_rate"] = floor
    numbers["label_noise_calibration_error"] = calibration_error(floor + (1 - 2 * floor) * probability)
    worst = np.lexsort((pairs.example, probability))[:NUM_SUSPECTS]
    return NoiseResult(numbers, None, pairs.example[worst[probability[worst] < 0.5]].tolist(), doubtful)


def held_out_scores(pairs: Pairs) -> FloatArray:
    """Return each pair's score by a model of the other folds; 0 where both answers have the same words."""
    from scipy import sparse
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.linear_model import LogisticRegression

    vectorizer = HashingVectorizer(n_features=NUM_WORDS, alternate_sign=False, norm=None, binary=True, dtype=np.float64)
    sides = [vectorizer.transform(pairs.texts[name].to_pylist()) for name in ("chosen_text", "rejected_text")]
    rows = (sides[0] - sides[1]).tocsr()
    length = np.sqrt(np.asarray(rows.multiply(rows).sum(axis=1)).ravel())
    length[length == 0] = 1.0
    # Half of the pairs, by hash, are shown with the answers swapped: the regression needs two classes.
    fold = folds(pairs.cluster, NUM_FOLDS)
    order = alternating(pairs.example, fold)
    rows = (sparse.diags_array(order / length) @ rows).tocsr()
    scores = np.zeros(len(pairs))
    for number in range(NUM_FOLDS):
        held_out = fold == number
        # The dual problem: with more words than pairs it is solved thirty times as fast.
        model = LogisticRegression(fit_intercept=False, solver="liblinear", dual=True, tol=1e-3, random_state=0).fit(
            rows[~held_out], order[~held_out]
        )
        scores[held_out] = model.decision_function(rows[held_out]) * order[held_out]
    return scores


def alternating(example: IntArray, fold: IntArray) -> FloatArray:
    """Return 1.0 and -1.0, equally often in each fold give or take one.

    Pairs come in the order of their content hash; without an intercept the choice does not change the solution.
    """
    signs = np.ones(len(example))
    for number in range(NUM_FOLDS):
        signs[np.flatnonzero(fold == number)[::2]] = -1.0
    return signs


def calibrate(scores: FloatArray) -> tuple[float, float]:
    """Return the floor e and the slope b (on a grid: 0.01 for e, 8 % for b) that make held-out labels most likely.

    Scores are put into bins of equal size first; the grid is in units of the median size of a score.
    """
    size = np.abs(scores)
    unit = float(np.median(size[size > 0])) if (size > 0).any() else 1.0
    order = np.argsort(size, kind="stable")
    bins = np.array_split(order, min(NUM_BINS, len(order)))
    centres = np.array([size[bin_].mean() for bin_ in bins]) / unit
    exponents = np.outer(SLOPES, centres).astype(np.float64)
    right = np.array([credits(scores[bin_]).sum() for bin_ in bins])
    wrong = np.array([len(bin_) for bin_ in bins]) - right
    best = []
    for floor in FLOORS:
        agrees = floor + (1 - 2 * floor) * sigmoid(exponents)
        # 1 - agrees by the other sigmoid: no difference of nearly equal numbers.
        differs = floor + (1 - 2 * floor) * sigmoid(-exponents)
        likelihood = np.log(np.maximum(agrees, 1e-300)) @ right + np.log(np.maximum(differs, 1e-300)) @ wrong
        at = int(np.argmax(likelihood))
        best.append((float(likelihood[at]), float(SLOPES[at]) / unit))
    at = int(np.argmax([likelihood for likelihood, _ in best]))
    if 2 * (best[at][0] - best[0][0]) < EVIDENCE:
        at = 0
    return float(FLOORS[at]), best[at][1]


def sigmoid(x: FloatArray) -> FloatArray:
    """Return 1 / (1 + exp(-x)), also where the exponential would overflow."""
    return np.asarray(0.5 * (1 + np.tanh(x / 2)))


def calibration_error(agrees: FloatArray, num_bins: int = 10) -> float:
    """Return the mean difference between what the model claims and what it gets right, over bins of equal size.

    Args:
        agrees: P(label agrees) of each pair as labelled; the model's own call is the larger of it and 1 - it.
        num_bins: bins by the certainty of the call.
    """
    claimed = np.maximum(agrees, 1 - agrees)
    right = credits(agrees - 0.5)
    bins = np.array_split(np.argsort(claimed, kind="stable"), num_bins)
    return float(sum(abs(claimed[bin_].sum() - right[bin_].sum()) for bin_ in bins) / len(agrees))
