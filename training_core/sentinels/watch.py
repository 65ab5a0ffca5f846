"""The sentinels as pure functions of the metrics so far."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from training_core.config import sentinels as config_of
from training_core.config.sentinels import PatientSentinel, Sentinel, SentinelsConfig
from training_core.sentinels.alarms import Alarm
from training_core.sentinels.history import Row, View

REWARD = "reward/mean"
KL_PER_TOKEN = "kl/policy_ref_nats"
KL_PER_ANSWER = "kl/policy_ref_answer_nats"
ENTROPY = "policy/entropy_nats"
LENGTH = "rollout/length_mean_tokens"
WITHOUT_SCORE, WITH_ERROR = "reward/missing_fraction", "reward/error_fraction"
LARGER_OF_BOTH = f"the larger of {WITHOUT_SCORE} and {WITH_ERROR}"


@dataclass(frozen=True)
class Finding:
    """What a sentinel saw."""

    message: str
    value: float
    limit: float


Check = Callable[..., Finding | None]


def watch(config: SentinelsConfig, history: Sequence[Row], step: int, *, since_step: int = 0) -> list[Alarm]:
    """Return the alarms of step `step`, in the order of the config's fields.

    `non_finite` is not among them: the trainer raises before there are metrics, and the loop looks at the others.

    Args:
        config: the sentinels.
        history: rows of metrics.jsonl (`step` and metrics) up to `step`, in order. Only the first few and the newest
            are read; `History` keeps just those.
        step: the step that has been done, from 1.
        since_step: the step that the last roll-back went back to. Windows that must be beyond a limit hold only later
            steps, or the alarm that was dealt with would be raised again at once.

    >>> rows = [{"step": 1, "policy/grad_norm": 12.5}]
    >>> [(alarm.name, alarm.action, alarm.limit) for alarm in watch(SentinelsConfig(), rows, 1)]
    [('grad_norm', 'warn', 10.0)]
    """
    alarms = []
    for name, check in CHECKS.items():
        sentinel: Sentinel = getattr(config, name)
        if sentinel.action == "off" or step <= sentinel.after_step:
            continue
        finding = check(sentinel, View(history, step, max(since_step, sentinel.after_step)))
        if finding is not None:
            alarms.append(Alarm(name, sentinel.action, step, finding.message, finding.value, finding.limit))
    return alarms


def unreported(config: SentinelsConfig, metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the watching sentinels whose metric is not among `metrics`, with the metrics that they read."""
    missing = {}
    for name in CHECKS:
        read = metrics_read(config, name)
        absent = [metric for metric in read if metric not in metrics]
        if getattr(config, name).action != "off" and absent:
            missing[name] = ", ".join(absent)
    return missing


def metrics_read(config: SentinelsConfig, name: str) -> list[str]:
    """Return the metrics that sentinel `name` reads; none when it lacks the limit or name that turns it on."""
    if name == "kl_budget":
        budget = config.kl_budget
        limits = {KL_PER_TOKEN: budget.limit_nats_per_token, KL_PER_ANSWER: budget.limit_nats_per_answer}
        return [metric for metric, limit in limits.items() if limit is not None]
    if name == "proxy_up_gold_down":
        gold = config.proxy_up_gold_down.gold
        return [REWARD, gold_metric(gold)] if gold else []
    if name == "reward_errors":
        return [WITHOUT_SCORE, WITH_ERROR]
    return [METRICS[name]]


def gold_metric(gold: str) -> str:
    return f"reward/{gold}_mean"


def above(view: View, sentinel: PatientSentinel, metric: str, limit: float, advice: str) -> Finding | None:
    """Find a metric above `limit` at each of the last steps that the sentinel waits for."""
    return _beyond(view, sentinel, metric, lambda value: value > limit, f"above {limit:g}", limit, advice)


def below(view: View, sentinel: PatientSentinel, metric: str, limit: float, advice: str) -> Finding | None:
    """Find a metric below `limit` at each of the last steps that the sentinel waits for."""
    return _beyond(view, sentinel, metric, lambda value: value < limit, f"below {limit:g}", limit, advice)


