"""Bounds against scipy, closed forms and simulated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from training_core.errors import EvaluationError
from training_core.evaluation.statistics import (
    bootstrap_interval,
    cluster_sums,
    num_items_needed,
    standard_error,
    t_interval,
    t_p_value,
)


def singletons(values: np.ndarray) -> np.ndarray:
    return np.arange(len(values))


def boot(values, clusters, *, alpha=0.05, num_resamples=10_000, seed=0):
    return bootstrap_interval(values, clusters, alpha=alpha, num_resamples=num_resamples, seed=seed)


@pytest.mark.parametrize("kind", ["normal", "skewed", "ternary"])
def test_bootstrap_agrees_with_scipy_bca(kind):
    generator = np.random.default_rng(3)
    values = {
        "normal": generator.normal(0.3, 1.0, 120),
        "skewed": generator.exponential(1.0, 120) ** 2,
        "ternary": generator.choice([-1.0, 0.0, 1.0], 120, p=[0.2, 0.5, 0.3]),
    }[kind]
    ours = boot(values, singletons(values))
    theirs = stats.bootstrap(
        (values,), np.mean, confidence_level=0.9, n_resamples=10_000, method="BCa", rng=np.random.default_rng(1)
    ).confidence_interval
    tolerance = 0.06 * values.std() / math.sqrt(len(values)) * 3
    assert ours.method == "bca"
    assert ours.lower == pytest.approx(theirs.low, abs=tolerance)
    assert ours.upper == pytest.approx(theirs.high, abs=tolerance)


def test_t_interval_and_p_value_agree_with_the_paired_t_test():
    generator = np.random.default_rng(0)
    candidate, baseline = generator.normal(0.2, 1, 80), generator.normal(0, 1, 80)
    differences = candidate - baseline
    expected = stats.ttest_rel(candidate, baseline, alternative="greater")
    interval = t_interval(differences, singletons(differences), alpha=0.05)
    assert interval.lower == pytest.approx(expected.confidence_interval(0.95).low)
    assert t_p_value(differences, singletons(differences)) == pytest.approx(expected.pvalue)
    assert interval.standard_error == pytest.approx(stats.sem(differences))


def test_equal_clusters_reduce_to_the_means_of_clusters():
    generator = np.random.default_rng(1)
    values, clusters = generator.normal(size=200), np.repeat(np.arange(50), 4)
    means = values.reshape(50, 4).mean(axis=1)
    assert standard_error(cluster_sums(values, clusters)) == pytest.approx(stats.sem(means))
    ours, on_means = boot(values, clusters, seed=5), boot(means, np.arange(50), seed=5)
    assert ours.lower == pytest.approx(on_means.lower)
    assert ours.upper == pytest.approx(on_means.upper)


def test_clusters_widen_the_interval_when_their_items_agree():
    values = np.repeat(np.random.default_rng(2).normal(size=60), 5)
    clustered, naive = boot(values, np.repeat(np.arange(60), 5)), boot(values, singletons(values))
    assert clustered.estimate - clustered.lower > 1.8 * (naive.estimate - naive.lower)


def test_labels_may_be_text_and_in_any_order():
    values = np.array([1.0, 5.0, 2.0, 7.0] * 15)
    clusters = np.array(["b", "a", "d", "c"] * 15)
    groups = cluster_sums(values, clusters)
    assert groups.sums.tolist() == [75.0, 15.0, 105.0, 30.0]
    assert groups.sizes.tolist() == [15.0] * 4


def test_same_seed_same_bounds_and_another_seed_nearly_the_same():
    values = np.random.default_rng(4).normal(0.1, 1, 300)
    first, second, other = (boot(values, singletons(values), seed=s) for s in (7, 7, 8))
    assert first == second
    assert other.lower != first.lower
    assert other.lower == pytest.approx(first.lower, abs=0.01)


def test_few_clusters_take_the_wider_of_bootstrap_and_t():
    values = np.random.default_rng(5).normal(size=32)
    interval = boot(values, singletons(values))
    reference = t_interval(values, singletons(values), alpha=0.05)
    assert interval.method == "bca+t"
    assert interval.lower <= reference.lower
    assert interval.upper >= reference.upper


def test_constant_values_give_a_degenerate_interval():
    interval = boot(np.full(60, 0.25), np.arange(60))
    assert (interval.lower, interval.estimate, interval.upper) == (0.25, 0.25, 0.25)
    assert interval.method == "percentile"
    assert t_p_value(np.full(60, 0.25), np.arange(60)) == 0.0
    assert t_p_value(np.zeros(60), np.arange(60)) == 0.5
    assert t_p_value(np.full(60, -1.0), np.arange(60)) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_raise(bad):
    values = [0.1, bad, 0.3]
    with pytest.raises(EvaluationError, match="1 of 3 values are not finite"):
        boot(values, [0, 1, 2])
    with pytest.raises(EvaluationError):
        t_interval(values, [0, 1, 2], alpha=0.05)
    with pytest.raises(EvaluationError):
        num_items_needed(values, [0, 1, 2], effect=0.1, alpha=0.05, power=0.8)


def test_one_cluster_or_none_raise():
    with pytest.raises(EvaluationError, match="one cluster"):
        boot([1.0, 2.0], ["a", "a"])
    with pytest.raises(EvaluationError, match="one value"):
        boot([], [])
    with pytest.raises(EvaluationError, match="one value"):
        cluster_sums([1.0, 2.0], ["a"])


def test_items_needed_against_the_closed_form_and_the_published_table():
    # p = 0.5, correlation 0.5, gain 5 %: variance of a paired difference of two Bernoullis.
    p, gain, correlation = 0.5, 0.025, 0.5
    q = p + gain
    variance = p * (1 - p) + q * (1 - q) - 2 * correlation * math.sqrt(p * (1 - p) * q * (1 - q))
    generator = np.random.default_rng(0)
    values = generator.normal(size=5000)
    values = (values - values.mean()) / values.std(ddof=1) * math.sqrt(variance) + gain
    needed = num_items_needed(values, singletons(values), effect=gain, alpha=0.05, power=0.8)
    assert needed == pytest.approx(2470, rel=0.005)
    with pytest.raises(ValueError, match="positive"):
        num_items_needed(values, singletons(values), effect=0.0, alpha=0.05, power=0.8)


def test_needed_items_grow_with_agreement_inside_clusters():
    values = np.repeat(np.random.default_rng(2).normal(size=60), 5)
    arguments = {"effect": 0.1, "alpha": 0.05, "power": 0.8}
    clustered = num_items_needed(values, np.repeat(np.arange(60), 5), **arguments)
    assert clustered == pytest.approx(5 * num_items_needed(values, singletons(values), **arguments), rel=0.03)


@pytest.mark.parametrize("cluster_size", [1, 5])
def test_lower_bound_errs_at_the_stated_rate(cluster_size):
    generator = np.random.default_rng(11)
    num_trials, num_clusters = 500, 100
    wrong = 0
    for trial in range(num_trials):
        shared = np.repeat(generator.normal(size=num_clusters), cluster_size)
        values = shared + generator.normal(size=num_clusters * cluster_size)
        clusters = np.repeat(np.arange(num_clusters), cluster_size)
        wrong += boot(values, clusters, num_resamples=1000, seed=trial).lower > 0
    assert wrong / num_trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / num_trials)
    assert wrong / num_trials >= 0.015


@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1.0, 1e150])
def test_bounds_scale_with_the_values(scale):
    values = np.linspace(0.0, 1.0, 60) ** 3
    plain = boot(values, range(60), alpha=0.05, num_resamples=1000)
    scaled = boot(values * scale, range(60), alpha=0.05, num_resamples=1000)
    assert (scaled.method, scaled.lower / scale) == ("bca", pytest.approx(plain.lower, rel=1e-9))


@settings(max_examples=50, deadline=None)
@example([0.0] * 39 + [1.3e-143], 1, 0.01)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=40, max_size=80),
    st.integers(1, 5),
    st.sampled_from([0.01, 0.05, 0.2, 0.5]),
)
def test_bounds_always_enclose_the_estimate(values, cluster_size, alpha):
    clusters = np.arange(len(values)) // cluster_size
    interval = boot(np.array(values), clusters, alpha=alpha, num_resamples=1000)
    assert interval.lower <= interval.estimate <= interval.upper
