"""Whether a trained reward model is good enough to train a policy against: better than rules that read no answer.

Each null baseline is compared with the model pair by pair on the validation pairs. The gain is the mean of what the
model gets right minus what the rule gets right; its lower bound counts prompts, not pairs. The model must beat each
rule, so the test as a whole errs no more often than the comparison with the best one (Berger 1982, Multiparameter
hypothesis testing and acceptance sampling): no correction for their number is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from training_core.config.reward_model import AcceptanceConfig
from training_core.errors import EvaluationError
from training_core.evaluation.statistics import t_interval
from training_core.records import Verdict
from training_core.reward_modelling.baselines import (
    Baseline,
    Floats,
    credits,
    null_baselines,
    reported_baselines,
)
from training_core.reward_modelling.calibration import Calibration, calibrate
from training_core.reward_modelling.validation import PairScores

logger = logging.getLogger(__name__)

METRICS = {
    "validation_accuracy": ("accuracy",),
    "best_baseline_accuracy": ("best_baseline_accuracy",),
    "gain": ("gain",),
    "gain_lower_bound": ("gain_lower_bound",),
    "calibration_error": ("calibration", "error"),
    "calibration_error_scaled": ("calibration", "scaled_error"),
}
"""Key of metrics.jsonl below acceptance/ -> where the number stands in the report."""


ROUNDING = 1e-9
"""A gain of the margin is enough, whatever a subtraction of two shares makes of it."""


@dataclass(frozen=True)
class Gain:
    """What the model gets right beyond one baseline, as a share of pairs."""

    accuracy: float
    """The baseline's."""
    gain: float
    lower_bound: float
    paired: bool
    """Compared pair by pair; else two accuracies are compared as if they were independent."""


def compare(model: Floats, baseline: Baseline, groups: Sequence[str], confidence: float) -> Gain:
    """Return the model's gain over a baseline with its one-sided lower bound.

    The bound is Student's t on the paired differences, clustered by prompt, with two further pairs of prompts of their
    own: one that only the model gets right, one that only the baseline does (Bonett and Price 2012, Adjusted Wald
    confidence interval for a difference of binomial proportions based on paired data). So a model that is right in 5 of
    5 pairs has not certainly gained anything. Where the baseline is not known by pair, the two variances are added,
    which is too wide for rules that agree.

    Args:
        model: 1, 0.5 or 0 a pair [pairs], at least one.
        baseline: on the same pairs.
        groups: prompt of each pair [pairs].
        confidence: of the bound.
    """
    clusters = np.unique(np.asarray(groups), return_inverse=True)[1]
    further = clusters.max() + np.array([1, 2])
    paired = baseline.credits is not None
    theirs = baseline.credits if baseline.credits is not None else np.full(len(model), baseline.accuracy)
    # The largest difference that a pair can have: 1 for a rule, 0.5 for a coin.
    largest = float(np.maximum(theirs, 1.0 - theirs).max())
    differences = np.concatenate([model - theirs, [largest, -largest]])
    interval = t_interval(differences, np.concatenate([clusters, further]), alpha=1.0 - confidence)
    error = float(np.hypot(interval.standard_error, 0.0 if paired else baseline.standard_error))
    reach = float(stats.t.ppf(confidence, clusters.max() + 2)) * error
    return Gain(baseline.accuracy, float(model.mean()) - baseline.accuracy, interval.estimate - reach, paired)


def assess(
    scores: PairScores,
    groups: Sequence[str],
    baselines: Sequence[Baseline],
    config: AcceptanceConfig,
    seed: int,
    *,
    log_odds: bool,
) -> dict[str, Any]:
    """Return the acceptance report (docs/stages.md).

    Args:
        scores: of the validation pairs, in their order.
        groups: prompt of each pair.
        baselines: at least one.
        config: what is asked for.
        seed: of the draws of calibrated models.
        log_odds: whether a difference of scores is meant to be the log-odds of being preferred.
    """
    model = credits(np.asarray(scores.margins))
    gains = {baseline.name: compare(model, baseline, groups, config.confidence) for baseline in baselines}
    best = max(gains, key=lambda name: gains[name].accuracy)
    report: dict[str, Any] = {
        "num_pairs": len(model),
        "num_prompts": len(set(groups)),
        "accuracy": float(model.mean()),
        "best_baseline": best,
        "best_baseline_accuracy": gains[best].accuracy,
        "gain": gains[best].gain,
        "gain_lower_bound": min(gain.lower_bound for gain in gains.values()),
        "baselines": {name: asdict(gain) for name, gain in gains.items()},
    }
    calibration = calibrate(np.asarray(scores.margins), groups, config.confidence, seed)
    problems = _problems_of_gain(report, config) + _problems_of_calibration(calibration, config)
    numbers = asdict(calibration)
    if not log_odds:
        numbers["error"] = None
    verdict = Verdict.PASS
    if problems:
        verdict = Verdict.FAIL if len(model) >= config.min_pairs else Verdict.INCONCLUSIVE
    return {"verdict": verdict.value, "problems": problems, **report, "calibration": numbers}


