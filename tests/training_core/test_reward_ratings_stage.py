"""The stage `reward_model` on judged answers, on margins, with adapters: it learns, and says what it saw."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from reward_rows import feedback_rows, make_context, pair_rows, write_rows

from training_core.data.tables import build_feedback_table
from training_core.errors import ArtifactError, DataError
from training_core.metrics import read_metrics
from training_core.models.heads import load_reward_model, score_token_ids
from training_core.models.loading import load_tokenizer
from training_core.protocol.digests import tree_digest
from training_core.records import StageOutcome
from training_core.reward_modelling.measure import warn_of_movement
from training_core.reward_modelling.ratings import LinearScale, OrdinalScale, level_indices, stored_scale
from training_core.reward_modelling.trainer import RewardTrainer
from training_core.reward_modelling.validation import RatingScores
from training_core.stages import reward_model as stage

ORDINAL = {"kind": "ordinal", "levels": [1, 2, 3, 4]}


@pytest.fixture(scope="module")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    margins = [1.0 if i % 2 else None for i in range(24)]
    return {
        "model": tiny_checkpoint,
        "train_feedback": write_rows(folder / "train_f.parquet", feedback_rows(48, 1, missing=(3, 7))),
        "validation_feedback": write_rows(folder / "validation_f.parquet", feedback_rows(16, 2, missing=(5,))),
        "train_pairs": write_rows(folder / "train_p.parquet", pair_rows(24, 3, margin=margins)),
        "validation_pairs": write_rows(folder / "validation_p.parquet", pair_rows(10, 4)),
    }


def given(inputs: dict[str, Path], *names: str) -> dict[str, Path]:
    return {name: inputs[name] for name in ("model", *names)}


RATED = ("train_feedback", "validation_feedback", "validation_pairs")


def run(path: Path, inputs: dict[str, Path], **options: Any) -> StageOutcome:
    return stage.run(make_context(path, inputs, **{"num_epochs": 4, **options}))


@pytest.mark.parametrize("loss", [{"kind": "regression"}, {"kind": "regression", "standardise": False}, ORDINAL])
def test_ratings_are_learned_and_measured_in_their_own_unit(
    inputs: dict[str, Path], tmp_path: Path, loss: dict[str, Any]
) -> None:
    summary = run(tmp_path, given(inputs, *RATED), loss=loss, dtype="float32").summary
    assert summary["rmse"] < 0.75 * summary["rmse_before"]
    assert summary["spearman"] > 0.8 > abs(summary["spearman_before"])
    # Never trained on: pairs of only good words and only bad ones.
    assert summary["accuracy"] >= 0.9
    assert (summary["num_train_rows"], summary["num_rows_without_target"]) == (46, 2)
    assert (summary["num_validation_rows"], summary["num_validation_pairs"]) == (16, 10)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert len(rows) - 1 == summary["num_steps"] == math.ceil(4 * 46 / 8)
    assert rows[-2]["train/loss"] < rows[0]["train/loss"]
    assert rows[-1]["acceptance/validation_accuracy"] == summary["accuracy"]
    assert summary["acceptance"]["calibration"]["error"] is None
    assert "train/accuracy" not in rows[0]
    # What is reported is what the saved model says.
    output = tmp_path / "outputs" / "reward_model"
    table = build_feedback_table(inputs["validation_feedback"], load_tokenizer(output), 512, tmp_path / "again.arrow")
    scores = np.array(score_token_ids(load_reward_model(output), table.ids, 3))
    ratings = table.numbers("rating")
    known = ~np.isnan(ratings)
    predicted = stored_scale(json.loads((output / "reward_config.json").read_text())).predict(scores)
    assert summary["rmse"] == pytest.approx(np.sqrt(np.mean((predicted - ratings)[known] ** 2)), rel=1e-5)
    expected = scipy.stats.spearmanr(predicted[known], ratings[known]).statistic
    assert summary["spearman"] == pytest.approx(expected, abs=1e-5)
    assert len(list((tmp_path / "tables").glob("*.arrow"))) == 3


def test_thumbs_are_learned_without_any_pairs(inputs: dict[str, Path], tmp_path: Path) -> None:
    loss = {"kind": "ordinal", "target": "label", "levels": [0, 1]}
    summary = run(tmp_path, given(inputs, "train_feedback", "validation_feedback"), loss=loss).summary
    assert summary["spearman"] > 0.7
    assert len(json.loads((tmp_path / "outputs/reward_model/reward_config.json").read_text())["thresholds"]) == 1
    assert "accuracy" not in summary
    assert "chosen_rise" not in summary
    # Nothing to compare it on: said, not refused.
    assert summary["acceptance"]["verdict"] == "inconclusive"
    assert "no validation pairs" in summary["acceptance"]["problems"][0]
    assert not any(name.startswith("acceptance/") for row in read_metrics(tmp_path / "metrics.jsonl") for name in row)


def test_thresholds_are_trained_and_saved_with_the_state(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_after_three(self: Any, step: int) -> Any:
        record = train_step(self, step)
        if step == 3:
            raise KeyboardInterrupt
        return record

    whole = run(tmp_path / "whole", given(inputs, *RATED), loss=ORDINAL)

    train_step = RewardTrainer.train_step
    with monkeypatch.context() as patch:
        patch.setattr(RewardTrainer, "train_step", stop_after_three)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "stopped", given(inputs, *RATED), loss=ORDINAL)
    again = run(tmp_path / "stopped", given(inputs, *RATED), loss=ORDINAL)
    assert again.summary == whole.summary
    assert tree_digest(tmp_path / "stopped/outputs") == tree_digest(tmp_path / "whole/outputs")
    fixed = run(tmp_path / "fixed", given(inputs, *RATED), loss=ORDINAL, head_learning_rate=0.0)
    assert fixed.summary["thresholds"] != whole.summary["thresholds"]


def test_margins_and_centring_enter_the_loss_of_a_step(inputs: dict[str, Path], tmp_path: Path) -> None:
    pairs = given(inputs, "train_pairs", "validation_pairs")
    losses = {
        "plain": {"kind": "bradley_terry"},
        "margin": {"kind": "bradley_terry", "margin": "data", "margin_scale": 4.0},
        "centring": {"kind": "bradley_terry", "centring_coefficient": 50.0},
    }
    summaries = {name: run(tmp_path / name, pairs, loss=loss, num_epochs=1).summary for name, loss in losses.items()}
    plain, margin, centring = (read_metrics(tmp_path / name / "metrics.jsonl")[0] for name in losses)
    # The first step starts from the same weights.
    assert centring["train/loss"] == pytest.approx(
        plain["train/loss"] + 50.0 * centring["train/centring_mean"], rel=1e-5
    )
    assert centring["train/centring_mean"] > 0
    present = 1.0 - margin["train/missing_margin_fraction"]
    assert 0 < present < 1
    assert margin["train/data_margin_mean"] == 4.0
    # Scores are near 0 yet: a pair without a margin costs log 2, one with it log(1 + e^4).
    expected = (1 - present) * math.log(2) + present * math.log1p(math.exp(4.0))
    assert margin["train/loss"] == pytest.approx(expected, abs=0.05)
    assert summaries["margin"]["num_pairs_without_margin"] == 12
    assert "num_pairs_without_margin" not in summaries["plain"]


def test_chosen_and_rejected_are_reported_apart(
    inputs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = given(inputs, "train_pairs", "validation_pairs")
    loss = {"kind": "bradley_terry", "centring_coefficient": 0.3}
    with caplog.at_level(logging.WARNING):
        summary = run(tmp_path, pairs, loss=loss).summary
    for field, side, sign in (("chosen_rise", "chosen", 1), ("rejected_fall", "rejected", -1)):
        moved = summary[f"{side}_score_mean"] - summary[f"{side}_score_mean_before"]
        assert summary[field] == pytest.approx(sign * moved)
        assert summary[field] > 0
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert summary["chosen_mean_first"] == rows[0]["train/chosen_score_mean"]
    assert summary["rejected_mean_last"] == rows[-2]["train/rejected_score_mean"]
    assert "answers did not" not in caplog.text


@pytest.mark.parametrize(
    ("report", "told"),
    [
        ({"chosen_rise": -0.5, "rejected_fall": 1.0}, ["chosen answers did not rise (-0.5)"]),
        ({"chosen_rise": 1.0, "rejected_fall": -0.25}, ["rejected answers did not fall (+0.25)"]),
        ({"chosen_rise": 0.0, "rejected_fall": 0.0}, ["did not rise", "did not fall"]),
        ({"chosen_rise": 1.0, "rejected_fall": 1.0}, []),
        ({}, []),
    ],
)
def test_scores_that_move_the_wrong_way_are_told(
    caplog: pytest.LogCaptureFixture, report: dict[str, float], told: list[str]
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_movement(report, "the reward model")
    assert bool(caplog.text) == bool(told)
    assert all(text in caplog.text for text in told)


def test_adapters_train_a_reward_model_that_is_saved_whole(inputs: dict[str, Path], tmp_path: Path) -> None:
    pairs = given(inputs, "train_pairs", "validation_pairs")
    options = {"lora": {"rank": 4, "alpha": 8.0}, "optimizer": {"learning_rate": 1e-2}, "dtype": "float32"}
    summary = run(tmp_path / "lora", pairs, **options).summary
    assert summary["accuracy"] > summary["accuracy_before"]
    still = run(tmp_path / "none", pairs, optimizer={"learning_rate": 0.0}, head_learning_rate=0.0, num_epochs=1)
    names = [set(load_reward_model(tmp_path / n / "outputs/reward_model").state_dict()) for n in ("lora", "none")]
    assert names[0] == names[1]
    assert summary["accuracy_before"] == still.summary["accuracy_before"]
    checkpoint = next((tmp_path / "lora/checkpoints").glob("step_*/weights.safetensors"))
    assert checkpoint.stat().st_size < (tmp_path / "lora/outputs/reward_model/model.safetensors").stat().st_size / 4


def test_ratings_need_feedback_and_a_prompt_may_not_be_on_both_sides(inputs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="train_feedback"):
        run(tmp_path / "a", given(inputs, "train_pairs", "validation_pairs"), loss=ORDINAL)
    leaked = {**given(inputs, *RATED), "validation_feedback": inputs["train_feedback"]}
    with pytest.raises(DataError, match="48 prompts are in both train_feedback and validation_feedback"):
        run(tmp_path / "b", leaked, loss=ORDINAL)


def test_scales_predict_by_hand() -> None:
    scores = np.array([-1.0, 0.0, 2.0])
    scale = LinearScale.of(np.array([1.0, 3.0]), standardise=True)
    assert scale.predict(scores).tolist() == [1.0, 2.0, 4.0]
    assert scale.to_targets(np.array([1.0, 3.0])).tolist() == [-1.0, 1.0]
    assert stored_scale(scale.to_json()) == scale
    ordinal = OrdinalScale((1.0, 5.0), (0.5,))
    high = 1.0 / (1.0 + np.exp(0.5 - scores))
    assert ordinal.predict(scores) == pytest.approx(1.0 + 4.0 * high)
    assert stored_scale(ordinal.to_json()) == ordinal
    with pytest.raises(DataError, match=r"e\.g\. 2\.5"):
        level_indices(np.array([1.0, 2.5]), [1.0, 2.0, 3.0])


def test_rank_correlation_with_ties_is_scipys_and_one_value_has_none() -> None:
    predicted, ratings = [0.3, 0.1, 0.1, 0.9, 0.5], [2.0, 1.0, 3.0, 3.0, 2.0]
    expected = scipy.stats.spearmanr(predicted, ratings).statistic
    assert RatingScores(predicted, ratings).spearman == pytest.approx(expected, abs=1e-12)
    assert RatingScores(predicted, [2.0] * 5).spearman is None
