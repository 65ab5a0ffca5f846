"""How far the probability that two scores mean is from how often the higher one is right.

Two scores say that the first answer is preferred with probability 1 / (1 + exp(-slope * difference)). A model that is
right in 70 % of the pairs of which it says 0.7 is calibrated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit

from training_core.seeding import derive_seed

Floats = NDArray[np.float64]

MAX_BINS = 10
MIN_PAIRS_PER_BIN = 20
NUM_DRAWS = 500
"""Calibrated models that are drawn: the 0.95 quantile of their errors is then known to about 3 % of its value."""


@dataclass(frozen=True)
class Calibration:
    """Calibration errors on held-out pairs; 0 is perfect, 0.5 the worst for a model that is right half the time."""

    error: float
    """With the slope 1, which is what a Bradley-Terry loss trains for."""
    scaled_error: float | None
    """With a slope fitted to the pairs of other prompts; None where all pairs are of one prompt."""
    chance_error: float | None
    """Mean of what calibrated models with the same probabilities show on as many pairs."""
    chance_limit: float | None
    """Their quantile at the asked confidence: an error below it says nothing against the model."""
    slope: float
    """Fitted to all pairs; below 1 the scores are too far apart, 0 where higher scores are not better."""
    num_bins: int


def calibrate(margins: Floats, groups: Sequence[str], confidence: float, seed: int) -> Calibration:
    """Measure the calibration of score differences.

    The factor is cross-fitted: prompts are dealt into two halves by a hash, and each half's pairs get the slope of the
    other. Training pairs would give too steep a slope, since their differences are inflated by having been fitted.

    Args:
        margins: score of the chosen answer minus that of the rejected one [pairs], at least one.
        groups: prompt of each pair [pairs].
        confidence: level of `chance_limit`.
        seed: of the draws for `chance_error` and `chance_limit`.

    Source: temperature scaling as in Guo et al. 2017, arXiv 1706.04599; errors by chance by consistency resampling as
    in Bröcker and Smith 2007, Increasing the reliability of reliability diagrams.
    """
    scaled = cross_fitted(margins, halves(groups))
    result = Calibration(
        error=calibration_error(margins),
        scaled_error=None if scaled is None else calibration_error(scaled),
        chance_error=None,
        chance_limit=None,
        slope=fitted_slope(margins),
        num_bins=num_bins(len(margins)),
    )
    if scaled is None:
        return result
    draws = chance_errors(scaled, seed)
    by_chance = {"chance_error": float(draws.mean()), "chance_limit": float(np.quantile(draws, confidence))}
    return Calibration(**{**vars(result), **by_chance})


def num_bins(num_pairs: int) -> int:
    """Return how many bins of equally many pairs there are: 10 from 200 pairs on, so that each holds at least 20."""
    return max(1, min(MAX_BINS, num_pairs // MIN_PAIRS_PER_BIN))


def calibration_error(log_odds: Floats) -> float:
    """Return the expected calibration error of the log-odds that the chosen answer is preferred.

    A pair's confidence is that of the answer with the higher score, at least 0.5; it is right where that is the chosen
    one, by half where the log-odds are 0. The pairs are cut into bins of equally many by confidence; the error is the
    mean over pairs of the distance between their bin's mean confidence and its share of right ones. Between 0 and 1.
    Pairs of equal confidence share what is right among them, so that the order of rows means nothing.

    >>> calibration_error(np.log(9) * np.array([1, 1, 1, -1])).__round__(6)  # Right in 3 of 4, with confidence 0.9.
    0.15
    """
    return _Bins(log_odds).error((np.sign(log_odds) + 1.0) / 2.0)


class _Bins:
    """Pairs in the order of their confidence, which is the same for both signs of the log-odds to the last bit."""

    def __init__(self, log_odds: Floats) -> None:
        sizes = np.abs(log_odds)
        self.confidences: Floats = expit(sizes)
        _, self.same, counts = np.unique(sizes, return_inverse=True, return_counts=True)
        self.counts = counts
        self.parts = np.array_split(np.argsort(sizes, kind="stable"), num_bins(len(sizes)))

    def error(self, right: Floats) -> float:
        shared = (np.bincount(self.same, weights=right) / self.counts)[self.same]
        distances = self.confidences - shared
        return sum(abs(float(distances[rows].sum())) for rows in self.parts) / len(distances)


def chance_errors(log_odds: Floats, seed: int) -> Floats:
    """Return the errors of `NUM_DRAWS` models that are right as often as these log-odds say [draws]."""
    bins = _Bins(log_odds)
    random = np.random.default_rng(derive_seed(seed, "calibration"))
    draws = (random.random(len(log_odds)) < bins.confidences for _ in range(NUM_DRAWS))
    return np.array([bins.error(right.astype(np.float64)) for right in draws])


def fitted_slope(margins: Floats) -> float:
    """Return the slope at which the probabilities of the chosen answers are most likely, not negative.

    Minimum over b >= 0 of the mean of -t log σ(b m) - (1 - t) log σ(-b m), with t = (n + 1) / (n + 2) in place of 1,
    which keeps it finite where every margin is positive (Platt 1999). 0 where the margins say nothing or the contrary.

    >>> fitted_slope(np.array([1.0, 1.0, 1.0, -1.0])).__round__(6)  # log(p / (1 - p)) at p = (3 t + 1 - t) / 4.
    0.693147
    """
    scale = float(np.sqrt(np.mean(margins**2)))
    if scale == 0.0:
        return 0.0
    unit = margins / scale
    target = (len(unit) + 1) / (len(unit) + 2)

    def slope_of_loss(b: float) -> float:
        return float(np.mean(unit * (expit(b * unit) - target)))

    if slope_of_loss(0.0) >= 0.0:
        return 0.0
    upper = 1.0
    while slope_of_loss(upper) < 0.0:
        upper *= 2.0
    return float(brentq(slope_of_loss, 0.0, upper, xtol=1e-12)) / scale


def halves(groups: Sequence[str]) -> NDArray[np.bool_]:
    """Return whether each pair's prompt is in the second half [pairs]: prompts in the order of a hash, in turns."""
    labels, positions = np.unique(np.asarray(groups), return_inverse=True)
    digests = [hashlib.sha256(str(label).encode("utf-8", "surrogatepass")).digest() for label in labels]
    second = np.zeros(len(labels), bool)
    second[sorted(range(len(labels)), key=digests.__getitem__)[1::2]] = True
    found: NDArray[np.bool_] = second[positions]
    return found


def cross_fitted(margins: Floats, second: NDArray[np.bool_]) -> Floats | None:
    """Return log-odds of the chosen answers, each with the slope of the other half; None if one half is empty."""
    if second.all() or not second.any():
        return None
    slopes = np.where(second, fitted_slope(margins[~second]), fitted_slope(margins[second]))
    found: Floats = slopes * margins
    return found
