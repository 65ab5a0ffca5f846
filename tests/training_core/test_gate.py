"""The gate's rule: every precondition, guard and edge of the comparison."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from pydantic import ValidationError

from training_core.config.gate import (
    GateConfig,
    MaximumGuard,
    MaximumIncreaseGuard,
    NonInferiorityGuard,
    PrimaryConfig,
    RatioRangeGuard,
    guard_name,
)
from training_core.errors import ConfigurationError
from training_core.evaluation.gate import IDENTICAL_WEIGHTS, judge
from training_core.evaluation.scores import EvaluationScores, MetricScores, ModelScores
from training_core.records import Verdict

NUM_PROMPTS = 200


def config(*guards, **values) -> GateConfig:
    values = {"primary": PrimaryConfig(metric="gold"), "num_resamples": 2000, "guards": list(guards)} | values
    return GateConfig(**values)


def model(digest: str, clusters=None, **metrics) -> ModelScores:
    """Build scores; a metric is a list of one score a prompt, or of one list of samples a prompt."""
    as_rows = {n: [row if isinstance(row, list) else [row] for row in rows] for n, rows in metrics.items()}
    size = len(next(iter(as_rows.values())))
    groups = tuple(f"g{i}" for i in range(size)) if clusters is None else tuple(clusters)
    return ModelScores(
        weights_sha256=digest,
        prompt_ids=tuple(f"p{i}" for i in range(size)),
        group_ids=groups,
        metrics={name: MetricScores.of(rows) for name, rows in as_rows.items()},
    )


def scores(candidate: ModelScores, reference: ModelScores, champion: ModelScores | None = None) -> EvaluationScores:
    models = {"candidate": candidate, "reference": reference}
    if champion is not None:
        models["champion"] = champion
    return EvaluationScores(models=models, evaluation_digest="e")


def binary(num_ones: int, size: int = NUM_PROMPTS) -> list[float]:
    return [1.0] * num_ones + [0.0] * (size - num_ones)


def decide(candidate, reference, gate=None, champion=None, more_candidate=None, more_reference=None):
    both = scores(
        model("c", gold=candidate, **(more_candidate or {})),
        model("r", gold=reference, **(more_reference or {})),
        model("k", gold=champion) if champion is not None else None,
    )
    return judge(both, gate or config(), seed=0)


def code(report) -> str:
    return report.reasons[0].split(":")[0]


def test_a_clear_gain_passes_and_says_every_number():
    report = decide(binary(120), binary(80))
    rule = report.primary
    assert report.verdict is Verdict.PASS
    assert report.reasons == []
    assert rule.value == pytest.approx(0.5)
    assert rule.difference == pytest.approx(0.2)
    assert (rule.candidate_mean, rule.baseline_mean) == (0.6, 0.4)
    assert 0 < rule.bound < rule.value
    assert rule.interval[0] < rule.value < rule.interval[1]
    assert rule.interval_level == pytest.approx(0.9)
    assert rule.t_bound == pytest.approx(rule.bound, abs=0.05)
    assert rule.p_value < 1e-6
    assert report.weights_sha256 == {"candidate": "c", "reference": "r"}
    assert (report.num_prompts, report.num_clusters, report.num_samples_per_prompt) == (200, 200, 1)


def test_040_to_042_is_a_gain_of_five_percent():
    assert (0.42 - 0.4) / 0.4 < 0.05  # What binary arithmetic says.
    report = decide(binary(84), binary(80))
    assert report.primary.value == pytest.approx(0.05)
    assert report.verdict is Verdict.PASS
    report = decide(binary(83), binary(80))
    assert report.verdict is Verdict.FAIL


def test_a_gain_inside_the_noise_is_inconclusive_and_says_how_many_prompts_it_needs():
    generator = np.random.default_rng(0)
    reference = generator.permutation(binary(100)).tolist()
    candidate = generator.permutation(binary(106)).tolist()
    report = decide(candidate, reference)
    rule = report.primary
    assert report.verdict is Verdict.INCONCLUSIVE
    assert code(report) == "primary.not_resolved"
    # Two unrelated fair coins, 5 % of 0.5: the closed form gives about 2 * 0.25 * (1.645 + 0.842)² / 0.025².
    assert rule.num_prompts_needed == pytest.approx(4946, rel=0.15)
    assert str(rule.num_prompts_needed) in rule.detail


def test_too_small_a_gain_fails():
    report = decide(binary(81), binary(80))
    assert report.verdict is Verdict.FAIL
    assert code(report) == "primary.insufficient_gain"


def test_a_worse_model_fails():
    assert decide(binary(60), binary(80)).verdict is Verdict.FAIL


def test_a_metric_that_should_fall():
    gate = config(primary=PrimaryConfig(metric="gold", higher_is_better=False))
    assert decide(binary(40), binary(80), gate).verdict is Verdict.PASS
    assert decide(binary(120), binary(80), gate).verdict is Verdict.FAIL


def test_a_negative_baseline_is_measured_by_its_size():
    report = decide([-0.5] * 100 + [-0.7] * 100, [-1.0] * 100 + [-1.2] * 100)
    assert report.primary.value == pytest.approx(0.5 / 1.1)
    assert report.verdict is Verdict.PASS


def test_absolute_scale():
    gate = config(primary=PrimaryConfig(metric="gold", scale="absolute", min_gain=0.1))
    assert decide(binary(120), binary(80), gate).verdict is Verdict.PASS
    assert decide(binary(95), binary(80), gate).verdict is Verdict.FAIL
    # An absolute gain over a mean of zero is well defined.
    assert decide(binary(60), binary(0), gate).verdict is Verdict.PASS


@pytest.mark.parametrize("reference", [binary(0), [1.0, -1.0] * 100])
def test_a_baseline_around_zero_has_no_relative_gain(reference):
    report = decide(binary(120), reference)
    assert report.verdict is Verdict.ERROR
    assert code(report) == "primary.relative_gain_undefined"
    assert "absolute" in report.primary.detail


def test_a_gain_beyond_the_best_value_is_an_error():
    gate = config(primary=PrimaryConfig(metric="gold", best_value=1.0))
    report = decide(binary(200), binary(192), gate)
    assert report.verdict is Verdict.ERROR
    assert code(report) == "primary.infeasible_gain"
    assert decide(binary(200), binary(190), gate).verdict is Verdict.PASS


def test_identical_weights_fail_whatever_the_scores_say():
    same = scores(model("r", gold=binary(120)), model("r", gold=binary(80)))
    report = judge(same, config(), seed=0)
    assert report.verdict is Verdict.FAIL
    assert code(report) == IDENTICAL_WEIGHTS
    assert "training changed nothing" in report.reasons[0]
    few = scores(model("r", gold=binary(2, 5)), model("r", gold=binary(1, 5)))
    assert judge(few, config(), seed=0).verdict is Verdict.FAIL


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_scores_that_are_not_finite_are_an_error(bad, side):
    values = {"candidate": binary(200), "reference": binary(80)}
    values[side] = [bad, *values[side][1:]]
    report = decide(**values)
    assert report.verdict is Verdict.ERROR
    assert code(report) == "finite_scores"
    assert side in report.reasons[0]
    assert report.primary is None


def test_a_guard_metric_that_is_not_finite_is_an_error_too():
    report = decide(
        binary(120),
        binary(80),
        config(MaximumGuard(metric="kl", maximum=5.0)),
        more_candidate={"kl": [math.nan] * NUM_PROMPTS},
        more_reference={"kl": [0.0] * NUM_PROMPTS},
    )
    assert report.verdict is Verdict.ERROR


def test_too_few_prompts_or_clusters_are_an_error():
    assert code(decide(binary(120, 199), binary(80, 199))) == "enough_prompts"
    clusters = [f"g{i % 29}" for i in range(NUM_PROMPTS)]
    both = scores(model("c", clusters, gold=binary(120)), model("r", clusters, gold=binary(80)))
    report = judge(both, config(), seed=0)
    assert report.verdict is Verdict.ERROR
    assert code(report) == "enough_clusters"


def test_missing_scores_within_coverage_count_at_their_worst():
    reference = binary(80)
    report = decide([None, *binary(120)[1:]], reference)
    assert report.verdict is Verdict.PASS
    assert report.primary.candidate_mean == pytest.approx(119 / 200)
    report = decide(binary(120), [*reference[:-1], None])
    assert report.primary.baseline_mean == pytest.approx(81 / 200)
    gate = config(primary=PrimaryConfig(metric="gold", higher_is_better=False))
    assert decide([*binary(40)[:-1], None], reference, gate).primary.candidate_mean == pytest.approx(41 / 200)


@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_missing_scores_beyond_coverage_are_an_error(side):
    values = {"candidate": binary(120), "reference": binary(80)}
    values[side] = [None, None, *values[side][2:]]
    report = decide(**values)
    assert report.verdict is Verdict.ERROR
    assert code(report) == "coverage"
    assert f"{side} has gold scores for 99.00 %" in report.reasons[0]


def test_models_measured_on_different_prompts_are_an_error():
    candidate, reference = model("c", gold=binary(120)), model("r", gold=binary(80))
    other = dataclasses.replace(reference, prompt_ids=("x", *reference.prompt_ids[1:]))
    report = judge(scores(candidate, other), config(), seed=0)
    assert report.verdict is Verdict.ERROR
    assert code(report) == "same_items"
    assert "199 in common" in report.reasons[0]
    twice = dataclasses.replace(candidate, prompt_ids=("p1", *candidate.prompt_ids[1:]))
    same_twice = dataclasses.replace(reference, prompt_ids=twice.prompt_ids)
    assert "twice" in judge(scores(twice, same_twice), config(), seed=0).reasons[0]


def test_models_with_another_number_of_samples_are_an_error():
    candidate = model("c", gold=[[1.0, 1.0]] * NUM_PROMPTS)
    report = judge(scores(candidate, model("r", gold=binary(80))), config(), seed=0)
    assert report.verdict is Verdict.ERROR
    assert code(report) == "same_items"


@pytest.mark.parametrize("missing", ["reference", "candidate"])
def test_a_missing_model_is_an_error(missing):
    both = scores(model("c", gold=binary(120)), model("r", gold=binary(80)))
    models = {name: value for name, value in both.models.items() if name != missing}
    report = judge(EvaluationScores(models=models), config(), seed=0)
    assert report.verdict is Verdict.ERROR
    assert code(report) == "missing_baseline"


def test_a_metric_that_was_not_measured_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match=r"'gold'.*Metrics there: length"):
        judge(scores(model("c", length=binary(1)), model("r", length=binary(1))), config(), seed=0)


def test_samples_are_averaged_before_prompts_are_compared():
    reference = [[0.0, 1.0]] * NUM_PROMPTS
    candidate = [[1.0, 1.0]] * 100 + [[0.0, 1.0]] * 100
    report = decide(candidate, reference)
    assert report.primary.difference == pytest.approx(0.25)
    assert report.num_samples_per_prompt == 2


def test_clusters_make_the_verdict_harder():
    # Ten per cent better, in whole groups of ten prompts: 200 prompts, but only 40 independent observations.
    generator = np.random.default_rng(4)
    group_gain = np.array([1.0] * 5 + [-1.0] * 2 + [0.0] * 33)
    differences = np.repeat(generator.permutation(group_gain), 5)
    reference = np.full(NUM_PROMPTS, 0.5)
    candidate = (reference + differences).tolist()
    alone = decide(candidate, reference.tolist())
    clusters = [f"g{i // 5}" for i in range(NUM_PROMPTS)]
    both = scores(model("c", clusters, gold=candidate), model("r", clusters, gold=reference.tolist()))
    together = judge(both, config(), seed=0)
    assert alone.verdict is Verdict.PASS
    assert together.verdict is Verdict.INCONCLUSIVE
    assert together.num_clusters == 40


GUARDS = [
    (NonInferiorityGuard(metric="m", margin=0.05), [1.0] * 190 + [0.0] * 10, binary(190), Verdict.PASS),
    (NonInferiorityGuard(metric="m", margin=0.05), binary(100), binary(190), Verdict.FAIL),
    (NonInferiorityGuard(metric="m", margin=0.05, higher_is_better=False), binary(100), binary(10), Verdict.FAIL),
    (NonInferiorityGuard(metric="m", margin=0.05, higher_is_better=False), binary(10), binary(100), Verdict.PASS),
    (NonInferiorityGuard(metric="m", margin=0.01), [0.0] * 5 + [1.0] * 195, binary(196), Verdict.INCONCLUSIVE),
    (MaximumGuard(metric="m", maximum=0.5), binary(100), binary(10), Verdict.PASS),
    (MaximumGuard(metric="m", maximum=0.5), binary(101), binary(10), Verdict.FAIL),
    (RatioRangeGuard(metric="m"), [40.0] * 200, [32.0] * 200, Verdict.PASS),
    (RatioRangeGuard(metric="m"), [40.3] * 200, [32.0] * 200, Verdict.FAIL),
    (RatioRangeGuard(metric="m"), [25.0] * 200, [32.0] * 200, Verdict.FAIL),
    (RatioRangeGuard(metric="m"), [25.0] * 200, [0.0] * 200, Verdict.ERROR),
    (MaximumIncreaseGuard(metric="m", maximum_increase=0.01), binary(12), binary(10), Verdict.PASS),
    (MaximumIncreaseGuard(metric="m", maximum_increase=0.01), binary(13), binary(10), Verdict.FAIL),
]


@pytest.mark.parametrize(("guard", "candidate", "reference", "expected"), GUARDS)
def test_guards(guard, candidate, reference, expected):
    report = decide(
        binary(120), binary(80), config(guard), more_candidate={"m": candidate}, more_reference={"m": reference}
    )
    assert report.primary.verdict is Verdict.PASS
    assert [g.verdict for g in report.guards] == [expected]
    assert report.verdict is expected
    assert report.guards[0].name == guard_name(guard)
    if expected is not Verdict.PASS:
        assert report.reasons[0].startswith(guard_name(guard))
        assert report.guards[0].reason
    if expected is not Verdict.ERROR:
        low, high = report.guards[0].interval
        assert low <= report.guards[0].value <= high
    if expected is Verdict.INCONCLUSIVE:
        assert report.guards[0].num_prompts_needed > NUM_PROMPTS


def test_all_guards_must_hold_and_each_failure_is_named():
    report = decide(
        binary(120),
        binary(80),
        config(
            MaximumGuard(metric="kl", maximum=1.0),
            RatioRangeGuard(metric="length"),
            MaximumGuard(metric="rep", maximum=0.2),
        ),
        more_candidate={"kl": [2.0] * 200, "length": [90.0] * 200, "rep": [0.0] * 200},
        more_reference={"kl": [0.0] * 200, "length": [30.0] * 200, "rep": [0.0] * 200},
    )
    assert report.verdict is Verdict.FAIL
    assert [reason.split(":")[0] for reason in report.reasons] == [
        "kl.maximum.above_maximum",
        "length.ratio_range.above_maximum",
    ]


def test_every_threshold_says_which_side_is_allowed():
    same = {"length": [3.0] * NUM_PROMPTS}
    guards = [MaximumGuard(metric="length", maximum=2), RatioRangeGuard(metric="length")]
    report = decide(binary(84), binary(80), config(*guards), None, same, same)
    details = " | ".join(rule.detail for rule in (*report.guards, report.primary))
    for words in ("(allowed: at most 2)", "(allowed: 0.8 to 1.25)", "(needed: at least +5.00 %)", "(needed: above 0)"):
        assert words in details
    report = decide(binary(84), binary(80), config(min_prompts=300))
    assert "(gate.min_prompts allows at least 300)" in report.reasons[0]


def test_the_champion_must_not_be_beaten_by_its_successor_only_in_part():
    assert decide(binary(120), binary(80), champion=binary(110)).verdict is Verdict.PASS
    report = decide(binary(120), binary(80), champion=binary(160))
    assert report.verdict is Verdict.FAIL
    assert code(report) == "champion.worse_than_champion"
    mixed = np.random.default_rng(1).permutation(binary(118)).tolist()
    assert decide(binary(120), binary(80), champion=mixed).verdict is Verdict.INCONCLUSIVE
    wide = config(champion_margin=0.2)
    assert decide(binary(120), binary(80), wide, champion=mixed).verdict is Verdict.PASS


def test_the_champion_itself_passes_again():
    candidate = model("c", gold=binary(120))
    report = judge(scores(candidate, model("r", gold=binary(80)), candidate), config(), seed=0)
    assert report.verdict is Verdict.PASS
    assert report.champion.bound == 0.0


def test_the_report_is_json_and_depends_on_the_seed_only():
    first, second = decide(binary(120), binary(80)), decide(binary(120), binary(80))
    assert first.model_dump_json() == second.model_dump_json()
    assert type(first).model_validate_json(first.model_dump_json()) == first


@pytest.mark.filterwarnings("ignore:overflow")
def test_overflow_is_an_error_not_a_verdict():
    report = decide([1e308] * 200, [-1e308] * 100 + [-1.1e308] * 100)
    assert report.verdict is Verdict.ERROR
    assert report.primary.reason == "not_computable"
    report.model_dump_json()


def test_reward_model_scores_have_no_percentage():
    with pytest.raises(ValidationError, match="scale: absolute"):
        PrimaryConfig(metric="reward_model_score")
    assert PrimaryConfig(metric="reward_model_score", scale="absolute").min_gain == 0.05


def test_config_refuses_what_makes_no_sense():
    with pytest.raises(ValidationError, match=r"kl\.maximum"):
        config(MaximumGuard(metric="kl", maximum=1.0), MaximumGuard(metric="kl", maximum=2.0))
    with pytest.raises(ValidationError, match="must not exceed"):
        RatioRangeGuard(metric="m", minimum=2.0, maximum=1.0)
    with pytest.raises(ValidationError):
        GateConfig.model_validate({"primary": {"metric": "gold"}, "guards": [{"kind": "nothing", "metric": "m"}]})
    with pytest.raises(ValidationError):
        GateConfig.model_validate({})


def test_default_guards_are_the_documented_ones():
    gate = GateConfig.model_validate({"primary": {"metric": "gold"}})
    assert [guard_name(g) for g in gate.guards] == [
        "length_tokens.ratio_range",
        "truncated.maximum_increase",
        "repetition.maximum",
    ]
    assert GateConfig.model_validate(gate.model_dump(mode="json")) == gate