def _problems_of_gain(report: dict[str, Any], config: AcceptanceConfig) -> list[str]:
    reasons = []
    if report["gain"] < config.margin - ROUNDING:
        asked = f"reward_model.acceptance.margin asks for {100 * config.margin:.1f}"
        reasons.append(f"a gain of {100 * report['gain']:.1f} points, {asked}")
    if report["gain_lower_bound"] <= 0.0:
        worst = min(report["baselines"], key=lambda name: report["baselines"][name]["lower_bound"])
        bound = f"the lower bound of the gain over {worst} is {100 * report['gain_lower_bound']:.1f} points"
        reasons.append(f"random variation may explain the gain ({bound} at confidence {config.confidence:g})")
    if not reasons:
        return []
    return [
        f"it is right in {report['accuracy']:.1%} of {report['num_pairs']} validation pairs, the null baseline "
        f"{report['best_baseline']} in {report['best_baseline_accuracy']:.1%}: {', and '.join(reasons)}"
    ]


def _problems_of_calibration(calibration: Calibration, config: AcceptanceConfig) -> list[str]:
    limit, error, by_chance = config.max_calibration_error, calibration.scaled_error, calibration.chance_limit
    if limit is None or error is None or by_chance is None or error <= max(limit, by_chance):
        return []
    return [
        f"its scores do not say how sure it is: calibration error {error:.3f} after scaling, allowed "
        f"{limit:g} (reward_model.acceptance.max_calibration_error); a calibrated model stays below {by_chance:.3f}"
    ]


def accept(
    scores: PairScores | None,
    groups: Sequence[str],
    pairs: Path | None,
    reported: Path | None,
    config: AcceptanceConfig,
    seed: int,
    *,
    log_odds: bool,
) -> dict[str, Any]:
    """Return the acceptance report of a reward model; what cannot be decided is a warning in the log.

    Args:
        scores: of the validation pairs; None where there are none: then nothing can be compared.
        groups: prompt of each pair.
        pairs: the validation pairs' Parquet file, in the order of `scores`.
        reported: baselines.json of the data checks, where there is one.
        config: what is asked for.
        seed: the stage's.
        log_odds: as in `assess`.

    Raises:
        DataError: `reported` cannot be read.
    """
    if scores is None or pairs is None:
        report = _without_pairs()
    else:
        known = null_baselines(pairs)
        by_name = {baseline.name: baseline for baseline in known}
        more = [] if reported is None else reported_baselines(reported, by_name, len(groups))
        report = assess(scores, groups, [*known, *more], config, seed, log_odds=log_odds)
    if report["verdict"] == Verdict.INCONCLUSIVE:
        few = f" {report['num_pairs']} validation pairs are too few to decide ({config.min_pairs} would be enough)"
        logger.warning(
            "the reward model is not shown to be better than a null baseline: %s.%s",
            "; ".join(report["problems"]),
            few if report["num_pairs"] else "",
        )
    return report


def _without_pairs() -> dict[str, Any]:
    advice = "there are no validation pairs to compare it on. Give data.preferences beside data.feedback"
    return {"verdict": Verdict.INCONCLUSIVE.value, "problems": [advice], "num_pairs": 0}


def metrics_of(report: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of an acceptance report that go to metrics.jsonl; one that is not known is left out."""
    found = {}
    for name, keys in METRICS.items():
        value: Any = report
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found[f"acceptance/{name}"] = float(value)
    return found


def stop_or_warn(report: dict[str, Any], config: AcceptanceConfig, kept: Path) -> None:
    """Act on a report that says fail.

    Args:
        report: of `accept`.
        config: with `on_failure`.
        kept: the folder that model and report are kept in, for the message.

    Raises:
        EvaluationError: `on_failure` is stop.
    """
    if report["verdict"] != Verdict.FAIL:
        return
    problems = "; ".join(report["problems"])
    if config.on_failure == "stop":
        raise EvaluationError(
            f"the reward model is not accepted: {problems}. Nothing was trained against it; model and acceptance.json "
            f"are kept in {kept}. More or cleaner pairs help, or another learning rate or num_epochs. To use it all "
            "the same, write reward_model.acceptance.on_failure: warn"
        )
    logger.warning("the reward model is not accepted, on_failure is warn: %s", problems)
