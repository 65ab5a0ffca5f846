"""Estimates over pairs and how sure they are. A pair's score is positive where it speaks for the chosen answer."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

QUANTILE = 2.3263478740408408
"""Of the standard normal distribution at 0.99: bounds here are one-sided with 99 % confidence."""


def mix(keys: IntArray, purpose: int) -> NDArray[np.uint64]:
    """Return well-mixed 64-bit hashes of `keys`, other ones for each purpose (splitmix64's finaliser)."""
    x = keys.astype(np.uint64) ^ np.uint64(purpose * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def folds(clusters: IntArray, num_folds: int) -> IntArray:
    """Return the fold of each pair, 0 to num_folds - 1: the same for all pairs of a cluster, whatever the order.

    Clusters are dealt out in the order of their hashes, so folds hold equally many clusters, give or take one.
    """
    keys, positions = np.unique(clusters, return_inverse=True)
    ranks = np.empty(len(keys), np.int64)
    ranks[np.argsort(mix(keys, 1), kind="stable")] = np.arange(len(keys))
    return ranks[positions] % num_folds


def credits(scores: FloatArray) -> FloatArray:
    """Return what each pair adds to an accuracy: 1 where the chosen answer scores higher, 0.5 at a tie, else 0."""
    return (np.sign(scores) + 1) / 2


def clustered_standard_error(values: FloatArray, clusters: IntArray) -> float:
    """Return the standard error of the mean of `values` when only clusters are independent of each other.

    The square root of the sum over clusters of the squared sum of their deviations, over n, with the factor
    G / (G - 1) for G clusters (Liang and Zeger 1986). With clusters of one it is the usual standard error. 0 with fewer
    than two clusters: use `lower_bound`, which does not take it for certainty.
    """
    if not len(values):
        return 0.0
    _, positions = np.unique(clusters, return_inverse=True)
    num_clusters = int(positions.max()) + 1
    if num_clusters < 2:
        return 0.0
    sums = np.bincount(positions, weights=values - values.mean())
    return float(np.sqrt((sums**2).sum() * num_clusters / (num_clusters - 1)) / len(values))


def lower_bound(share: float, standard_error: float, num_clusters: int, num_values: int) -> float:
    """Return Wilson's lower bound (one-sided, 99 %) of a share with this clustered standard error.

    Wilson's interval at the number of independent values that would give this standard error, at most `num_values`; at
    a standard error of 0 (all alike), at one value a cluster. So 20 of 20 is at least 0.79, not certainly 1.
    """
    if standard_error > 0:
        effective = min(share * (1 - share) / standard_error**2, float(num_values))
    else:
        effective = float(num_clusters)
    if effective <= 0:
        return 0.0
    z = QUANTILE
    half = z * math.sqrt(share * (1 - share) / effective + z**2 / (4 * effective**2))
    return max(0.0, (share + z**2 / (2 * effective) - half) / (1 + z**2 / effective))


def pair_auc(scores: FloatArray, clusters: IntArray) -> tuple[float, float]:
    """Return the area under the ROC curve of telling a pair from the same pair with its answers swapped, and its
    clustered standard error.

    A pair counts once with its score as "chosen first", once with the negated score as "rejected first". The area is
    the share of pairs (i, j) with s_i + s_j > 0, ties half: 0.5 where scores say nothing. Unlike the accuracy it weighs
    how large scores are. The standard error is that of the first projection of this V-statistic (Hoeffding 1948).
    """
    if not len(scores):
        return 0.5, 0.0
    swapped = np.sort(-scores)
    below = np.searchsorted(swapped, scores, side="left")
    not_above = np.searchsorted(swapped, scores, side="right")
    placements = (below + not_above) / (2 * len(scores))
    return float(placements.mean()), 2 * clustered_standard_error(placements, clusters)


def logistic_slope(differences: FloatArray, num_steps: int = 50) -> float:
    """Return b of P(chosen) = 1 / (1 + exp(-b d)) over pairs, d = chosen - rejected, without intercept.

    Maximum of the likelihood times a normal prior with standard deviation 10 on b, by Newton steps with halving: finite
    where one sign of d explains every pair. 0 without pairs or where every d is 0.
    """

    def loss(b: float) -> float:
        return float(np.logaddexp(0, -b * differences).sum() + b * b / 200)

    slope = 0.0
    for _ in range(num_steps):
        wrong = 0.5 * (1 - np.tanh(slope * differences / 2))  # 1 - sigmoid, which does not overflow this way.
        gradient = -(differences * wrong).sum() + slope / 100
        step = gradient / ((differences**2 * wrong * (1 - wrong)).sum() + 1 / 100)
        while abs(step) > 1e-9 and loss(slope - step) > loss(slope):
            step /= 2
        slope -= step
        if abs(step) <= 1e-9:
            break
    return float(slope)


def position_p_value(num_first: int, num_second: int) -> float | None:
    """Return the two-sided p-value of the exact binomial test that the chosen answer is as often first as second.

    Args:
        num_first: pairs whose chosen answer was shown first.
        num_second: pairs whose chosen answer was shown second.

    Returns:
        0 to 1; None where no pair's position is known. With many pairs a share near 0.5 can be significant: read the
        share beside it.
    """
    if num_first + num_second == 0:
        return None
    from scipy.stats import binomtest

    return float(binomtest(num_first, num_first + num_second).pvalue)
