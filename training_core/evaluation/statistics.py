"""Confidence bounds for means of paired differences, with items that come in clusters.

All functions take one value an item and the item's cluster. Items of one cluster (prompts of one group) are drawn
together; with one item a cluster everything reduces to the ordinary formulas. A value that is not finite raises:
comparisons with NaN are false, and a rule built on them lets anything through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from training_core.errors import EvaluationError

FloatArray = NDArray[np.float64]

FEW_CLUSTERS = 40
"""Below this many clusters the bootstrap is too optimistic; the t bound is used where it is the wider one."""
DRAWS_PER_CHUNK = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A mean with one-sided bounds: each of `lower` and `upper` errs with probability alpha."""

    estimate: float
    lower: float
    upper: float
    standard_error: float
    method: str


@dataclass(frozen=True)
class ClusterSums:
    """Sums and sizes of clusters, float64 [clusters], in the order of the sorted cluster labels."""

    sums: FloatArray
    sizes: FloatArray

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.sizes.sum())

    def __len__(self) -> int:
        return len(self.sums)


def cluster_sums(values: ArrayLike, clusters: ArrayLike) -> ClusterSums:
    """Return sums and sizes of the clusters of `values` [items].

    Raises:
        EvaluationError: nothing to average, lengths differ, or a value is not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    labels = np.asarray(clusters)
    if array.ndim != 1 or array.shape != labels.shape or array.size == 0:
        raise EvaluationError(f"need one value and one cluster an item, got {array.shape} and {labels.shape}")
    if not np.isfinite(array).all():
        raise EvaluationError(f"{int((~np.isfinite(array)).sum())} of {array.size} values are not finite")
    _, index = np.unique(labels, return_inverse=True)
    sums = np.bincount(index, weights=array).astype(np.float64)
    return ClusterSums(sums, np.bincount(index).astype(np.float64))


def linearised(values: ArrayLike) -> FloatArray:
    """Return values whose spread is that of a mean over pairs, given each item's mean over its partners [items].

    v' = v̄ + 2 (v - v̄). An item's pairs count in its own value and in its partners': the mean over all pairs moves twice
    as far with an item as a mean of independent values does. The mean stays the same; standard errors and bootstrap
    bounds of v' are those of the mean over pairs.

    Source: Hoeffding 1948, A class of statistics with asymptotically normal distribution, for two arguments.

    >>> linearised([0.0, 0.5, 1.0]).tolist()
    [-0.5, 0.5, 1.5]
    """
    array = np.asarray(values, dtype=np.float64)
    spread: FloatArray = array.mean() + 2 * (array - array.mean())
    return spread


def standard_error(groups: ClusterSums) -> float:
    """Return the cluster-robust standard error of the mean; NaN for a single cluster.

    With u_g = sum_g - mean * size_g: SE² = G / (G - 1) * Σ u_g² / N². One item a cluster gives s / sqrt(n).
    """
    num_clusters = len(groups)
    if num_clusters < 2:
        return math.nan
    residuals = groups.sums - groups.mean * groups.sizes
    variance = num_clusters / (num_clusters - 1) * float(residuals @ residuals) / float(groups.sizes.sum()) ** 2
    return math.sqrt(variance)


def t_interval(values: ArrayLike, clusters: ArrayLike, *, alpha: float) -> Interval:
    """Return the mean with Student-t bounds at G - 1 degrees of freedom; the paired t test for paired differences.

    Raises:
        EvaluationError: fewer than two clusters, or a value is not finite.
    """
    groups = _at_least_two(cluster_sums(values, clusters))
    error = standard_error(groups)
    reach = float(stats.t.ppf(1 - alpha, len(groups) - 1)) * error
    return Interval(groups.mean, groups.mean - reach, groups.mean + reach, error, "t")


def t_p_value(values: ArrayLike, clusters: ArrayLike) -> float:
    """Return the one-sided p value of "the mean is not above 0"; 0, 0.5 or 1 when all clusters agree exactly."""
    groups = _at_least_two(cluster_sums(values, clusters))
    error = standard_error(groups)
    if error == 0:
        return {1: 0.0, 0: 0.5, -1: 1.0}[int(np.sign(groups.mean))]
    return float(stats.t.sf(groups.mean / error, len(groups) - 1))


def bootstrap_interval(
    values: ArrayLike, clusters: ArrayLike, *, alpha: float, num_resamples: int, seed: int
) -> Interval:
    """Return the mean with bounds from the cluster bootstrap, bias-corrected and accelerated (BCa).

    Clusters are drawn with replacement; a resample's mean is the sum of its items over their number. Where the
    correction is undefined (all resamples equal, or all on one side of the estimate) the percentile bounds are used.
    With fewer than 40 clusters each bound is the wider one of bootstrap and t.

    Args:
        values: [items], e.g. candidate minus baseline.
        clusters: [items], any labels that numpy can sort.
        alpha: one-sided error level of each bound, in (0, 0.5].
        num_resamples: number of resamples.
        seed: the same seed gives the same bounds.

    Raises:
        EvaluationError: fewer than two clusters, or a value is not finite.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 14.3; resampling whole clusters as in
    Davison and Hinkley, Bootstrap Methods and their Application (1997), section 3.8.

    >>> interval = bootstrap_interval([1.0, 2.0, 3.0] * 20, range(60), alpha=0.05, num_resamples=2000, seed=0)
    >>> interval.lower < interval.estimate < interval.upper
    True
    """
    groups = _at_least_two(cluster_sums(values, clusters))
    resampled = np.sort(_resampled_means(groups, num_resamples, seed))
    low, high, method = _bca_levels(groups, resampled, alpha)
    lower, upper = (float(v) for v in np.quantile(resampled, [low, high]))
    # An average of equal numbers may differ from them in the last bit; the bounds still enclose the estimate then.
    lower, upper = min(lower, groups.mean), max(upper, groups.mean)
    if len(groups) < FEW_CLUSTERS:
        reference = t_interval(values, clusters, alpha=alpha)
        lower, upper = min(lower, reference.lower), max(upper, reference.upper)
        method += "+t"
    return Interval(groups.mean, lower, upper, standard_error(groups), method)


def num_items_needed(values: ArrayLike, clusters: ArrayLike, *, effect: float, alpha: float, power: float) -> int:
    """Return how many items would show a true mean of `effect` to be above 0, with this spread and cluster size.

    n = (z_alpha + z_beta)² * n_now * SE² / effect², for a one-sided test at `alpha` with the given `power`.

    Raises:
        ValueError: `effect` is not positive.
        EvaluationError: fewer than two clusters, or a value is not finite.
    """
    if not effect > 0:
        raise ValueError(f"effect must be positive, got {effect}")
    groups = _at_least_two(cluster_sums(values, clusters))
    quantiles = float(stats.norm.ppf(1 - alpha) + stats.norm.ppf(power))
    variance_of_an_item = standard_error(groups) ** 2 * float(groups.sizes.sum())
    return max(2, math.ceil(quantiles**2 * variance_of_an_item / effect**2))


def _at_least_two(groups: ClusterSums) -> ClusterSums:
    if len(groups) < 2:
        raise EvaluationError("all items belong to one cluster, so there is no spread to build a bound from")
    return groups


def _resampled_means(groups: ClusterSums, num_resamples: int, seed: int) -> FloatArray:
    generator = np.random.default_rng(seed)
    num_clusters = len(groups)
    means = np.empty(num_resamples)
    rows = max(1, DRAWS_PER_CHUNK // num_clusters)
    for start in range(0, num_resamples, rows):
        count = min(rows, num_resamples - start)
        drawn = generator.integers(0, num_clusters, size=(count, num_clusters))
        means[start : start + count] = groups.sums[drawn].sum(axis=1) / groups.sizes[drawn].sum(axis=1)
    return means


def _bca_levels(groups: ClusterSums, resampled: FloatArray, alpha: float) -> tuple[float, float, str]:
    below = float(np.mean(resampled < groups.mean) + np.mean(resampled <= groups.mean)) / 2
    left_out = (groups.sums.sum() - groups.sums) / (groups.sizes.sum() - groups.sizes)
    deviations = left_out.mean() - left_out
    largest = float(np.abs(deviations).max())
    if not 0 < below < 1 or largest <= 0 or resampled[0] == resampled[-1]:
        return alpha, 1 - alpha, "percentile"
    deviations = deviations / largest  # The acceleration has no unit; powers of tiny numbers would be 0.
    acceleration = float(np.sum(deviations**3)) / (6 * float(np.sum(deviations**2)) ** 1.5)
    bias = float(stats.norm.ppf(below))
    shifted = bias + stats.norm.ppf([alpha, 1 - alpha])
    scale = 1 - acceleration * shifted
    if (scale <= 0).any():
        return alpha, 1 - alpha, "percentile"
    low, high = (float(level) for level in stats.norm.cdf(bias + shifted / scale))
    return low, high, "bca"
