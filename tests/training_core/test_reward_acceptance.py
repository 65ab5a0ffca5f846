"""When a reward model is good enough: gains over null baselines, calibration, and what the stage does about it."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from reward_rows import make_context, pair_rows, turn, write_rows
from scipy import stats

from training_core.config.reward_model import AcceptanceConfig, RewardModelConfig
from training_core.errors import DataError, EvaluationError
from training_core.metrics import read_metrics
from training_core.protocol.digests import tree_digest
from training_core.reward_modelling.acceptance import accept, assess, compare
from training_core.reward_modelling.baselines import (
    Baseline,
    answer_characters,
    credits,
    null_baselines,
    reported_baselines,
)
from training_core.reward_modelling.validation import PairScores
from training_core.stages import reward_model as stage


def rule(values: np.ndarray, name: str = "longest") -> Baseline:
    return Baseline(name, float(values.mean()), values)


def prompts(num: int) -> list[str]:
    return [f"prompt {i}" for i in range(num)]


def scores(margins: np.ndarray) -> PairScores:
    return PairScores(list(margins), [0.0] * len(margins))


def judge(margins: np.ndarray, theirs: np.ndarray, **options: Any) -> dict[str, Any]:
    config = AcceptanceConfig.model_validate(options)
    return assess(scores(margins), prompts(len(margins)), [rule(theirs)], config, 3, log_odds=True)


# Baselines


def test_lengths_are_characters_of_all_messages_joined_by_line_breaks() -> None:
    rows = [[("assistant", "né"), ("assistant", "abc")], [], None, [("assistant", "🙂")]]
    kind = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]))
    column = pyarrow.array([None if row is None else [{"role": r, "content": c} for r, c in row] for row in rows], kind)
    assert answer_characters(column).tolist() == [len("né\nabc"), 0, 0, 1]
    assert answer_characters(column.slice(3)).tolist() == [1]


def test_longest_shortest_and_random_over_the_rows_of_a_file(tmp_path: Path) -> None:
    rows = pair_rows(40, 5)
    for row, (chosen, rejected) in zip(rows, [("aaa", "bb"), ("a", "bb"), ("aa", "bb"), ("aa", "b")] * 10, strict=True):
        row["chosen_messages"], row["rejected_messages"] = turn("assistant", chosen), turn("assistant", rejected)
    found = {baseline.name: baseline for baseline in null_baselines(write_rows(tmp_path / "pairs.parquet", rows))}
    assert {name: baseline.accuracy for name, baseline in found.items()} == {
        "longest": 0.625,
        "shortest": 0.375,
        "random": 0.5,
    }
    assert found["longest"].credits is not None
    assert found["longest"].credits.tolist() == [1.0, 0.0, 0.5, 1.0] * 10


REPORT = {
    "unit": "share",
    "validation_num_pairs": 40,
    "validation_num_prompts": 40,
    "validation_best_name": "shortcut_probe",
    "validation_best_accuracy": 0.8,
    "validation_best_standard_error": 0.06,
    "validation_longest_accuracy": 0.625,
    "validation_longest_standard_error": 0.07,
    "validation_shortcut_probe_accuracy": 0.8,
    "validation_shortcut_probe_standard_error": 0.06,
    "validation_most_markdown_accuracy": None,
    "validation_most_markdown_standard_error": None,
    "train_shortcut_probe_accuracy": 0.99,
}


def test_of_the_data_checks_report_comes_what_is_not_known_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "baselines.json"
    path.write_text(json.dumps(REPORT))
    known = {"longest": Baseline("longest", 0.625, np.zeros(40))}
    assert reported_baselines(path, known, 40) == [Baseline("shortcut_probe", 0.8, None, 0.06)]
    assert caplog.text == ""
    # Of other pairs (a sample) they may differ; of the same ones they may not.
    path.write_text(json.dumps({**REPORT, "validation_longest_accuracy": 0.6}))
    reported_baselines(path, known, 41)
    assert caplog.text == ""
    reported_baselines(path, known, 40)
    assert "accuracy of 0.6000 on 40 validation pairs, here it is 0.6250" in caplog.text
    path.write_text("{}")
    assert reported_baselines(path, known, 40) == []


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"train_longest_accuracy": 0.5}', json.dumps({**REPORT, "validation_shortcut_probe_accuracy": "x"})],
)
def test_a_report_that_is_none_is_a_data_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "baselines.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"baselines\.json.*[Rr]un the data checks again"):
        reported_baselines(path, {}, 40)


# Gains


def test_the_bound_is_students_t_with_one_pair_more_for_and_one_against() -> None:
    draw = np.random.default_rng(0)
    model, theirs = (draw.integers(0, 2, 50).astype(float) for _ in range(2))
    gain = compare(model, rule(theirs), prompts(50), 0.95)
    values = np.concatenate([model - theirs, [1.0, -1.0]])
    expected = values.mean() - stats.t.ppf(0.95, 51) * values.std(ddof=1) / np.sqrt(52)
    assert gain.gain == pytest.approx(model.mean() - theirs.mean())
    assert gain.lower_bound == pytest.approx(expected)
    # Prompts count, not pairs: the same pairs five times over are no more certain.
    again = compare(np.repeat(model, 5), rule(np.repeat(theirs, 5)), prompts(50) * 5, 0.95)
    assert again.lower_bound < gain.gain
    of_prompts = compare(np.repeat(model, 5), rule(np.repeat(theirs, 5)), list(np.repeat(prompts(50), 5)), 0.95)
    as_if_independent = compare(np.repeat(model, 5), rule(np.repeat(theirs, 5)), prompts(250), 0.95)
    assert of_prompts.lower_bound == pytest.approx(gain.lower_bound, abs=0.03)
    assert as_if_independent.lower_bound > of_prompts.lower_bound + 0.04


def test_a_rule_known_by_its_accuracy_alone_adds_its_variance() -> None:
    model = np.array([1.0] * 70 + [0.0] * 30)
    certain = compare(model, Baseline("probe", 0.55, None, 0.0), prompts(100), 0.95)
    unsure = compare(model, Baseline("probe", 0.55, None, 0.05), prompts(100), 0.95)
    assert (certain.paired, unsure.paired) == (False, False)
    assert certain.gain == unsure.gain == pytest.approx(0.15)
    assert 0.0 < certain.lower_bound < certain.gain
    assert unsure.lower_bound < 0.06 < certain.lower_bound


def test_few_pairs_prove_nothing_and_many_do() -> None:
    """All right against a coin: a standard error of 0 must not be taken for certainty."""
    bounds = [compare(np.ones(num), rule(np.full(num, 0.5)), prompts(num), 0.95).lower_bound for num in (2, 4, 20, 200)]
    assert bounds == sorted(bounds)
    assert bounds[0] < 0 < bounds[2] < bounds[3] < 0.5
    assert bounds[3] == pytest.approx(0.5, abs=0.02)


def test_a_model_that_is_no_better_passes_no_more_often_than_said() -> None:
    draw = np.random.default_rng(1)
    for num in (10, 50, 200):
        passed = 0
        for _ in range(400):
            model, theirs = (draw.random(num) < 0.6 for _ in range(2))
            passed += compare(model.astype(float), rule(theirs.astype(float)), prompts(num), 0.95).lower_bound > 0
        assert passed / 400 <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)


# Verdicts


def pairs_right(num: int, share: float) -> np.ndarray:
    """Return margins of which `share` are right; how far apart they are says how sure that is."""
    right = np.zeros(num, bool)
    right[: round(num * share)] = True
    random.Random(num).shuffle(values := list(right))
    size = np.log(share / (1 - share)) if 0.5 < share < 1.0 else 0.5
    return np.where(values, size, -size)


LENGTH = np.array([1.0, 0.0] * 150)


def test_a_model_that_beats_every_rule_passes() -> None:
    report = judge(pairs_right(300, 0.8), LENGTH)
    assert (report["verdict"], report["problems"]) == ("pass", [])
    assert report["gain"] == pytest.approx(0.3)
    assert 0.15 < report["gain_lower_bound"] < 0.3
    assert (report["best_baseline"], report["num_pairs"], report["num_prompts"]) == ("longest", 300, 300)


@pytest.mark.parametrize(
    ("share", "options", "told"),
    [
        (0.51, {"margin": 0.02}, "a gain of 1.0 points, reward_model.acceptance.margin asks for 2.0"),
        (0.53, {"margin": 0.02}, "random variation may explain the gain (the lower bound of the gain over longest is"),
        (0.70, {"margin": 0.25}, "a gain of 20.0 points, reward_model.acceptance.margin asks for 25.0"),
        (0.40, {}, "right in 40.0% of 300 validation pairs, the null baseline longest in 50.0%"),
    ],
)
def test_what_is_not_shown_fails_and_says_what_is_missing(share: float, options: dict[str, Any], told: str) -> None:
    report = judge(pairs_right(300, share), LENGTH, **options)
    assert report["verdict"] == "fail"
    assert len(report["problems"]) == 1
    assert told in report["problems"][0]


def test_a_gain_of_exactly_the_margin_is_enough() -> None:
    right = np.array([1.0] * 174 + [-1.0] * 126)
    theirs = np.array([1.0] * 168 + [0.0] * 132)
    report = judge(right, theirs, margin=0.02, max_calibration_error=None)
    assert report["gain"] < 0.02  # By rounding.
    assert (report["verdict"], report["problems"]) == ("pass", [])


def test_every_rule_must_be_beaten_not_only_the_best() -> None:
    margins = pairs_right(300, 0.7)
    rules = [Baseline("probe", 0.5, None, 0.2), rule(LENGTH)]
    report = assess(scores(margins), prompts(300), rules, AcceptanceConfig(), 3, log_odds=True)
    assert report["verdict"] == "fail"
    assert "gain over probe" in report["problems"][0]


def test_too_few_pairs_decide_nothing_against_a_model() -> None:
    bad = -np.ones(40)
    assert judge(bad, np.ones(40), min_pairs=40)["verdict"] == "fail"
    assert judge(bad, np.ones(40), min_pairs=41)["verdict"] == "inconclusive"
    # What few pairs do show, they show.
    assert judge(np.ones(40), np.array([1.0, 0.0] * 20), min_pairs=200)["verdict"] == "pass"
    assert judge(np.ones(4), np.array([1.0, 0.0] * 2), min_pairs=200)["verdict"] == "inconclusive"


def test_a_model_that_is_surest_where_it_is_wrong_fails() -> None:
    """No factor repairs it: near pairs are all right, far ones are guessed."""
    near, far = np.full(500, 0.1), np.array([4.0, -4.0] * 250)
    margins = np.random.default_rng(0).permutation(np.concatenate([near, far]))
    length = np.array([1.0, 0.0] * 500)
    report = judge(margins, length)
    assert report["verdict"] == "fail"
    assert "its scores do not say how sure it is: calibration error 0." in report["problems"][0]
    assert report["calibration"]["scaled_error"] > 0.1
    assert judge(margins, length, max_calibration_error=None)["verdict"] == "pass"
    assert judge(margins, length, max_calibration_error=0.9)["verdict"] == "pass"


# The stage


@pytest.fixture(scope="module")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "baselines.json").write_text(json.dumps({**REPORT, "validation_shortcut_probe_accuracy": 0.4}))
    return {
        "model": tiny_checkpoint,
        "train_pairs": write_rows(folder / "train.parquet", pair_rows(24, 1)),
        "validation_pairs": write_rows(folder / "validation.parquet", pair_rows(40, 2)),
        "baselines": folder / "baselines.json",
    }


def test_the_stage_reports_it_everywhere(
    inputs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = stage.run(make_context(tmp_path, inputs))
    report = outcome.summary["acceptance"]
    assert report == json.loads((tmp_path / outcome.outputs["acceptance.json"]).read_text())
    assert set(report["baselines"]) == {"longest", "shortest", "random", "shortcut_probe"}
    assert report["baselines"]["longest"]["paired"]
    assert not report["baselines"]["shortcut_probe"]["paired"]
    assert (report["accuracy"], report["num_pairs"]) == (outcome.summary["accuracy"], 40)
    assert (report["verdict"], report["problems"]) == ("pass", [])
    assert report["calibration"]["error"] is not None
    row = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert row == {
        "step": outcome.summary["num_steps"] + 1,
        "acceptance/validation_accuracy": report["accuracy"],
        "acceptance/best_baseline_accuracy": report["best_baseline_accuracy"],
        "acceptance/gain": report["gain"],
        "acceptance/gain_lower_bound": report["gain_lower_bound"],
        "acceptance/calibration_error": report["calibration"]["error"],
        "acceptance/calibration_error_scaled": report["calibration"]["scaled_error"],
    }
    assert "null baseline shortcut_probe" not in caplog.text


UNTRAINED = {"optimizer": {"learning_rate": 0.0}, "head_learning_rate": 0.0, "num_epochs": 1}


def test_a_model_that_fails_ends_the_stage_and_is_kept_and_gives_the_same_bits_again(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    stop = {**UNTRAINED, "acceptance": {"min_pairs": 40, "margin": 0.45}}
    digests = []
    for _ in range(2):  # The second attempt goes on from the last checkpoint, and says the same.
        with pytest.raises(EvaluationError, match=r"not accepted: it is right in .* kept in .*on_failure: warn"):
            stage.run(make_context(tmp_path / "stop", inputs, **stop))
        digests.append(tree_digest(tmp_path / "stop" / "outputs"))
        assert len(read_metrics(tmp_path / "stop" / "metrics.jsonl")) == 4
    assert digests[0] == digests[1]
    kept = tmp_path / "stop" / "outputs"
    assert json.loads((kept / "acceptance.json").read_text())["verdict"] == "fail"
    assert (kept / "reward_model" / "model.safetensors").is_file()


def test_warn_goes_on_with_the_very_same_model(
    inputs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn = {"min_pairs": 40, "margin": 0.45, "on_failure": "warn"}
    with caplog.at_level(logging.WARNING):
        warned = stage.run(make_context(tmp_path / "warn", inputs, **UNTRAINED, acceptance=warn)).summary
    assert "the reward model is not accepted, on_failure is warn" in caplog.text
    caplog.clear()
    few = stage.run(make_context(tmp_path / "few", inputs, **UNTRAINED, acceptance={"margin": 0.45})).summary
    assert "40 validation pairs are too few to decide (200 would be enough)" in caplog.text
    assert (warned["acceptance"]["verdict"], few["acceptance"]["verdict"]) == ("fail", "inconclusive")
    assert warned["weights_sha256"] == few["weights_sha256"]
    without = {name: path for name, path in inputs.items() if name != "baselines"}
    less = stage.run(make_context(tmp_path / "less", without, **UNTRAINED)).summary
    assert set(less["acceptance"]["baselines"]) == {"longest", "shortest", "random"}
    assert less["weights_sha256"] == few["weights_sha256"]


def test_without_pairs_nothing_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    report = accept(None, [], None, None, AcceptanceConfig(), 0, log_odds=False)
    assert (report["verdict"], report["num_pairs"]) == ("inconclusive", 0)
    assert "there are no validation pairs" in caplog.text
    assert "too few" not in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        *({"margin": 0.5}, {"margin": -0.1}, {"confidence": 0.5}, {"confidence": 1.0}, {"min_pairs": 1}),
        *({"max_calibration_error": 0.0}, {"on_failure": "ignore"}, {"enabled": True}),
    ],
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RewardModelConfig.model_validate({"optimizer": {"learning_rate": 1e-5}, "acceptance": wrong})


def test_ties_are_half_right() -> None:
    assert credits(np.array([3.0, 0.0, -1.0])).tolist() == [1.0, 0.5, 0.0]
