"""The rules of the gate that compare means with confidence. Each returns a `RuleRecord`; gate_guards has the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from training_core.config.evaluation import PAIRWISE_METRICS
from training_core.config.gate import (
    GateConfig,
    PrimaryConfig,
)
from training_core.evaluation.scores import CANDIDATE, CHAMPION, REFERENCE, EvaluationScores, ModelScores
from training_core.evaluation.statistics import (
    FloatArray,
    Interval,
    bootstrap_interval,
    linearised,
    num_items_needed,
    t_interval,
    t_p_value,
)
from training_core.records import Record, Verdict

TOLERANCE = 1e-9
"""0.40 -> 0.42 is a gain of 0.04999999999999991 in binary arithmetic, and 5 % all the same."""
ZERO = 1e-12
"""A baseline mean smaller than this has no percentages."""


class RuleRecord(Record):
    """One rule, what was measured and what was required. All numbers are finite or null."""

    name: str
    kind: Literal["primary", "champion", "non_inferiority", "maximum", "ratio_range", "maximum_increase"]
    metric: str
    baseline: str
    """The model compared with: `reference` or `champion`."""
    verdict: Verdict
    reason: str
    """One word for machines; empty for a pass. E.g. `insufficient_gain`."""
    detail: str
    """One sentence for people."""
    scale: Literal["relative", "absolute"] = "absolute"
    """Unit of `value` and the bounds: shares of the baseline's mean, or the metric's own unit."""
    candidate_mean: float | None = None
    baseline_mean: float | None = None
    value: float | None = None
    """What the rule looks at, in its own unit: a relative gain, a difference, a mean or a ratio."""
    threshold: float | None = None
    """What `value` must reach (`primary`, `champion`, `non_inferiority`) or may not exceed (the others)."""
    threshold_low: float | None = None
    """`ratio_range` only: what `value` may not fall below."""
    bound: float | None = None
    """The one-sided lower confidence bound that the verdict uses; null where the rule looks at `value` alone."""
    bound_threshold: float | None = None
    """What `bound` must reach (`champion`, `non_inferiority`) or exceed (`primary`)."""
    interval: list[float] | None = None
    """Two-sided interval of `value`, for people: of a relative gain or a ratio with the baseline's own spread in it."""
    interval_level: float | None = None
    """Share of such intervals that hold the true value: 1 - 2 alpha."""
    difference: float | None = None
    """Mean paired difference, oriented so that positive is better for rules with an orientation."""
    standard_error: float | None = None
    """Cluster-robust standard error of `difference`."""
    t_bound: float | None = None
    """Cross-check of `bound` by Student's t."""
    p_value: float | None = None
    """One-sided p value of the t test of `difference` above 0."""
    method: str = ""
    num_prompts_needed: int | None = None
    """For an inconclusive rule: how many prompts would resolve it at the configured power."""


@dataclass(frozen=True)
class RuleContext:
    """What every rule needs."""

    scores: EvaluationScores
    config: GateConfig
    seed: int

    @property
    def candidate(self) -> ModelScores:
        return self.scores.models[CANDIDATE]

    @property
    def clusters(self) -> tuple[str, ...]:
        return self.candidate.group_ids

    def bootstrap(self, values: FloatArray) -> Interval:
        return bootstrap_interval(
            values,
            self.clusters,
            alpha=self.config.alpha,
            num_resamples=self.config.num_resamples,
            seed=self.seed,
        )

    @property
    def interval_level(self) -> float:
        return 1.0 - 2.0 * self.config.alpha

    def ratio_interval(self, candidate: FloatArray, baseline: FloatArray) -> Interval:
        """Return the interval of mean(candidate) / mean(baseline), to first order: the spread of c - ratio * b."""
        ratio = float(candidate.mean() / baseline.mean())
        spread = self.bootstrap((candidate - ratio * baseline) / baseline.mean())
        shift = ratio - spread.estimate
        return Interval(ratio, spread.lower + shift, spread.upper + shift, spread.standard_error, spread.method)

    def needed(self, values: FloatArray, effect: float) -> int | None:
        if not effect > 0:
            return None
        return num_items_needed(values, self.clusters, effect=effect, alpha=self.config.alpha, power=self.config.power)