def _beyond(
    view: View,
    sentinel: PatientSentinel,
    metric: str,
    is_beyond: Callable[[float], bool],
    words: str,
    limit: float,
    advice: str,
) -> Finding | None:
    num_steps = sentinel.patience_steps
    values = view.last(metric, num_steps)
    if not view.is_full(num_steps) or len(values) < num_steps or not all(map(is_beyond, values)):
        return None
    times = f" for {num_steps} steps" if num_steps > 1 else ""
    return Finding(f"{metric} is {values[-1]:.6g}, {words}{times}. {advice}", values[-1], limit)


def grad_norm(sentinel: config_of.GradNormSentinel, view: View) -> Finding | None:
    advice = "Lower optimizer.learning_rate, or look at the samples and rewards of this step"
    return above(view, sentinel, METRICS["grad_norm"], sentinel.limit, advice)


def reward_stalled(sentinel: config_of.RewardStalledSentinel, view: View) -> Finding | None:
    window = sentinel.window_steps
    newer, older = view.last(REWARD, window), view.last(REWARD, window, before=window)
    if not view.is_full(window) or not newer or not older:
        return None
    gain, limit = statistics.fmean(newer) - statistics.fmean(older), sentinel.min_improvement
    if gain > limit:
        return None
    message = (
        f"{REWARD} over the last {window} steps is {statistics.fmean(newer):.6g}, over the steps before "
        f"{statistics.fmean(older):.6g}. Look at the spread of scores within groups (rollout/"
        "zero_variance_group_fraction), the learning rate and the samples; or training is done"
    )
    return Finding(message, gain, limit)


def kl_budget(sentinel: config_of.KlBudgetSentinel, view: View) -> Finding | None:
    advice = "Raise the KL coefficient, or train for fewer steps"
    per_token, per_answer = sentinel.limit_nats_per_token, sentinel.limit_nats_per_answer
    found = None if per_token is None else above(view, sentinel, KL_PER_TOKEN, per_token, advice)
    if found is None and per_answer is not None:
        found = above(view, sentinel, KL_PER_ANSWER, per_answer, advice)
    return found


def entropy_floor(sentinel: config_of.EntropyFloorSentinel, view: View) -> Finding | None:
    advice = "Lower the learning rate, raise the KL coefficient or the upper clip bound, or add an entropy bonus"
    return below(view, sentinel, ENTROPY, sentinel.limit_nats, advice)


def entropy_ceiling(sentinel: config_of.EntropyCeilingSentinel, view: View) -> Finding | None:
    advice = "Lower the learning rate or the entropy bonus, or raise the KL coefficient"
    return above(view, sentinel, ENTROPY, sentinel.limit_nats, advice)


def clip_fraction(sentinel: config_of.ClipFractionSentinel, view: View) -> Finding | None:
    advice = "Lower the learning rate or the number of updates a rollout, or widen the clip range"
    return above(view, sentinel, METRICS["clip_fraction"], sentinel.limit_fraction, advice)


def zero_variance_groups(sentinel: config_of.ZeroVarianceSentinel, view: View) -> Finding | None:
    advice = "Use prompts that are neither solved nor hopeless, larger groups, or rewards with finer steps"
    return above(view, sentinel, METRICS["zero_variance_groups"], sentinel.limit_fraction, advice)


def truncation(sentinel: config_of.TruncationSentinel, view: View) -> Finding | None:
    advice = "Raise rollout.max_new_tokens, or add a reward that asks for shorter answers"
    return above(view, sentinel, METRICS["truncation"], sentinel.limit_fraction, advice)


