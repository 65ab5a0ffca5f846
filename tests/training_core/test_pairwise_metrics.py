"""`same_opening` is a mean over pairs of answers: the spread that summary and gate give it is the one it has."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from training_core.config.gate import GateConfig, NonInferiorityGuard, PrimaryConfig
from training_core.evaluation.gate import judge
from training_core.evaluation.measures import opening_shares
from training_core.evaluation.samples import EvaluationPrompt, ModelSamples, Sample
from training_core.evaluation.scores import EvaluationScores, MetricScores, ModelScores
from training_core.evaluation.statistics import cluster_sums, linearised, standard_error
from training_core.evaluation.summary import summarise_model
from training_core.records import StopReason, Verdict

NUM_PROMPTS = 200


def test_a_mean_over_pairs_has_the_standard_error_that_repetition_shows():
    """Answers of 120 prompts, two each, again and again: the spread of `same_opening`, and what one evaluation says."""
    generator = np.random.default_rng(0)
    openings = ["I am"] * 30 + ["It is"] * 10 + [f"Word{i} then" for i in range(60)]
    owners = np.repeat(np.arange(120), 2)
    prompts = [EvaluationPrompt(f"p{i}", f"p{i}", "") for i in range(120)]
    source = SimpleNamespace(weights_sha256="", tokenizer_sha256="")
    means, errors = [], []
    for _ in range(300):
        # The two answers to a prompt are mostly alike, as a policy's are.
        first = generator.integers(0, len(openings), 120)
        second = np.where(generator.random(120) < 0.7, first, generator.integers(0, len(openings), 120))
        texts = [openings[i] for i in np.stack([first, second], axis=1).ravel()]
        samples = [Sample(i // 2, i % 2, (5,), text, StopReason.EOS) for i, text in enumerate(texts)]
        table = ModelSamples(samples, {"same_opening": opening_shares(texts, owners.tolist())})
        entry = summarise_model(source, table, prompts, ["same_opening"])
        means.append(entry["means"]["same_opening"])
        errors.append(entry["standard_errors"]["same_opening"])
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.12)


def test_linearised_values_keep_the_mean_and_double_the_spread():
    values = np.random.default_rng(1).random(50)
    assert linearised(values).mean() == pytest.approx(values.mean(), abs=1e-15)
    one, two = (standard_error(cluster_sums(v, np.arange(50) // 2)) for v in (values, linearised(values)))
    assert two == pytest.approx(2 * one)


def test_the_gate_judges_it_with_the_spread_of_a_mean_over_pairs():
    """`same_opening` counts each pair of answers in both of them; another metric of the same values does not."""
    generator = np.random.default_rng(0)
    names = tuple(f"p{i}" for i in range(NUM_PROMPTS))
    models = {}
    for name, gold in (("candidate", 0.6), ("reference", 0.4)):
        values = generator.random((NUM_PROMPTS, 1)).tolist()
        won = [[float(i < gold * NUM_PROMPTS)] for i in range(NUM_PROMPTS)]
        metrics = {"gold": won, "same_opening": values, "other": values}
        models[name] = ModelScores(name, names, names, {m: MetricScores.of(rows) for m, rows in metrics.items()})
    guards = [NonInferiorityGuard(metric=m, margin=0.09, higher_is_better=False) for m in ("same_opening", "other")]
    config = GateConfig(primary=PrimaryConfig(metric="gold"), guards=guards)
    pairwise, plain = judge(EvaluationScores(models), config, seed=0).guards
    assert pairwise.value == pytest.approx(plain.value)
    assert pairwise.candidate_mean == pytest.approx(plain.candidate_mean)
    assert pairwise.standard_error == pytest.approx(2 * plain.standard_error)
    assert pairwise.value - pairwise.bound == pytest.approx(2 * (plain.value - plain.bound), rel=0.02)
    assert (plain.verdict, pairwise.verdict) == (Verdict.PASS, Verdict.INCONCLUSIVE)