def paired_means(
    context: RuleContext, metric: str, baseline: str, *, higher_is_better: bool
) -> tuple[FloatArray, FloatArray]:
    """Return the means per prompt of candidate and baseline, [prompts] each, in the metric's own direction.

    A missing score counts as the worst that either model got for the candidate, as the best for the baseline. Of a
    metric whose mean is one over pairs of answers they are the values that have its spread.
    """
    ours = context.candidate.metrics[metric]
    theirs = context.scores.models[baseline].metrics[metric]
    low = min(ours.extremes()[0], theirs.extremes()[0])
    high = max(ours.extremes()[1], theirs.extremes()[1])
    worst, best = (low, high) if higher_is_better else (high, low)
    candidate, other = ours.prompt_means(worst), theirs.prompt_means(best)
    if metric in PAIRWISE_METRICS:
        return linearised(candidate), linearised(other)
    return candidate, other


def judge_primary(context: RuleContext) -> RuleRecord:
    """The candidate must gain `min_gain` over the reference, and the difference must be above 0 with confidence."""
    rule = context.config.primary
    candidate, baseline = paired_means(context, rule.metric, REFERENCE, higher_is_better=rule.higher_is_better)
    sign = 1.0 if rule.higher_is_better else -1.0
    means = {"candidate_mean": float(candidate.mean()), "baseline_mean": float(baseline.mean())}
    base = {"name": "primary", "kind": "primary", "metric": rule.metric, "baseline": REFERENCE, **means}
    base["scale"] = rule.scale
    problem = _undefined(context, rule, baseline)
    if problem:
        return RuleRecord.model_validate({**base, "verdict": Verdict.ERROR, "reason": problem[0], "detail": problem[1]})
    unit = abs(means["baseline_mean"]) if rule.scale == "relative" else 1.0
    differences = sign * (candidate - baseline)
    interval = context.bootstrap(differences)
    gain, bound = interval.estimate / unit, interval.lower / unit
    needed = None
    if gain < rule.min_gain - TOLERANCE:
        verdict, reason = Verdict.FAIL, "insufficient_gain"
    elif interval.lower > 0:
        verdict, reason = Verdict.PASS, ""
    else:
        verdict, reason = Verdict.INCONCLUSIVE, "not_resolved"
        # The gain that was asked for decides the size; an observed one is noise where the verdict is open.
        needed = context.needed(differences, rule.min_gain * unit if rule.min_gain > 0 else interval.estimate)
    detail = (
        f"{rule.metric} {means['baseline_mean']:.4g} -> {means['candidate_mean']:.4g}, gain {_show(gain, rule)} "
        f"(needed: at least {_show(rule.min_gain, rule)}), lower bound of the difference {interval.lower:+.4g} "
        "(needed: above 0)"
    )
    if needed:
        detail += f"; about {needed} prompts would resolve it"
    return RuleRecord.model_validate(
        {
            **base,
            "verdict": verdict,
            "reason": reason,
            "detail": detail,
            "value": gain,
            "threshold": rule.min_gain,
            "bound": bound,
            "bound_threshold": 0.0,
            "interval": _gain_interval(context, rule, candidate, baseline, interval),
            "interval_level": context.interval_level,
            "num_prompts_needed": needed,
            **_difference_fields(context, differences, interval, unit),
        }
    )


def _gain_interval(
    context: RuleContext, rule: PrimaryConfig, candidate: FloatArray, baseline: FloatArray, difference: Interval
) -> list[float]:
    if rule.scale == "absolute":
        return [difference.lower, difference.upper]
    ratio = context.ratio_interval(candidate, baseline)
    # The gain is the ratio less 1, turned round where lower is better or the baseline's mean is negative.
    sign = (1.0 if rule.higher_is_better else -1.0) * (1.0 if baseline.mean() > 0 else -1.0)
    return sorted([sign * (ratio.lower - 1.0), sign * (ratio.upper - 1.0)])


def judge_champion(context: RuleContext) -> RuleRecord:
    """The candidate must not be inferior to the current champion on the primary metric."""
    rule = context.config.primary
    return judge_non_inferiority(
        context,
        name="champion",
        kind="champion",
        metric=rule.metric,
        baseline=CHAMPION,
        margin=context.config.champion_margin,
        higher_is_better=rule.higher_is_better,
    )


