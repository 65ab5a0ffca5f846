"""Standard errors, bounds, areas and slopes over pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from data_checks.samples import position_p_value
from data_checks.samples.statistics import (
    QUANTILE,
    clustered_standard_error,
    credits,
    folds,
    logistic_slope,
    lower_bound,
    pair_auc,
)


def test_a_tie_counts_half():
    assert credits(np.array([2.0, 0.0, -0.1])).tolist() == [1.0, 0.5, 0.0]


def test_standard_error_of_single_values_is_the_usual_one():
    values = np.random.default_rng(0).normal(size=50)
    assert clustered_standard_error(values, np.arange(50)) == pytest.approx(values.std(ddof=1) / math.sqrt(50))


def test_repeating_each_value_in_its_cluster_leaves_the_standard_error():
    values = np.random.default_rng(0).normal(size=50)
    once = clustered_standard_error(values, np.arange(50))
    assert clustered_standard_error(np.repeat(values, 9), np.repeat(np.arange(50), 9)) == pytest.approx(once)


def test_lower_bound_is_wilsons():
    from scipy.stats import binomtest

    share, size = 0.7, 100
    interval = binomtest(70, size).proportion_ci(confidence_level=0.98, method="wilson")
    bound = lower_bound(share, math.sqrt(share * (1 - share) / size), size, size)
    assert bound == pytest.approx(interval.low)


def test_all_alike_is_not_certain():
    assert lower_bound(1.0, 0.0, 20, 20) == pytest.approx(20 / (20 + QUANTILE**2))
    assert lower_bound(1.0, 0.0, 1, 5000) < 0.2, "one prompt is one observation"
    assert lower_bound(1.0, 0.0, 0, 0) == 0


def test_area_is_that_of_pairs_against_swapped_pairs():
    scores = np.random.default_rng(1).normal(0.3, 1, size=200).round(1)  # Rounded: ties.
    expected = roc_auc_score(np.repeat([1, 0], 200), np.concatenate([scores, -scores]))
    assert pair_auc(scores, np.arange(200))[0] == pytest.approx(expected)


def test_standard_error_of_the_area_is_its_spread():
    draw = np.random.default_rng(2)
    results = [pair_auc(draw.normal(0.4, 1, size=150), np.arange(150)) for _ in range(400)]
    areas, errors = np.array(results).T
    assert errors.mean() == pytest.approx(areas.std(), rel=0.12)


def test_area_without_pairs_says_nothing():
    assert pair_auc(np.array([]), np.array([], int)) == (0.5, 0.0)


def test_slope_is_the_one_that_made_the_labels():
    draw = np.random.default_rng(3)
    size = np.abs(draw.normal(0, 3, size=20000))
    sign = np.where(draw.random(20000) < 1 / (1 + np.exp(-0.25 * size)), 1, -1)
    assert logistic_slope(size * sign) == pytest.approx(0.25, abs=0.02)
    assert logistic_slope(-size * sign) == pytest.approx(-0.25, abs=0.02)


@pytest.mark.parametrize("differences", [[1.0] * 50, [1e4, 5e5, 3.0], [1e-6] * 1000], ids=["same", "huge", "tiny"])
def test_slope_is_finite_where_length_explains_all(differences: list[float]):
    slope = logistic_slope(np.array(differences))
    assert math.isfinite(slope)
    assert slope > 0


def test_slope_without_differences_is_zero():
    assert logistic_slope(np.zeros(5)) == 0
    assert logistic_slope(np.array([])) == 0


def test_folds_keep_clusters_together_and_are_balanced():
    clusters = np.random.default_rng(4).integers(-(2**62), 2**62, size=101)
    repeated = np.concatenate([clusters, clusters[::-1]])
    fold = folds(repeated, 5)
    assert (fold[:101] == fold[101:][::-1]).all()
    assert sorted(np.bincount(fold[:101]).tolist()) == [20, 20, 20, 20, 21]


def test_position_p_value():
    assert position_p_value(0, 0) is None
    assert position_p_value(50, 50) == 1
    assert position_p_value(0, 10) == pytest.approx(2 / 2**10)
    assert position_p_value(700, 300) < 1e-6 < position_p_value(520, 480)
    assert position_p_value(5_010_000, 4_990_000) < 1e-6, "counts of millions are fine"
