"""Several parts: scales, bounds, missing scores and their causes, and the state of a run."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from training_core.config.reward_parts import FixedScale, RunningScale
from training_core.config.rewards import RewardConfig, RuleConfig, check_plain_metrics
from training_core.records import Message, StopReason
from training_core.registries import REWARD_RULES
from training_core.rewards.base import Cause, MeasuredScores, RewardContext, Scores
from training_core.rewards.combine import CombinedScores, RewardPart, reward_part, score_answers
from training_core.rewards.scaling import RewardState

CONFIGS: TypeAdapter[Any] = TypeAdapter(RewardConfig)
RUNNING = RunningScale(kind="running")
Values = list[float | None]


def part(name: str, scores: Values, weight: float = 1.0, **knobs: Any) -> RewardPart:
    return RewardPart(name, weight, lambda prompts, answers, context: scores, **knobs)


def combine(parts: list[RewardPart], size: int, *state: RewardState) -> Any:
    context = RewardContext([1] * size, [StopReason.EOS] * size, [{}] * size, max_new_tokens=4)
    return score_answers(parts, [[Message(role="user", content="?")]] * size, ["x"] * size, context, *state)


def scored(parts: list[RewardPart], size: int) -> CombinedScores:
    found = combine(parts, size)
    assert isinstance(found, CombinedScores)
    return found


def test_zero_is_a_score_and_none_is_not() -> None:
    found = scored([part("a", [0.0, None])], 2)
    assert found.totals == [0.0, None]
    assert found.metrics()["reward/a_mean"] == 0.0
    assert found.metrics()["reward/a_missing_fraction"] == 0.5


@pytest.mark.parametrize(
    ("on_missing", "expected"), [("missing", [3.0, None, None, None]), ("skip", [3.0, 1.0, None, None])]
)
def test_what_a_missing_part_does(on_missing: Literal["missing", "skip"], expected: Values) -> None:
    """Weights stay as they are; the other part may not be skipped; no part at all is no score."""
    parts = [part("a", [1.0, 1.0, None, None]), part("b", [1.0, None, 1.0, None], 2.0, on_missing=on_missing)]
    assert scored(parts, 4).totals == expected


def test_an_answer_with_all_parts_skipped_has_no_score() -> None:
    parts = [part("a", [None, 0.0], on_missing="skip"), part("b", [None, None], on_missing="skip")]
    assert scored(parts, 2).totals == [None, 0.0]


def test_fractions_by_cause() -> None:
    a = Scores([1.0, None, None, None], [None, Cause.TIMEOUT, Cause.UNREADABLE_REFERENCE, Cause.NO_REFERENCE])
    b = Scores([None, None, 2.0, 2.0], [Cause.ERROR, Cause.ERROR, None, None])
    metrics = scored([part("a", a), part("b", b), part("plain", [1.0, None, 1.0, 1.0])], 4).metrics()
    assert metrics["reward/a_missing_fraction"] == 0.75
    assert metrics["reward/a_timeout_fraction"] == 0.25
    assert metrics["reward/a_error_fraction"] == 0.0
    assert metrics["reward/a_unreadable_reference_fraction"] == 0.25
    assert metrics["reward/b_error_fraction"] == 0.5
    assert metrics["reward/error_fraction"] == 0.5  # Answers, not parts: both parts failed on the second one.
    assert metrics["reward/plain_missing_fraction"] == 0.25
    assert "reward/plain_error_fraction" not in metrics


def test_without_causes_nothing_is_an_error() -> None:
    assert scored([part("a", [None, 1.0])], 2).metrics()["reward/error_fraction"] == 0.0


def test_causes_must_fit_scores() -> None:
    with pytest.raises(ValueError, match="1 causes"):
        Scores([1.0, None], [None])
    with pytest.raises(ValueError, match="has a cause"):
        Scores([1.0], [Cause.ERROR])


def test_scale_then_bound_then_weight() -> None:
    scale = FixedScale(kind="fixed", mean=10.0, std=5.0)
    found = scored([part("a", [10.0, 15.0, 40.0, None], 3.0, scale=scale, clip=2.0)], 4)
    assert found.totals == [0.0, 3.0, 6.0, None]
    assert found.scaled == {"a": [0.0, 1.0, 2.0, None]}
    assert found.parts["a"] == [10.0, 15.0, 40.0, None]
    assert found.metrics()["reward/a_mean"] == pytest.approx(65 / 3)
    assert found.metrics()["reward/a_scaled_mean"] == 1.0


def test_a_running_scale_includes_the_steps_own_scores() -> None:
    steps: list[Values] = [[1.0, 2.0, None], [6.0, 3.0, 0.0]]
    state, seen = RewardState(), []
    for values in steps:
        before = state.model_copy(deep=True)
        found, after = combine([part("a", values, scale=RUNNING)], 3, state)
        assert state == before  # The given state is not changed.
        seen += [value for value in values if value is not None]
        mean, std = statistics.fmean(seen), statistics.stdev(seen)
        assert found.totals == pytest.approx([None if v is None else (v - mean) / std for v in values])
        state = RewardState.model_validate_json(json.dumps(after.model_dump(mode="json")))
        assert state == after
    assert state.moments["a"].count == 5


@pytest.mark.parametrize("values", [[0.7] * 8, [0.7]])
def test_a_running_scale_of_equal_scores_only_centres(values: Values) -> None:
    found, state = combine([part("a", values, scale=RUNNING)], len(values), RewardState())
    assert found.totals == [0.0] * len(values)
    found, _ = combine([part("a", [None], scale=RUNNING)], 1, state)
    assert found.totals == [None]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12), st.integers(0, 12))
def test_moments_do_not_depend_on_the_split(values: list[float], cut: int) -> None:
    state = RewardState()
    for piece in (values[:cut], values[cut:]):
        _, state = combine([part("a", list(piece), scale=RUNNING)], len(piece), state)
    _, whole = combine([part("a", list(values), scale=RUNNING)], len(values), RewardState())
    assert state.moments["a"].mean == pytest.approx(whole.moments["a"].mean, rel=1e-9, abs=1e-9)
    assert state.moments["a"].m2 == pytest.approx(whole.moments["a"].m2, rel=1e-9, abs=1e-9)


def test_parts_without_a_running_scale_leave_the_state_alone() -> None:
    state = combine([part("a", [1.0], scale=RUNNING)], 1, RewardState())[1]
    assert combine([part("b", [1.0])], 1, state)[1] == state


def test_a_running_scale_without_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match="give the state"):
        combine([part("a", [1.0], scale=RUNNING)], 1)


def test_a_part_has_what_its_config_says() -> None:
    knobs = {"weight": -2.0, "name": "own", "scale": {"kind": "running"}, "clip": 3.0, "on_missing": "skip"}
    config = CONFIGS.validate_python({"kind": "sentiment", **knobs})
    found = reward_part(config, len)  # type: ignore[arg-type]
    assert found == RewardPart("own", -2.0, len, RUNNING, 3.0, "skip")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"kind": "sentiment", "scale": {"kind": "fixed", "std": 0.0}}, "greater than 0"),
        ({"kind": "sentiment", "clip": 0.0}, "greater than 0"),
        ({"kind": "reward_model", "scale": {"kind": "running"}}, "scale twice"),
    ],
)
def test_bad_configs_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        CONFIGS.validate_python(config)


@pytest.mark.parametrize(
    "knob", [{"weight": 2.0}, {"clip": 1.0}, {"scale": {"kind": "running"}}, {"on_missing": "skip"}]
)
def test_a_metric_sets_nothing_that_only_a_sum_reads(knob: dict[str, Any]) -> None:
    rules: TypeAdapter[Any] = TypeAdapter(list[RuleConfig])
    assert check_plain_metrics(rules.validate_python([{"kind": "sentiment", "name": "mood"}]))
    with pytest.raises(ValueError, match=rf"metric 0 \(sentiment\) sets {next(iter(knob))}"):
        check_plain_metrics(rules.validate_python([{"kind": "sentiment", **knob}]))


def test_a_custom_function_may_say_why_scores_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom_reward_with_causes.py").write_text(
        "from training_core.rewards.base import Cause, Scores\n"
        "def score(prompts, answers, context):\n"
        "    return Scores([None, 1.0], [Cause.TIMEOUT, None])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = CONFIGS.validate_python({"kind": "custom", "import_path": "custom_reward_with_causes:score"})
    metrics = scored([reward_part(config, REWARD_RULES["custom"](config))], 2).metrics()
    assert metrics["reward/custom_timeout_fraction"] == 0.5
    assert metrics["reward/error_fraction"] == 0.5


def test_rounds_join_to_one_batch() -> None:
    def batch(scores: Values, causes: list[Cause | None], spread: Values) -> CombinedScores:
        function = MeasuredScores(scores, {"disagreement": spread})
        parts = [part("a", Scores(scores, causes), clip=1.0), part("model", function)]
        return scored(parts, len(scores))

    first = batch([3.0, None], [None, Cause.ERROR], [0.5, None])
    second = batch([0.0], [None], [1.5])
    whole = batch([3.0, None, 0.0], [None, Cause.ERROR, None], [0.5, None, 1.5])
    assert CombinedScores.joined([first, second]) == whole
    assert CombinedScores.joined([first, second]).metrics() == whole.metrics()
    assert whole.metrics()["reward/model_disagreement_mean"] == 1.0
    assert whole.metrics()["reward/error_fraction"] == pytest.approx(1 / 3)


def test_a_yardstick_is_scaled_by_moments_that_it_does_not_join() -> None:
    _, state = combine([part("a", [0.0, 2.0], scale=RUNNING)], 2, RewardState())
    context = RewardContext([1], [StopReason.EOS], [{}], max_new_tokens=4)
    found, after = score_answers([part("a", [3.0], scale=RUNNING)], [[]], ["x"], context, state, update=False)
    assert after == state
    assert found.totals == pytest.approx([2.0 / 2**0.5])
