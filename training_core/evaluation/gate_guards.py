"""The gate's guards: what must not get worse while the primary metric gets better."""

from __future__ import annotations

import numpy as np

from training_core.config.gate import (
    GuardConfig,
    MaximumGuard,
    MaximumIncreaseGuard,
    NonInferiorityGuard,
    RatioRangeGuard,
    guard_name,
)
from training_core.evaluation.gate_rules import (
    TOLERANCE,
    ZERO,
    RuleContext,
    RuleRecord,
    judge_non_inferiority,
    paired_means,
)
from training_core.evaluation.scores import REFERENCE
from training_core.evaluation.statistics import FloatArray
from training_core.records import Verdict


def judge_guard(context: RuleContext, guard: GuardConfig) -> RuleRecord:
    """Apply one guard against the reference."""
    if isinstance(guard, NonInferiorityGuard):
        return judge_non_inferiority(
            context,
            name=guard_name(guard),
            kind=guard.kind,
            metric=guard.metric,
            baseline=REFERENCE,
            margin=guard.margin,
            higher_is_better=guard.higher_is_better,
        )
    # A higher value is the risk that these guards watch, so a missing score counts at its highest.
    candidate, baseline = paired_means(context, guard.metric, REFERENCE, higher_is_better=False)
    if isinstance(guard, RatioRangeGuard):
        return _ratio_range(context, guard, candidate, baseline)
    if isinstance(guard, MaximumGuard):
        values, limit, what = candidate, guard.maximum, "mean"
    else:
        assert isinstance(guard, MaximumIncreaseGuard)
        values, limit, what = candidate - baseline, guard.maximum_increase, "increase over the reference"
    interval = context.bootstrap(values)
    holds = interval.estimate <= limit + TOLERANCE
    return RuleRecord(
        name=guard_name(guard),
        kind=guard.kind,
        metric=guard.metric,
        baseline=REFERENCE,
        verdict=Verdict.PASS if holds else Verdict.FAIL,
        reason="" if holds else "above_maximum",
        detail=f"{what} of {guard.metric} {interval.estimate:.4g} (allowed: at most {limit:.4g})",
        candidate_mean=float(candidate.mean()),
        baseline_mean=float(baseline.mean()),
        value=interval.estimate,
        threshold=limit,
        interval=[interval.lower, interval.upper],
        interval_level=context.interval_level,
        difference=float(np.mean(candidate - baseline)),
        method=interval.method,
    )


def _ratio_range(
    context: RuleContext, guard: RatioRangeGuard, candidate: FloatArray, baseline: FloatArray
) -> RuleRecord:
    ours, theirs = float(candidate.mean()), float(baseline.mean())
    base = {
        "name": guard_name(guard),
        "kind": guard.kind,
        "metric": guard.metric,
        "baseline": REFERENCE,
        "candidate_mean": ours,
        "baseline_mean": theirs,
        "threshold": guard.maximum,
        "threshold_low": guard.minimum,
    }
    if theirs <= ZERO:
        detail = f"a ratio of {guard.metric} is undefined: the reference's mean is {theirs:.4g}, not positive"
        return RuleRecord.model_validate(
            {**base, "verdict": Verdict.ERROR, "reason": "ratio_undefined", "detail": detail}
        )
    ratio = ours / theirs
    interval = context.ratio_interval(candidate, baseline)
    too_low, too_high = ratio < guard.minimum - TOLERANCE, ratio > guard.maximum + TOLERANCE
    detail = (
        f"mean {guard.metric} {theirs:.4g} -> {ours:.4g}, ratio {ratio:.3f} "
        f"(allowed: {guard.minimum:.4g} to {guard.maximum:.4g})"
    )
    return RuleRecord.model_validate(
        {
            **base,
            "verdict": Verdict.FAIL if too_low or too_high else Verdict.PASS,
            "reason": "below_minimum" if too_low else "above_maximum" if too_high else "",
            "detail": detail,
            "value": ratio,
            "interval": [interval.lower, interval.upper],
            "interval_level": context.interval_level,
            "difference": ours - theirs,
            "method": interval.method,
        }
    )
