"""Checks inside a step, and sentinels as functions of the metrics so far: limits, windows, bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from training_core.config.sentinels import SentinelsConfig
from training_core.errors import ArtifactError, EvaluationError, TrainingDivergedError, WeightVersionError
from training_core.sentinels import (
    CHECKS,
    History,
    check_any_score,
    check_finite_loss,
    check_reference_is_start,
    check_sampler_agrees,
    unreported,
    watch,
)
from training_core.sentinels.history import num_last_rows
from training_core.sentinels.watch import METRICS


@pytest.mark.parametrize("kl", [0.11, math.inf, math.nan])
def test_a_disagreement_with_the_sampler_stops_and_so_does_no_number(kl: float) -> None:
    check_sampler_agrees(0.1, 0.1, step=3)
    with pytest.raises(WeightVersionError, match="step 3"):
        check_sampler_agrees(kl, 0.1, step=3)


@pytest.mark.parametrize("kl", [2e-3, math.inf, math.nan])
def test_a_start_away_from_the_reference_stops_and_so_does_no_number(kl: float) -> None:
    check_reference_is_start(1e-3, step=1)
    with pytest.raises(ArtifactError, match="must be 0"):
        check_reference_is_start(kl, step=1)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_stops(loss: float) -> None:
    check_finite_loss(1e30, step=2)
    with pytest.raises(TrainingDivergedError, match="step 2"):
        check_finite_loss(loss, step=2)


def test_a_step_without_any_score_stops() -> None:
    check_any_score(3, 4, step=1)
    with pytest.raises(EvaluationError, match="none of the 4 answers"):
        check_any_score(4, 4, step=1)


def config_of(**sentinels: Any) -> SentinelsConfig:
    return SentinelsConfig.model_validate(sentinels)


def rows_of(**metrics: Sequence[float | None]) -> list[dict[str, float]]:
    """Return rows of steps 1, 2, ...; `a__b` stands for the metric a/b, None for a step that does not report it."""
    length = max(map(len, metrics.values()))
    rows: list[dict[str, float]] = []
    for i in range(length):
        present = {name.replace("__", "/"): values[i] for name, values in metrics.items() if values[i] is not None}
        rows.append({"step": i + 1, **present})  # type: ignore[dict-item]
    return rows


def alarm_steps(config: SentinelsConfig, rows: list[dict[str, float]], since_step: int = 0) -> list[int]:
    """Return the steps at which anything alarms."""
    return [step for step in range(1, len(rows) + 1) if watch(config, rows[:step], step, since_step=since_step)]


def test_a_value_at_the_limit_is_within_it() -> None:
    rows = rows_of(policy__grad_norm=[10.0, 10.000001])
    (alarm,) = watch(SentinelsConfig(), rows, 2)
    assert (alarm.name, alarm.action, alarm.step, alarm.value, alarm.limit) == ("grad_norm", "warn", 2, 10.000001, 10.0)
    assert alarm.message.startswith("policy/grad_norm is 10, above 10. Lower optimizer.learning_rate")
    assert alarm_steps(SentinelsConfig(), rows) == [2]


def test_patience_asks_for_steps_in_a_row_and_a_step_without_the_metric_breaks_the_row() -> None:
    config = config_of(truncation={"patience_steps": 3})
    high = [0.9, 0.9, 0.1, 0.9, 0.9, 0.9, 0.9, None, 0.9, 0.9]
    assert alarm_steps(config, rows_of(rollout__truncated_fraction=high)) == [6, 7]


def test_steps_at_the_start_and_before_a_roll_back_do_not_count() -> None:
    rows = rows_of(rollout__truncated_fraction=[0.9] * 8)
    assert alarm_steps(config_of(truncation={"patience_steps": 2}), rows) == [2, 3, 4, 5, 6, 7, 8]
    assert alarm_steps(config_of(truncation={"patience_steps": 2, "after_step": 3}), rows) == [5, 6, 7, 8]
    assert alarm_steps(config_of(truncation={"patience_steps": 2}), rows, since_step=5) == [7, 8]


def test_reward_errors_reads_the_larger_share() -> None:
    """A part that may be skipped and always fails leaves every answer a score."""
    rows = rows_of(reward__missing_fraction=[0.0, 0.2, 0.0, 0.0], reward__error_fraction=[0.0, 0.0, 0.3, None])
    assert alarm_steps(SentinelsConfig(), rows) == [2, 3]
    (alarm,) = watch(SentinelsConfig(), rows[:3], 3)
    assert (alarm.name, alarm.value) == ("reward_errors", 0.3)
    assert "the larger of reward/missing_fraction and reward/error_fraction is 0.3, above 0.1" in alarm.message
    # Beyond the limit at both steps, each time by another of the two.
    assert alarm_steps(config_of(reward_errors={"patience_steps": 2}), rows) == [3]


def test_reward_stalled_compares_windows() -> None:
    config = config_of(reward_stalled={"window_steps": 3})
    assert alarm_steps(config, rows_of(reward__mean=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])) == []
    # One step is no window; a first comparison is with what there is.
    assert alarm_steps(config, rows_of(reward__mean=[0.5] * 6)) == [4, 5, 6]
    # Noise in single steps is no alarm while the windows rise: by 0.033, 0.117 and 0.1.
    noisy = rows_of(reward__mean=[0.1, 0.0, 0.2, 0.2, 0.1, 0.3])
    assert alarm_steps(config, noisy) == []
    assert alarm_steps(config_of(reward_stalled={"window_steps": 3, "min_improvement": 0.11}), noisy) == [4, 6]


def test_reward_stalled_after_ten_steps_by_default() -> None:
    assert alarm_steps(SentinelsConfig(), rows_of(reward__mean=[0.5] * 12)) == [11, 12]


def test_a_kl_budget_without_limits_is_silent_and_each_limit_counts() -> None:
    rows = rows_of(kl__policy_ref_nats=[5.0], kl__policy_ref_answer_nats=[50.0])
    assert watch(SentinelsConfig(), rows, 1) == []
    for limits, value in (
        ({"limit_nats_per_token": 1.0}, 5.0),
        ({"limit_nats_per_answer": 1.0}, 50.0),
        ({"limit_nats_per_token": 9.0, "limit_nats_per_answer": 1.0}, 50.0),
    ):
        (alarm,) = watch(config_of(kl_budget=limits), rows, 1)
        assert (alarm.name, alarm.action, alarm.value) == ("kl_budget", "stop", value)


def test_length_drift_is_a_ratio_to_the_first_steps() -> None:
    config = config_of(length_drift={"num_first_steps": 2, "patience_steps": 1, "limit_ratio": 2.0})
    lengths = [10.0, 30.0, 40.0, 40.1, 10.0, 9.9]
    rows = rows_of(rollout__length_mean_tokens=lengths)
    assert alarm_steps(config, rows) == [4, 6]
    (long,), (short,) = watch(config, rows[:4], 4), watch(config, rows, 6)
    assert (long.limit, short.limit) == (2.0, 0.5)
    assert (long.value, short.value) == (pytest.approx(2.005), pytest.approx(0.495))
    assert "longer by more" in long.message
    assert "shorter by more" in short.message
    # A start without any token has no ratio.
    assert alarm_steps(config, rows_of(rollout__length_mean_tokens=[0.0, 0.0, 5.0])) == []
    # Both ways in turn is no drift.
    patient = config_of(length_drift={"num_first_steps": 2, "patience_steps": 2})
    assert alarm_steps(patient, rows_of(rollout__length_mean_tokens=[20.0, 20.0, 50.0, 5.0, 50.0, 50.0])) == [6]


@pytest.mark.parametrize(
    ("proxy", "gold", "is_alarm"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0], True),
        ([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 0.5, 0.5, 0.5], True),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], False),
        ([6.0, 5.0, 4.0, 3.0, 2.0, 1.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0], False),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0] * 6, False),
        # Noise: the difference of means is below two standard errors.
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0, 9.0, 5.0, 4.0, 8.0, 0.0], False),
        # Too few values of the gold part to know their spread.
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [6.0, None, None, None, None, 1.0], False),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [6.0, None, 6.0, 1.0, None, 1.0], True),
    ],
)
def test_reward_up_gold_down(proxy: list[float], gold: list[float | None], is_alarm: bool) -> None:
    config = config_of(proxy_up_gold_down={"gold": "truth", "window_steps": 6})
    alarms = watch(config, rows_of(reward__mean=proxy, reward__truth_mean=gold), 6)
    assert [alarm.name for alarm in alarms] == ["proxy_up_gold_down"] * is_alarm
    assert watch(SentinelsConfig(), rows_of(reward__mean=proxy, reward__truth_mean=gold), 6) == []


@pytest.mark.parametrize(
    "sentinels",
    [
        {"non_finite": {"action": "off"}},
        {"non_finite": {"action": "warn"}},
        {"grad_norm": {"limit": 0.0}},
        {"grad_norm": {"action": "explode"}},
        {"entropy_floor": {"limit_nats": 2.0}, "entropy_ceiling": {"limit_nats": 1.0}},
        {"roll_back": {"learning_rate_factor": 1.0, "kl_coefficient_factor": 1.0}},
        {"roll_back": {"max_times": 0}},
        {"proxy_up_gold_down": {"gold": "Not a name"}},
        {"unknown": {}},
    ],
)
def test_configs_that_are_refused(sentinels: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        config_of(**sentinels)


def test_may_roll_back_sees_every_sentinel() -> None:
    assert not SentinelsConfig().may_roll_back
    for name in (*CHECKS, "non_finite"):
        assert config_of(**{name: {"action": "roll_back"}}).may_roll_back


def test_unreported_names_what_is_read_and_not_there() -> None:
    config = config_of(
        proxy_up_gold_down={"gold": "truth"}, kl_budget={"limit_nats_per_token": 1.0}, truncation={"action": "off"}
    )
    others = ["kl/policy_ref_nats", "reward/truth_mean", "reward/missing_fraction", "reward/error_fraction"]
    everything = dict.fromkeys([*METRICS.values(), *others], 0.0)
    assert unreported(config, everything) == {}
    assert unreported(config, {"reward/mean": 0.0})["proxy_up_gold_down"] == "reward/truth_mean"
    assert "truncation" not in unreported(config, {})
    assert "kl_budget" not in unreported(SentinelsConfig(), {})


VALUES = st.one_of(st.none(), st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0, 20.0]))
WATCHED = {
    "grad_norm": {"limit": 2.0, "patience_steps": 2},
    "reward_stalled": {"window_steps": 3},
    "kl_budget": {"limit_nats_per_token": 0.6, "limit_nats_per_answer": 0.9, "patience_steps": 4},
    "length_drift": {"num_first_steps": 3, "patience_steps": 2},
    "truncation": {"patience_steps": 5, "limit_fraction": 0.4},
    "proxy_up_gold_down": {"gold": "truth", "window_steps": 5, "min_standard_errors": 0.0},
}
READ = ("policy/grad_norm", "reward/mean", "reward/truth_mean", "kl/policy_ref_nats", "kl/policy_ref_answer_nats")
LENGTHS = ("rollout/length_mean_tokens", "rollout/truncated_fraction")


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[VALUES] * len(READ + LENGTHS)), min_size=1, max_size=16), st.integers(0, 6))
def test_a_bounded_history_says_what_the_whole_one_says(table: list[tuple[float | None, ...]], since_step: int) -> None:
    config = config_of(**WATCHED)
    history, rows = History.for_sentinels(config), []
    for step, values in enumerate(table, start=1):
        row = {name: value for name, value in zip(READ + LENGTHS, values, strict=True) if value is not None}
        rows.append({"step": step, **row})
        history.append(rows[-1])
        whole = watch(config, rows, step, since_step=since_step)
        assert watch(config, history.rows(), step, since_step=since_step) == whole
        # A resumed run reads the rows again.
        assert watch(config, History.for_sentinels(config, rows).rows(), step, since_step=since_step) == whole


def test_a_long_run_keeps_a_bounded_history() -> None:
    config = SentinelsConfig()
    history = History.for_sentinels(config)
    for step in range(1, 5000):
        history.append({"step": step, "reward/mean": 0.0})
    assert len(history.rows()) == config.length_drift.num_first_steps + num_last_rows(config) == 25
    assert [row["step"] for row in history.rows()][:6] == [1, 2, 3, 4, 5, 4980]
