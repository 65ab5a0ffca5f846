"""How often the gate is wrong, and that no violated precondition ever passes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training_core.config.gate import GateConfig, PrimaryConfig
from training_core.evaluation.gate import judge
from training_core.evaluation.scores import EvaluationScores, MetricScores, ModelScores
from training_core.records import Verdict

NUM_PROMPTS = 200
GATE = GateConfig(primary=PrimaryConfig(metric="gold"), num_resamples=1000, guards=[])


def model(digest: str, rows: list[list[float | None]], groups: list[str] | None = None) -> ModelScores:
    return ModelScores(
        weights_sha256=digest,
        prompt_ids=tuple(f"p{i}" for i in range(len(rows))),
        group_ids=tuple(groups or [f"g{i}" for i in range(len(rows))]),
        metrics={"gold": MetricScores.of(rows)},
    )


@pytest.mark.parametrize(("true_gain", "low", "high"), [(0.0, 0.0, 0.05), (0.15, 0.68, 0.68)])
def test_operating_characteristics_of_the_standard_profile(true_gain, low, high):
    """p = 0.5, correlation 0.5, 200 prompts: promotes a no-better model at most 5 times in 100."""
    generator = np.random.default_rng(17)
    num_trials, p, correlation = 400, 0.5, 0.5
    q = p * (1 + true_gain)
    both = p * q + correlation * math.sqrt(p * (1 - p) * q * (1 - q))
    cells = [both, q - both, p - both, 1 - p - q + both]
    passed = 0
    for _ in range(num_trials):
        cell = generator.choice(4, NUM_PROMPTS, p=cells)
        candidate, reference = (cell <= 1).astype(float), ((cell == 0) | (cell == 2)).astype(float)
        models = {
            "candidate": model("c", candidate[:, None].tolist()),
            "reference": model("r", reference[:, None].tolist()),
        }
        passed += judge(EvaluationScores(models=models), GATE, seed=0).verdict is Verdict.PASS
    error = 3 * math.sqrt(max(high * (1 - high), 0.04) / num_trials)
    assert low - error <= passed / num_trials <= high + error


@pytest.mark.parametrize(("sign", "higher_is_better"), [(1, True), (1, False), (-1, True)])
def test_the_interval_of_a_relative_gain_has_the_baselines_spread_in_it(sign, higher_is_better):
    """Against resampling the gain itself; the difference's interval over the baseline's mean is far narrower here."""
    generator = np.random.default_rng(5)
    reference = sign * np.clip(generator.normal(0.3, 0.6, 400), 0.0, None)
    candidate = reference * 0.4 + sign * generator.normal(0.35, 0.1, 400)
    gate = GATE.model_copy(
        update={"primary": PrimaryConfig(metric="gold", higher_is_better=higher_is_better), "num_resamples": 4000}
    )
    models = {
        "candidate": model("c", candidate[:, None].tolist()),
        "reference": model("r", reference[:, None].tolist()),
    }
    rule = judge(EvaluationScores(models=models), gate, seed=0).primary
    drawn = generator.integers(0, 400, (20_000, 400))
    base = reference[drawn].mean(axis=1)
    gains = (1 if higher_is_better else -1) * (candidate[drawn].mean(axis=1) - base) / abs(base)
    low, high = np.quantile(gains, [0.05, 0.95])
    assert rule.interval[0] < rule.value < rule.interval[1]
    width = rule.interval[1] - rule.interval[0]
    assert width == pytest.approx(high - low, rel=0.06)
    assert rule.interval == pytest.approx([low, high], abs=0.1 * width)


BREAKS = ["nan", "infinite", "missing", "few", "clusters", "prompts", "reference", "samples"]


@settings(max_examples=60, deadline=None)
@given(st.sets(st.sampled_from(BREAKS), min_size=1), st.integers(0, 1), st.integers(0, 2**31 - 1))
def test_no_violated_precondition_ever_passes(breaks, side, seed):
    generator = np.random.default_rng(seed)
    size = 150 if "few" in breaks else NUM_PROMPTS
    values = [np.ones((size, 1)), (generator.random((size, 1)) < 0.3).astype(float)]
    rows = [array.tolist() for array in values]
    if "nan" in breaks:
        rows[side][3] = [math.nan]
    if "infinite" in breaks:
        rows[side][4] = [math.inf]
    if "missing" in breaks:
        rows[side][5:9] = [[None]] * 4
    if "samples" in breaks:
        rows[side] = [[row[0], row[0]] for row in rows[side]]
    groups = [f"g{i % 7}" if "clusters" in breaks else f"g{i}" for i in range(size)]
    models = [model("c", rows[0], groups), model("r", rows[1], groups)]
    if "prompts" in breaks:
        models[side] = dataclasses.replace(models[side], prompt_ids=models[side].prompt_ids[::-1])
    named = dict(zip(("candidate", "reference"), models, strict=True))
    if "reference" in breaks:
        del named["reference"]
    report = judge(EvaluationScores(models=named), GATE, seed=0)
    assert report.verdict is Verdict.ERROR
    assert report.reasons
