"""The stage `reward_model`: it learns, it stops and continues to the same bits, it refuses what teaches nothing."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from pydantic import ValidationError

from training_core.config.reward_model import RewardModelConfig
from training_core.data.tables import build_pair_table
from training_core.errors import ArtifactError, DataError, EvaluationError, PreemptedError, TrainingDivergedError
from training_core.loop import StepRecord
from training_core.metrics import MetricSums, read_metrics
from training_core.models.chat import encode_conversation
from training_core.models.heads import RewardModel, load_reward_model, new_reward_model, score_token_ids
from training_core.models.loading import load_tokenizer
from training_core.ops import reward_losses
from training_core.protocol.context import StageContext
from training_core.protocol.digests import path_digest, tree_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageOutcome, StageSpec
from training_core.reward_modelling.objectives import PairObjective
from training_core.reward_modelling.trainer import STATE_FILE, RewardTrainer
from training_core.stages import reward_model as stage

GOOD = ("good", "happy", "warm", "wonderful")
BAD = ("bad", "sad", "cold", "terrible")
THINGS = ("sea", "rain", "train", "bread", "street")

Pair = tuple[str, str, str]


def make_pairs(num_pairs: int, seed: int) -> list[Pair]:
    """Return (prompt, chosen, rejected): the chosen answer uses a good word; lengths tell nothing."""
    draw = random.Random(seed)

    def answer(words: tuple[str, ...]) -> str:
        return " ".join(f"The {draw.choice(THINGS)} is {draw.choice(words)}." for _ in range(draw.randint(1, 3)))

    return [(f"Tell me about {seed} {i}.", answer(GOOD), answer(BAD)) for i in range(num_pairs)]


def write_pairs(path: Path, pairs: list[Pair]) -> Path:
    def turns(role: str, texts: list[str]) -> list[list[dict[str, str]]]:
        return [[{"role": role, "content": text}] for text in texts]

    count = len(pairs)
    table = {
        "example_id": [f"e{i}" for i in range(count)],
        "group_id": [p[0] for p in pairs],
        "prompt_messages": turns("user", [p[0] for p in pairs]),
        "chosen_messages": turns("assistant", [p[1] for p in pairs]),
        "rejected_messages": turns("assistant", [p[2] for p in pairs]),
        "margin": pyarrow.nulls(count, pyarrow.float64()),
    }
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    return path


@pytest.fixture(scope="module")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pairs")
    return {
        "model": tiny_checkpoint,
        "train_pairs": write_pairs(folder / "train.parquet", make_pairs(24, 1)),
        "validation_pairs": write_pairs(folder / "validation.parquet", make_pairs(12, 2)),
    }


def make_context(path: Path, inputs: dict[str, Path], **options: object) -> StageContext:
    values = {
        "optimizer": {"learning_rate": 1e-3},
        "batch_size": 8,
        "micro_batch_size": 4,
        "num_epochs": 2,
        "checkpoint_every_steps": 2,
        "autocast": "none",
    }
    config = RewardModelConfig.model_validate({**values, **options})
    artifacts = {name: Artifact(path=str(p), sha256=path_digest(p)) for name, p in inputs.items()}
    spec = StageSpec(
        stage="reward_model", stage_version=1, config=config.model_dump(mode="json"), inputs=artifacts, seed=3
    )
    directory = StageDirectory(path)
    directory.prepare(spec)
    return StageContext(spec, directory)


Run = tuple[Path, StageOutcome]


@pytest.fixture(scope="module")
def finished(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "whole"
    return path, stage.run(make_context(path, inputs))


def test_it_learns_an_easy_preference(finished: Run, tiny_checkpoint: Path) -> None:
    path, outcome = finished
    summary = outcome.summary
    assert summary["accuracy"] >= 0.9
    assert summary["accuracy"] > summary["accuracy_before"]
    assert summary["margin_mean"] == pytest.approx(summary["chosen_score_mean"] - summary["rejected_score_mean"])
    assert summary["margin_mean"] > 0.5
    assert (summary["num_train_pairs"], summary["num_validation_pairs"], summary["num_steps"]) == (24, 12, 6)
    model = load_reward_model(path / "outputs" / "reward_model")
    assert (model.score_mean, model.score_std) == (summary["score_mean"], summary["score_std"])
    tokenizer = load_tokenizer(path / "outputs" / "reward_model")
    unseen = [[{"role": "assistant", "content": f"The rain is {word}."}] for word in ("happy", "sad")]
    question = [{"role": "user", "content": "And?"}]
    scores = score_token_ids(model, [encode_conversation(tokenizer, question, answer)[0] for answer in unseen], 3)
    assert scores[0] > scores[1]


def test_metrics_have_one_line_a_step_and_no_clock(finished: Run) -> None:
    rows = read_metrics(finished[0] / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert rows[-2]["train/loss"] < rows[0]["train/loss"]
    # One line after the last step: what the saved model was found to be.
    assert all(name == "step" or name.startswith("acceptance/") for name in rows[-1])
    assert rows[-1]["acceptance/validation_accuracy"] == finished[1].summary["accuracy"]
    assert rows[0]["train/learning_rate"] == 1e-3
    assert not any(name.startswith("time/") for name in rows[0])
    clock = read_metrics(finished[0] / "timings.jsonl")
    assert len(clock) == 6
    assert {"time/step_seconds", "time/tokens_per_second"} <= set(clock[0])


def test_the_stored_config_holds_scale_and_self_test(finished: Run, tiny_checkpoint: Path) -> None:
    stored = json.loads((finished[0] / "outputs" / "reward_model" / "reward_config.json").read_text())
    assert stored["score_std"] > 0
    invariance = stored["batch_invariance"]
    assert invariance["max_difference_padded_left"] < invariance["max_difference_allowed"]
    assert invariance["max_difference_allowed"] == pytest.approx(0.3 * max(1.0, stored["score_std"]))
    assert stored["base_weights_sha256"] == tree_digest(tiny_checkpoint, suffix=".safetensors")
    assert stored["accuracy"] == finished[1].summary["accuracy"]


def test_a_copy_of_a_checkpoint_is_no_checkpoint(inputs: dict[str, Path], finished: Run, tmp_path: Path) -> None:
    """What lies there under another name, set aside by someone, does not stand for a training that has begun."""
    (tmp_path / "checkpoints" / "step_000010.bak").mkdir(parents=True)
    assert_same_run(tmp_path, stage.run(make_context(tmp_path, inputs)), finished)


@pytest.mark.parametrize(
    "content", ["{", "{}", '{"member": 0, "before": {"accuracy": "high"}, "finished": []}', '{"member": 0}', "[]"]
)
def test_a_damaged_state_file_is_an_artifact_error(inputs: dict[str, Path], tmp_path: Path, content: str) -> None:
    context = make_context(tmp_path, inputs)
    config = RewardModelConfig.model_validate(context.spec.config)
    trainer = make_trainer(context, config, inputs)
    (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(ArtifactError, match=r"holds no readable stage\.json"):
        trainer.load(tmp_path)


def make_trainer(context: StageContext, config: RewardModelConfig, inputs: dict[str, Path]) -> RewardTrainer:
    table = build_pair_table(
        inputs["train_pairs"], load_tokenizer(inputs["model"]), 512, context.directory.path / "t.arrow"
    )
    return RewardTrainer(context, config, new_reward_model(inputs["model"], 3), PairObjective(table, config.loss), 3)


def assert_same_run(path: Path, outcome: StageOutcome, finished: Run) -> None:
    assert outcome.summary["weights_sha256"] == finished[1].summary["weights_sha256"]
    assert outcome.summary == finished[1].summary
    assert (path / "metrics.jsonl").read_bytes() == (finished[0] / "metrics.jsonl").read_bytes()
    assert tree_digest(path / "outputs") == tree_digest(finished[0] / "outputs")


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[RewardTrainer], None]) -> None:
    """Call `act(trainer)` at the end of optimizer step `step`."""
    original = RewardTrainer.train_step

    def train_step(self: RewardTrainer, number: int) -> StepRecord:
        record = original(self, number)
        if number == step:
            act(self)
        return record

    monkeypatch.setattr(RewardTrainer, "train_step", train_step)


def test_sigterm_saves_and_the_next_attempt_ends_with_the_same_bits(
    inputs: dict[str, Path], finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        after_step(patch, 3, lambda trainer: setattr(trainer.context.stop, "requested", True))
        with pytest.raises(PreemptedError, match="after step 3"):
            stage.run(make_context(tmp_path, inputs))
    assert (tmp_path / "checkpoints" / "step_000003" / "manifest.json").exists()
    assert_same_run(tmp_path, stage.run(make_context(tmp_path, inputs)), finished)


def test_sigterm_between_micro_batches_gives_the_step_up(
    inputs: dict[str, Path], finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = RewardTrainer.backward
    calls: list[int] = []

    def stop_in_step_four(self: RewardTrainer, *arguments: Any) -> None:
        backward(self, *arguments)
        calls.append(1)
        # Two micro-batches a step: this is the first one of step 4.
        self.context.stop.requested = len(calls) == 7

    with monkeypatch.context() as patch:
        patch.setattr(RewardTrainer, "backward", stop_in_step_four)
        with pytest.raises(PreemptedError, match="after step 3"):
            stage.run(make_context(tmp_path, inputs))
    assert len(calls) == 7
    assert_same_run(tmp_path, stage.run(make_context(tmp_path, inputs)), finished)


def test_no_whole_checkpoint_is_an_error_and_not_a_new_start(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        after_step(patch, 3, lambda trainer: setattr(trainer.context.stop, "requested", True))
        with pytest.raises(PreemptedError):
            stage.run(make_context(tmp_path, inputs))
    for manifest in tmp_path.glob("checkpoints/step_*/manifest.json"):
        manifest.unlink()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ArtifactError, match="none of them is whole"):
        stage.run(make_context(tmp_path, inputs))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_killed_between_checkpoints_redoes_the_steps_to_the_same_bits(
    inputs: dict[str, Path], finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(trainer: RewardTrainer) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        after_step(patch, 6, die)
        with pytest.raises(KeyboardInterrupt):
            stage.run(make_context(tmp_path, inputs))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5
    assert_same_run(tmp_path, stage.run(make_context(tmp_path, inputs)), finished)


def test_killed_in_the_middle_of_a_checkpoint_goes_back_to_the_one_before(
    inputs: dict[str, Path], finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def die_at_step_four(source: str | Path, target: str | Path) -> None:
        if str(target).endswith("step_000004"):
            # As a kill leaves it: the half-written directory stays.
            (Path(source) / "weights.safetensors").write_bytes(b"half")
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die_at_step_four)
        with pytest.raises(KeyboardInterrupt):
            stage.run(make_context(tmp_path, inputs))
    assert not (tmp_path / "checkpoints" / "step_000004").exists()
    assert_same_run(tmp_path, stage.run(make_context(tmp_path, inputs)), finished)


def test_a_damaged_newest_checkpoint_is_passed_over(
    inputs: dict[str, Path], finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(trainer: RewardTrainer) -> None:
        newest = trainer.context.directory.checkpoints_path / "step_000004" / "exp_avg.safetensors"
        newest.write_bytes(newest.read_bytes()[:-1] + b"\x01")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        after_step(patch, 5, damage)
        with pytest.raises(KeyboardInterrupt):
            stage.run(make_context(tmp_path, inputs))
    assert_same_run(tmp_path, stage.run(make_context(tmp_path, inputs)), finished)


def gradient(inputs: dict[str, Path], path: Path, micro_batch_size: int) -> list[torch.Tensor]:
    context = make_context(path, inputs, micro_batch_size=micro_batch_size)
    config = RewardModelConfig.model_validate(context.spec.config)
    trainer = make_trainer(context, config, inputs)
    items = trainer.step_items(1)
    for batch in trainer.micro_batches(items):
        trainer.backward(batch, len(items), MetricSums())
    return [p.grad for p in trainer.model.parameters() if p.grad is not None]


def test_the_gradient_does_not_depend_on_micro_batches(inputs: dict[str, Path], tmp_path: Path) -> None:
    whole = gradient(inputs, tmp_path / "8", 8)
    for size in (1, 3):
        for ours, theirs in zip(gradient(inputs, tmp_path / str(size), size), whole, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)


def test_every_pair_is_used_once_an_epoch_and_the_last_step_takes_the_rest(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    context = make_context(tmp_path, inputs, batch_size=10, num_epochs=2)
    config = RewardModelConfig.model_validate(context.spec.config)
    trainer = make_trainer(context, config, inputs)
    steps = [trainer.step_items(step) for step in range(1, trainer.num_steps + 1)]
    assert [len(items) for items in steps] == [10, 10, 10, 10, 8]
    assert sorted(i for items in steps for i in items) == sorted([*range(24), *range(24)])


def test_bfloat16_autocast_learns_too(inputs: dict[str, Path], tmp_path: Path) -> None:
    outcome = stage.run(make_context(tmp_path, inputs, autocast="bfloat16", num_epochs=1))
    assert outcome.summary["accuracy"] > outcome.summary["accuracy_before"]


def test_learning_rate_zero_changes_no_weight(inputs: dict[str, Path], tmp_path: Path) -> None:
    options = {"optimizer": {"learning_rate": 0.0}, "head_learning_rate": 0.0, "num_epochs": 1}
    outcome = stage.run(make_context(tmp_path, inputs, dtype="float32", **options))
    assert outcome.summary["accuracy"] == outcome.summary["accuracy_before"]


def test_equal_answers_are_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    same = write_pairs(tmp_path / "same.parquet", [*make_pairs(2, 1), ("Why?", "Yes.", "Yes.")])
    with pytest.raises(DataError, match="pair 'e2' has the same tokens"):
        stage.run(make_context(tmp_path / "run", {**inputs, "train_pairs": same}))


def test_too_long_pairs_are_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    long = write_pairs(tmp_path / "long.parquet", [("Why?", "one two " * 400, "No.")])
    with pytest.raises(DataError, match="the model's limit is 512"):
        stage.run(make_context(tmp_path / "run", {**inputs, "validation_pairs": long}))


def test_a_prompt_on_both_sides_is_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    leaked = write_pairs(tmp_path / "leaked.parquet", [*make_pairs(3, 9), *make_pairs(1, 1)])
    with pytest.raises(DataError, match=r"1 prompts are in both.*Tell me about 1 0"):
        stage.run(make_context(tmp_path / "run", {**inputs, "validation_pairs": leaked}))


def test_a_broken_gradient_stops_the_training(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_losses, "logsigmoid", lambda x: torch.nn.functional.logsigmoid(x) * float("nan"))
    with pytest.raises(TrainingDivergedError, match="optimizer step 1"):
        stage.run(make_context(tmp_path, inputs))


def test_a_model_that_ignores_the_mask_is_refused_before_it_is_trained(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = RewardModel.forward
    monkeypatch.setattr(RewardModel, "forward", lambda self, ids, mask: forward(self, ids, torch.ones_like(mask)))
    with pytest.raises(EvaluationError, match="scores depend on the batch"):
        stage.run(make_context(tmp_path, inputs))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_micro_batch_larger_than_batch_is_refused() -> None:
    with pytest.raises(ValidationError, match="must not be larger than batch_size"):
        RewardModelConfig.model_validate({"optimizer": {"learning_rate": 1e-5}, "batch_size": 2, "micro_batch_size": 4})