def length_drift(sentinel: config_of.LengthDriftSentinel, view: View) -> Finding | None:
    num_steps, num_first = sentinel.patience_steps, sentinel.num_first_steps
    first, values = view.first(LENGTH, num_first), view.last(LENGTH, num_steps)
    if view.step - num_steps < max(view.start, num_first) or len(values) < num_steps or not any(first):
        return None  # Nothing to compare with, or not yet. Nor is there a ratio to a length of zero.
    start, limit = statistics.fmean(first), sentinel.limit_ratio
    is_long, is_short = all(v > start * limit for v in values), all(v * limit < start for v in values)
    if not is_long and not is_short:
        return None
    message = (
        f"{LENGTH} is {values[-1]:.6g}, at the start it was {start:.6g}: {'longer' if is_long else 'shorter'} by more "
        f"than a factor of {limit:g} for {num_steps} step(s). Read samples.jsonl: the reward may pay for length"
    )
    return Finding(message, values[-1] / start, limit if is_long else 1.0 / limit)


def reward_errors(sentinel: config_of.RewardErrorsSentinel, view: View) -> Finding | None:
    """A part that may be skipped leaves the answer its score when it fails, so answers without one are not enough."""
    advice = "Look in the log for what the rewards say about these answers"
    largest = view.with_largest((WITHOUT_SCORE, WITH_ERROR), LARGER_OF_BOTH)
    return above(largest, sentinel, LARGER_OF_BOTH, sentinel.limit_fraction, advice)


def sampler_mismatch(sentinel: config_of.SamplerMismatchSentinel, view: View) -> Finding | None:
    values = view.last(METRICS["sampler_mismatch"], 1)
    if not values or not values[0] > sentinel.limit_nats:
        return None
    message = (
        f"{METRICS['sampler_mismatch']} is {values[0]:.6g}, above {sentinel.limit_nats:g}: the engine samples with "
        "other weights or another temperature than the trainer assumes. Use rollout.dtype float32 to rule out rounding"
    )
    return Finding(message, values[0], sentinel.limit_nats)


def proxy_up_gold_down(sentinel: config_of.ProxyUpGoldDownSentinel, view: View) -> Finding | None:
    window = sentinel.window_steps
    if sentinel.gold is None or not view.is_full(window):
        return None
    gold = gold_metric(sentinel.gold)
    proxy_change, gold_change = (_clear_change(sentinel, view, metric) for metric in (REWARD, gold))
    if proxy_change <= 0.0 or gold_change >= 0.0:
        return None
    message = (
        f"over the last {window} steps {REWARD} rose by {proxy_change:.6g} while {gold} fell by {-gold_change:.6g}: "
        "the reward is being exploited. Raise the KL coefficient, repair the reward, or take an earlier checkpoint"
    )
    return Finding(message, gold_change, 0.0)


def _clear_change(sentinel: config_of.ProxyUpGoldDownSentinel, view: View, metric: str) -> float:
    """Return by how much a metric's mean changed from the older to the newer half of the window; 0 when not clearly."""
    half = sentinel.window_steps // 2
    newer = view.last(metric, half)
    older = view.last(metric, sentinel.window_steps - half, before=half)
    if len(newer) < 2 or len(older) < 2:
        return 0.0
    change = statistics.fmean(newer) - statistics.fmean(older)
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in (newer, older)))
    return change if abs(change) > sentinel.min_standard_errors * error else 0.0


METRICS = {
    "grad_norm": "policy/grad_norm",
    "reward_stalled": REWARD,
    "entropy_floor": ENTROPY,
    "entropy_ceiling": ENTROPY,
    "clip_fraction": "policy/clip_fraction",
    "zero_variance_groups": "rollout/zero_variance_group_fraction",
    "truncation": "rollout/truncated_fraction",
    "length_drift": LENGTH,
    "sampler_mismatch": "rollout/sampler_trainer_kl_nats",
}
"""The metric of each sentinel that reads a single fixed one."""

CHECKS: dict[str, Check] = {
    "grad_norm": grad_norm,
    "reward_stalled": reward_stalled,
    "kl_budget": kl_budget,
    "entropy_floor": entropy_floor,
    "entropy_ceiling": entropy_ceiling,
    "clip_fraction": clip_fraction,
    "zero_variance_groups": zero_variance_groups,
    "truncation": truncation,
    "length_drift": length_drift,
    "reward_errors": reward_errors,
    "sampler_mismatch": sampler_mismatch,
    "proxy_up_gold_down": proxy_up_gold_down,
}
