"""Several reward models of one stage: trained one after another, stopped anywhere, scored with their disagreement."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_rows import feedback_rows, make_context, pair_rows, write_rows

from training_core.config.rewards import RewardModelReward
from training_core.data.tables import build_pair_table
from training_core.errors import ArtifactError, ConfigurationError, PreemptedError
from training_core.loop import StepRecord
from training_core.metrics import read_metrics
from training_core.models.heads import load_reward_model, new_reward_model, num_positions, score_token_ids
from training_core.models.loading import load_tokenizer
from training_core.models.reward_ensemble import as_ensemble, load_reward_ensemble, member_directories
from training_core.protocol.digests import tree_digest
from training_core.records import StageOutcome, StopReason
from training_core.reward_modelling import members
from training_core.reward_modelling.trainer import RewardTrainer, member_seed
from training_core.rewards.base import RewardContext
from training_core.rewards.combine import RewardPart, score_answers
from training_core.rewards.model import load_reward_part
from training_core.stages import reward_model as stage

STEPS = 3
"""Of each member."""
Run = tuple[Path, StageOutcome]


@pytest.fixture(scope="module")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pairs")
    return {
        "model": tiny_checkpoint,
        "train_pairs": write_rows(folder / "train.parquet", pair_rows(24, 1)),
        "validation_pairs": write_rows(folder / "validation.parquet", pair_rows(12, 2)),
    }


def run(path: Path, inputs: dict[str, Path], num_members: int = 3, **options: Any) -> StageOutcome:
    return stage.run(make_context(path, inputs, **{"num_members": num_members, "num_epochs": 1, **options}))


@pytest.fixture(scope="module")
def finished(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "whole"
    return path, run(path, inputs)


def output_of(path: Path) -> Path:
    return path / "outputs" / "reward_model"


def test_the_first_member_is_the_model_that_one_alone_would_be(
    inputs: dict[str, Path], finished: Run, tmp_path: Path
) -> None:
    run(tmp_path, inputs, num_members=1)
    assert tree_digest(output_of(tmp_path)) == tree_digest(output_of(finished[0]) / "member_0")
    rows, of_all = (read_metrics(path / "metrics.jsonl") for path in (tmp_path, finished[0]))
    assert [{**row, "train/member": 0} for row in rows[:STEPS]] == of_all[:STEPS]


def test_members_differ_in_head_and_order_and_are_counted_in_one_row_of_steps(finished: Run) -> None:
    folders = member_directories(output_of(finished[0]))
    assert [folder.name for folder in folders] == ["member_0", "member_1", "member_2"]
    assert len({tree_digest(folder, suffix=".safetensors") for folder in folders}) == 3
    rows = read_metrics(finished[0] / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 3 * STEPS + 2))
    assert [row["train/member"] for row in rows[:-1]] == [0] * STEPS + [1] * STEPS + [2] * STEPS
    assert len({member_seed(3, member) for member in range(16)}) == 16
    # Heads and orders of the data both: what the first step sees differs.
    assert len({rows[first]["train/num_tokens"] for first in (0, STEPS, 2 * STEPS)}) > 1


def test_every_member_starts_from_a_head_of_its_own(inputs: dict[str, Path], tmp_path: Path) -> None:
    run(tmp_path, inputs, num_members=2, optimizer={"learning_rate": 0.0}, head_learning_rate=0.0)
    heads = [load_reward_model(folder).head.weight for folder in member_directories(output_of(tmp_path))]
    for member, head in enumerate(heads):
        assert torch.equal(head, new_reward_model(inputs["model"], member_seed(3, member)).head.weight)
    assert not torch.equal(*heads)


def test_the_report_is_of_the_ensemble(inputs: dict[str, Path], finished: Run, tmp_path: Path) -> None:
    path, outcome = finished
    summary, output = outcome.summary, output_of(path)
    table = build_pair_table(inputs["validation_pairs"], load_tokenizer(output), 512, tmp_path / "v.arrow")
    z, accuracies = [], []
    for folder in member_directories(output):
        model = load_reward_model(folder)
        scores = np.array(score_token_ids(model, [*table.chosen, *table.rejected], 3))
        assert (scores.mean(), scores.std()) == pytest.approx((model.score_mean, model.score_std), rel=1e-6)
        z.append((scores - scores.mean()) / scores.std())
        accuracies.append((scores[:12] > scores[12:]).mean())
    mean, spread = np.mean(z, axis=0), np.std(z, axis=0)
    assert summary["accuracy"] == (mean[:12] > mean[12:]).mean()
    assert summary["member_accuracies"] == pytest.approx(accuracies)
    assert summary["score_std"] == pytest.approx(mean.std(), rel=1e-5)
    assert summary["score_std"] < 1
    assert summary["disagreement_mean"] == pytest.approx(spread.mean(), rel=1e-5)
    assert summary["margin_mean"] == pytest.approx((mean[:12] - mean[12:]).mean(), rel=1e-5)
    stored_members = [json.loads((f / "reward_config.json").read_text()) for f in member_directories(output)]
    for name in ("chosen_rise", "rejected_fall", "accuracy_before", "chosen_mean_first"):
        assert summary[name] == pytest.approx(math.fsum(member[name] for member in stored_members) / 3)
    assert (summary["num_members"], summary["num_steps"], summary["num_train_pairs"]) == (3, 3 * STEPS, 24)
    stored = json.loads((output / "reward_config.json").read_text())
    more = {name: summary[name] for name in ("weights_sha256", "acceptance")}
    assert {**stored, **more} == summary
    assert (summary["acceptance"]["accuracy"], summary["acceptance"]["num_pairs"]) == (summary["accuracy"], 12)
    # Differences of the common score are standard deviations, not log-odds: only with a factor do they mean something.
    assert summary["acceptance"]["calibration"]["error"] is None
    assert summary["acceptance"]["calibration"]["scaled_error"] is not None


def assert_same_run(path: Path, outcome: StageOutcome, finished: Run) -> None:
    assert outcome.summary == finished[1].summary
    assert (path / "metrics.jsonl").read_bytes() == (finished[0] / "metrics.jsonl").read_bytes()
    assert tree_digest(path / "outputs") == tree_digest(finished[0] / "outputs")


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[RewardTrainer], None]) -> None:
    original = RewardTrainer.train_step

    def train_step(self: RewardTrainer, number: int) -> StepRecord:
        record = original(self, number)
        if number == step:
            act(self)
        return record

    monkeypatch.setattr(RewardTrainer, "train_step", train_step)


@pytest.mark.parametrize(
    ("how", "step"),
    [("sigterm", 1), ("sigterm", STEPS), ("sigterm", STEPS + 1), ("kill", STEPS), ("kill", 8), ("kill", 9)],
)
def test_stopped_in_any_member_it_ends_with_the_same_bits(
    inputs: dict[str, Path], finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, how: str
) -> None:
    begun: list[int] = []
    new = members.new_reward_model

    def count(*arguments: Any) -> Any:
        begun.append(1)
        return new(*arguments)

    def stop(trainer: RewardTrainer) -> None:
        if how == "kill":
            raise KeyboardInterrupt
        trainer.context.stop.requested = True

    with monkeypatch.context() as patch:
        after_step(patch, step, stop)
        patch.setattr(members, "new_reward_model", count)
        with pytest.raises(KeyboardInterrupt if how == "kill" else PreemptedError):
            run(tmp_path, inputs)
    # Whoever asks to stop does not wait for another member to be made ready.
    assert len(begun) == 1 + (step - 1) // STEPS
    assert_same_run(tmp_path, run(tmp_path, inputs), finished)


def test_killed_while_a_member_is_written_it_writes_it_again(
    inputs: dict[str, Path], finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(model: Any, source: Path, directory: Path, *rest: Any) -> None:
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("training_core.reward_modelling.members.save_reward_model", half)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, inputs)
    assert not (output_of(tmp_path) / "member_0").exists()
    assert_same_run(tmp_path, run(tmp_path, inputs), finished)


def test_a_finished_member_that_changed_is_not_built_upon(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(trainer: RewardTrainer) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        after_step(patch, STEPS + 2, die)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, inputs)
    weights = output_of(tmp_path) / "member_0" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ArtifactError, match=r"member_0 is not the finished member 0"):
        run(tmp_path, inputs)


def test_an_ensemble_of_ratings_predicts_their_mean(tiny_checkpoint: Path, tmp_path: Path) -> None:
    inputs = {
        "model": tiny_checkpoint,
        "train_feedback": write_rows(tmp_path / "train.parquet", feedback_rows(32, 1)),
        "validation_feedback": write_rows(tmp_path / "validation.parquet", feedback_rows(12, 2)),
    }
    loss = {"kind": "ordinal", "levels": [1, 2, 3, 4]}
    summary = run(tmp_path / "run", inputs, num_members=2, loss=loss, num_epochs=3).summary
    assert summary["rmse"] < summary["rmse_before"]
    assert summary["spearman"] > 0.7
    assert "accuracy" not in summary
    assert "thresholds" not in summary


def rewards_of(output: Path, policy: Path, sequences: list[list[int]], **knobs: Any) -> Any:
    config = RewardModelReward(kind="reward_model", **knobs)
    part = load_reward_part(config, output, policy, torch.device("cpu"))
    size = len(sequences)
    about = RewardContext([1] * size, [StopReason.EOS] * size, [{}] * size, max_new_tokens=8, sequences=sequences)
    return part([[]] * size, [""] * size, about)


@pytest.fixture(scope="module")
def answers(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    folder = tmp_path_factory.mktemp("answers")
    table = build_pair_table(inputs["validation_pairs"], load_tokenizer(inputs["model"]), 512, folder / "v.arrow")
    return [*table.chosen, *table.rejected]


def test_a_reward_is_the_mean_less_what_disagreement_costs(
    inputs: dict[str, Path], finished: Run, answers: list[list[int]]
) -> None:
    output, summary = output_of(finished[0]), finished[1].summary
    plain = rewards_of(output, inputs["model"], answers)
    # Normalised over just these answers.
    assert (np.mean(plain), np.std(plain)) == (pytest.approx(0.0, abs=1e-9), pytest.approx(1.0, abs=1e-9))
    raw = rewards_of(output, inputs["model"], answers, normalise=False)
    spread = np.array(raw.measures["disagreement"])
    assert spread.mean() == pytest.approx(summary["disagreement_mean"])
    assert min(spread) > 0
    assert plain.measures["disagreement"] == pytest.approx((spread / summary["score_std"]).tolist())
    penalised = rewards_of(output, inputs["model"], answers, normalise=False, disagreement_penalty=0.7)
    assert list(penalised) == pytest.approx((np.array(raw) - 0.7 * spread).tolist())
    scaled = rewards_of(output, inputs["model"], answers, disagreement_penalty=0.7)
    cost = 0.7 * np.array(plain.measures["disagreement"])
    assert list(scaled) == pytest.approx((np.array(plain) - cost).tolist())


def test_an_answer_without_a_score_has_no_disagreement(
    inputs: dict[str, Path], finished: Run, answers: list[list[int]]
) -> None:
    found = rewards_of(output_of(finished[0]), inputs["model"], [answers[0], [5] * 513], disagreement_penalty=1.0)
    assert found[0] is not None
    assert found[1] is None
    assert found.measures["disagreement"][1] is None
    part = RewardPart("taste", 1.0, lambda *arguments: found)
    about = RewardContext([1] * 2, [StopReason.EOS] * 2, [{}] * 2, max_new_tokens=8)
    metrics = score_answers([part], [[]] * 2, [""] * 2, about).metrics()
    assert metrics["reward/taste_disagreement_mean"] == found.measures["disagreement"][0]


def test_one_model_cannot_disagree(inputs: dict[str, Path], finished: Run, answers: list[list[int]]) -> None:
    member = output_of(finished[0]) / "member_1"
    with pytest.raises(ConfigurationError, match=r"reward_model\.num_members to 2 or more"):
        rewards_of(member, inputs["model"], answers, disagreement_penalty=0.1)
    alone = rewards_of(member, inputs["model"], answers)
    assert not hasattr(alone, "measures")
    model = load_reward_model(member)
    scores = as_ensemble(model).score(answers, 3)
    assert scores.disagreements == [0.0] * len(answers)
    assert alone == pytest.approx([model.normalise(score) for score in scores.means])


def test_an_ensemble_is_not_loaded_as_one_model(finished: Run, tmp_path: Path) -> None:
    output = output_of(finished[0])
    with pytest.raises(ArtifactError, match="it holds an ensemble"):
        load_reward_model(output)
    assert len(load_reward_ensemble(output).members) == 3
    assert member_directories(output / "member_2") == [output / "member_2"]
    with pytest.raises(ArtifactError, match="no reward model can be loaded"):
        load_reward_ensemble(tmp_path)
    assert num_positions(output / "member_0") == load_reward_ensemble(output).num_positions == 512
    with pytest.raises(ArtifactError, match="gives no number of positions"):
        num_positions(tmp_path)