def _undefined(context: RuleContext, rule: PrimaryConfig, baseline: FloatArray) -> tuple[str, str] | None:
    """Say why the required gain has no meaning, or None."""
    mean = float(baseline.mean())
    if rule.scale == "relative":
        interval = t_interval(baseline, context.clusters, alpha=0.025)
        if abs(mean) <= ZERO or interval.lower <= 0 <= interval.upper:
            return "relative_gain_undefined", (
                f"a relative gain is undefined: the reference's mean {rule.metric} is {mean:.4g} with 95 % interval "
                f"[{interval.lower:.4g}, {interval.upper:.4g}], not distinguishable from 0. Set gate.primary.scale: "
                "absolute with a min_gain in the metric's unit"
            )
    if rule.best_value is None:
        return None
    required = rule.min_gain * (abs(mean) if rule.scale == "relative" else 1.0)
    room = rule.best_value - mean if rule.higher_is_better else mean - rule.best_value
    if required > room + TOLERANCE:
        return "infeasible_gain", (
            f"the required gain cannot be reached: the reference's mean {rule.metric} is {mean:.4g}, the best value "
            f"{rule.best_value:.4g}, and the gate asks for a gain of {required:.4g}. Lower gate.primary.min_gain or "
            "evaluate on harder prompts"
        )
    return None


def judge_non_inferiority(
    context: RuleContext,
    *,
    name: str,
    kind: Literal["champion", "non_inferiority"],
    metric: str,
    baseline: str,
    margin: float,
    higher_is_better: bool,
) -> RuleRecord:
    """The candidate must not be worse than `baseline` by more than `margin`, with confidence."""
    ours, theirs = paired_means(context, metric, baseline, higher_is_better=higher_is_better)
    differences = (ours - theirs) * (1.0 if higher_is_better else -1.0)
    interval = context.bootstrap(differences)
    needed = None
    if interval.lower >= -margin - TOLERANCE:
        verdict, reason = Verdict.PASS, ""
    elif interval.estimate < -margin - TOLERANCE:
        verdict, reason = Verdict.FAIL, f"worse_than_{baseline}"
    else:
        verdict, reason = Verdict.INCONCLUSIVE, "not_resolved"
        needed = context.needed(differences, interval.estimate + margin)
    detail = (
        f"{metric} {theirs.mean():.4g} -> {ours.mean():.4g} against the {baseline}, "
        f"difference {interval.estimate:+.4g}, lower bound {interval.lower:+.4g} (needed: at least {0.0 - margin:.4g})"
    )
    if needed:
        detail += f"; about {needed} prompts would resolve it"
    return RuleRecord.model_validate(
        {
            "name": name,
            "kind": kind,
            "metric": metric,
            "baseline": baseline,
            "verdict": verdict,
            "reason": reason,
            "detail": detail,
            "candidate_mean": float(ours.mean()),
            "baseline_mean": float(theirs.mean()),
            "value": interval.estimate,
            "threshold": 0.0 - margin,  # Not -margin, which is -0.0 for a margin of 0.
            "bound": interval.lower,
            "bound_threshold": 0.0 - margin,
            "interval": [interval.lower, interval.upper],
            "interval_level": context.interval_level,
            "num_prompts_needed": needed,
            **_difference_fields(context, differences, interval, 1.0),
        }
    )


def _difference_fields(
    context: RuleContext, differences: FloatArray, interval: Interval, unit: float
) -> dict[str, object]:
    check = t_interval(differences, context.clusters, alpha=context.config.alpha)
    return {
        "difference": interval.estimate,
        "standard_error": interval.standard_error,
        "t_bound": check.lower / unit,
        "p_value": t_p_value(differences, context.clusters),
        "method": interval.method,
    }


def _show(value: float, rule: PrimaryConfig) -> str:
    return f"{100 * value:+.2f} %" if rule.scale == "relative" else f"{value:+.4g}"


def finite(record: RuleRecord) -> bool:
    """Return whether every number of a record is finite: nothing else may decide."""
    numbers = [v for v in record.model_dump().values() if isinstance(v, float)]
    return all(math.isfinite(v) for v in [*numbers, *(record.interval or [])])
