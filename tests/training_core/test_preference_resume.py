"""Learning from preferences stops and continues to the same bits, and takes nothing of another training for its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preference_data import make_config, make_context, make_inputs, make_pairs, run_stage, write_pairs
from safetensors.torch import load_file, save_file

from training_core.errors import ArtifactError, PreemptedError, TrainingDivergedError
from training_core.metrics import MetricSums, read_metrics
from training_core.preference import stage
from training_core.preference.reference import REFERENCE_FILE
from training_core.preference.trainer import STATE_FILE, PreferenceTrainer, add_gradients
from training_core.protocol.digests import tree_digest
from training_core.trainer import StepRecord

Run = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_inputs(tmp_path_factory.mktemp("preferences"), tiny_checkpoint)


@pytest.fixture(scope="module")
def dpo_run(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("dpo") / "whole"
    return path, run_stage(path, inputs, "dpo", validate_every_steps=2).summary


@pytest.fixture(scope="module")
def kto_run(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("kto") / "whole"
    return path, run_stage(path, inputs, "kto", num_steps=6).summary


def after_step(patch: pytest.MonkeyPatch, step: int, act: Callable[[Any], None]) -> None:
    """Call `act(trainer)` at the end of optimizer step `step`."""
    original = PreferenceTrainer.train_step

    def train_step(self: Any, number: int) -> StepRecord:
        record = original(self, number)
        if number == step:
            act(self)
        return record

    patch.setattr(PreferenceTrainer, "train_step", train_step)


def stop(trainer: Any) -> None:
    trainer.context.stop.requested = True


def die(trainer: Any) -> None:
    raise KeyboardInterrupt


def assert_same_run(path: Path, summary: dict[str, Any], finished: Run) -> None:
    assert summary == finished[1]
    assert (path / "metrics.jsonl").read_bytes() == (finished[0] / "metrics.jsonl").read_bytes()
    assert tree_digest(path / "outputs") == tree_digest(finished[0] / "outputs")


@pytest.mark.parametrize(("step", "act", "error"), [(3, stop, PreemptedError), (4, die, KeyboardInterrupt)])
def test_dpo_continues_to_the_same_bits(
    inputs: dict[str, Path],
    dpo_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    act: Callable[[Any], None],
    error: type[BaseException],
) -> None:
    with monkeypatch.context() as patch:
        after_step(patch, step, act)
        with pytest.raises(error):
            run_stage(tmp_path, inputs, "dpo", validate_every_steps=2)
    reference = (tmp_path / REFERENCE_FILE).stat().st_mtime_ns
    assert_same_run(tmp_path, run_stage(tmp_path, inputs, "dpo", validate_every_steps=2).summary, dpo_run)
    assert (tmp_path / REFERENCE_FILE).stat().st_mtime_ns == reference


def test_kto_continues_to_the_same_bits(
    inputs: dict[str, Path], kto_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        after_step(patch, 3, stop)
        with pytest.raises(PreemptedError, match="after step 3"):
            run_stage(tmp_path, inputs, "kto", num_steps=6)
    assert_same_run(tmp_path, run_stage(tmp_path, inputs, "kto", num_steps=6).summary, kto_run)


def test_a_stop_between_micro_batches_gives_the_step_up(
    inputs: dict[str, Path], dpo_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up = PreferenceTrainer.give_up_if_stopped
    calls: list[int] = []

    def stop_in_step_four(self: Any) -> None:
        calls.append(1)
        # Two micro-batches a step: this is before the second one of step 4.
        self.context.stop.requested = len(calls) == 8
        give_up(self)

    with monkeypatch.context() as patch:
        patch.setattr(PreferenceTrainer, "give_up_if_stopped", stop_in_step_four)
        with pytest.raises(PreemptedError, match="after step 3"):
            run_stage(tmp_path, inputs, "dpo", validate_every_steps=2)
    assert_same_run(tmp_path, run_stage(tmp_path, inputs, "dpo", validate_every_steps=2).summary, dpo_run)


def test_killed_while_the_reference_is_written_leaves_no_half_file(
    inputs: dict[str, Path], dpo_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def die_there(source: str | Path, target: str | Path) -> None:
        if str(target).endswith(REFERENCE_FILE):
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die_there)
        with pytest.raises(KeyboardInterrupt):
            run_stage(tmp_path, inputs, "dpo", validate_every_steps=2)
    assert not (tmp_path / REFERENCE_FILE).exists()
    assert_same_run(tmp_path, run_stage(tmp_path, inputs, "dpo", validate_every_steps=2).summary, dpo_run)


def test_a_reference_of_other_weights_or_data_or_damaged_is_refused(
    inputs: dict[str, Path], dpo_run: Run, tmp_path: Path
) -> None:
    whole = (dpo_run[0] / REFERENCE_FILE).read_bytes()
    tensors = load_file(dpo_run[0] / REFERENCE_FILE)
    identity = {"version": "1", "autocast": "none", "reference_sha256": "1" * 64}
    save_file(tensors, tmp_path / REFERENCE_FILE, metadata=identity)
    with pytest.raises(ArtifactError, match="differs in reference_sha256, train_sha256, validation_sha256"):
        run_stage(tmp_path, inputs)
    (tmp_path / REFERENCE_FILE).write_bytes(whole[:-20])
    with pytest.raises(ArtifactError, match="cannot be read"):
        run_stage(tmp_path, inputs)
    (tmp_path / REFERENCE_FILE).write_bytes(whole)
    more = {**inputs, "train_pairs": write_pairs(tmp_path / "more.parquet", make_pairs(25, 1))}
    with pytest.raises(ArtifactError, match="differs in train_sha256"):
        run_stage(tmp_path, more)


def test_a_checkpoint_of_another_training_is_refused(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers: list[Any] = []
    after_step(monkeypatch, 1, trainers.append)
    run_stage(tmp_path / "run", inputs, num_steps=1)
    trainer, saved = trainers[0], tmp_path / "run" / "checkpoints" / "step_000001"
    assert trainer.load(saved) == 1
    for name, value in (("reference_sha256", "1" * 64), ("data_sha256", {"train": "x", "validation": "y"})):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, name, value)
            with pytest.raises(ArtifactError, match="belongs to a training by another algorithm"):
                trainer.load(saved)
    for content in ("{", "{}", "[]"):
        (saved / STATE_FILE).write_text(content)
        with pytest.raises(ArtifactError, match=r"holds no readable state\.json"):
            trainer.load(saved)


def test_a_roll_back_changes_the_learning_rate_and_the_change_is_state(
    inputs: dict[str, Path], dpo_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentinels = {"non_finite": {"action": "roll_back"}}
    config = make_config("dpo", num_steps=4, checkpoint_every_steps=1, sentinels=sentinels)
    original = PreferenceTrainer.train_step
    failed: list[int] = []

    def diverge_once(self: Any, step: int) -> StepRecord:
        if step == 3 and not failed:
            failed.append(step)
            # In the middle of the step: what is in the gradients must not reach the next one.
            add_gradients(self.objective, self.train, [0, 1], 2, MetricSums(), lambda: None)
            raise TrainingDivergedError("step 3: the loss is nan")
        return original(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(PreferenceTrainer, "train_step", diverge_once)
        after_step(patch, 3, stop)
        with pytest.raises(PreemptedError, match="after step 3"):
            stage.train(make_context(tmp_path, inputs, config), config.algorithm)
    stage.train(make_context(tmp_path, inputs, config), config.algorithm)
    rates = [row["train/learning_rate"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert rates == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4])
    same = read_metrics(dpo_run[0] / "metrics.jsonl")[2]
    assert read_metrics(tmp_path / "metrics.jsonl")[2]["policy/grad_norm"] == same["policy/grad_norm"]
    assert '"learning_rate_factor": 0.5' in (tmp_path / "checkpoints" / "step_000004" / STATE_FILE).read_text()
