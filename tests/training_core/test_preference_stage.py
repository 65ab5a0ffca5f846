"""The stage `policy` on preferences: it learns, it stops and continues to the same bits, it refuses what is wrong."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from preference_data import (
    make_config,
    make_context,
    make_pairs,
    run_stage,
    taken_apart,
    write_feedback,
    write_pairs,
)
from safetensors.torch import load_file, save_file

from training_core.errors import (
    ArtifactError,
    ConfigurationError,
    DataError,
    EvaluationError,
    PreemptedError,
    TrainingDivergedError,
)
from training_core.metrics import read_metrics
from training_core.models.loading import load_causal_lm
from training_core.preference import stage
from training_core.preference.reference import REFERENCE_FILE
from training_core.preference.trainer import STATE_FILE, PreferenceTrainer
from training_core.protocol.digests import tree_digest, weights_digest
from training_core.trainer import StepRecord

Run = tuple[Path, dict[str, Any]]
LN2 = math.log(2.0)


@pytest.fixture(scope="module")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("preferences")
    return {
        "model": tiny_checkpoint,
        "train_pairs": write_pairs(folder / "train.parquet", make_pairs(24, 1)),
        "validation_pairs": write_pairs(folder / "validation.parquet", make_pairs(12, 2)),
    }


@pytest.fixture(scope="module")
def dpo_run(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("dpo") / "whole"
    return path, run_stage(path, inputs, "dpo", validate_every_steps=2).summary


@pytest.fixture(scope="module")
def kto_run(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("kto") / "whole"
    return path, run_stage(path, inputs, "kto", num_steps=6).summary


@pytest.mark.parametrize(
    ("options", "loss_before"),
    [
        ({"loss": {"kind": "sigmoid", "label_smoothing": 0.1}}, LN2),
        ({"loss": {"kind": "sigmoid", "length_normalised": True, "beta": 2.0}}, LN2),
        ({"loss": {"kind": "robust", "label_smoothing": 0.1}}, LN2),
        ({"loss": {"kind": "ipo"}}, 25.0),
        ({"loss": {"kind": "ipo", "length_normalised": True, "beta": 0.5}}, 1.0),
        ({"loss": {"kind": "hinge"}}, 1.0),
        ({"loss": {"kind": "simpo"}}, None),
        ({"sft_weight": 0.2}, None),
        ({"autocast": "bfloat16"}, LN2),
        ({"loss": {"kind": "custom", "import_path": "preference_data:squared", "parameters": {"target": 5.0}}}, 25.0),
    ],
)
def test_every_loss_learns(
    inputs: dict[str, Path], tmp_path: Path, options: dict[str, Any], loss_before: float | None
) -> None:
    summary = run_stage(tmp_path, inputs, "dpo", **options).summary
    assert summary["accuracy"] >= 0.9
    assert summary["margin_mean"] > summary["margin_mean_before"]
    assert summary["validation_loss"] < summary["validation_loss_before"]
    if loss_before is not None:
        assert (summary["accuracy_before"], summary["margin_mean_before"]) == (0.5, 0.0)
        assert summary["validation_loss_before"] == pytest.approx(loss_before, rel=1e-14)


def test_adapters_learn_and_leave_the_rest_as_it_was(inputs: dict[str, Path], tmp_path: Path) -> None:
    options = {"lora": {"rank": 8, "target_modules": ["q_proj", "down_proj"]}, "optimizer": {"learning_rate": 5e-3}}
    summary = run_stage(tmp_path, inputs, "dpo", **options).summary
    assert summary["accuracy"] >= 0.9
    assert summary["validation_loss_before"] == pytest.approx(LN2, rel=1e-14)
    before, after = (load_file(path / "model.safetensors") for path in (inputs["model"], tmp_path / "outputs/policy"))
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "down_proj"}
    assert before.keys() == after.keys()


def test_gradient_checkpointing_gives_the_same_policy(
    inputs: dict[str, Path], dpo_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recompute, layers = stage.recompute_layers, []
    monkeypatch.setattr(stage, "recompute_layers", lambda model: layers.append(recompute(model)))
    summary = run_stage(tmp_path, inputs, "dpo", validate_every_steps=2, gradient_checkpointing=True).summary
    assert layers == [2]
    assert summary == dpo_run[1]


def test_dpo_starts_at_ln_2_and_ends_with_a_better_policy(dpo_run: Run, inputs: dict[str, Path]) -> None:
    path, summary = dpo_run
    assert summary["validation_loss_before"] == summary["loss_first"] == LN2
    assert (summary["num_train_items"], summary["num_validation_items"], summary["num_steps"]) == (24, 12, 6)
    assert summary["accuracy"] >= 0.9
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["reference_weights_sha256"] == weights_digest(inputs["model"])
    assert summary["weights_sha256"] == weights_digest(path / "outputs" / "policy")
    assert load_causal_lm(path / "outputs" / "policy").dtype == torch.float32


def test_metrics_of_a_step(dpo_run: Run) -> None:
    rows = read_metrics(dpo_run[0] / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    first = {key: rows[0][key] for key in rows[0] if key.startswith("rewards/")}
    # To rounding: the first step's answers meet in other batches than when the reference was computed.
    assert set(first) == {f"rewards/{name}" for name in ("accuracy", "chosen_mean", "rejected_mean", "margin_mean")}
    assert all(abs(value) < 1e-5 for name, value in first.items() if name != "rewards/accuracy")
    assert rows[-1]["rewards/chosen_mean"] - rows[-1]["rewards/rejected_mean"] == pytest.approx(
        rows[-1]["rewards/margin_mean"]
    )
    assert rows[-1]["logprobs/chosen_mean_nats"] < 0 < rows[-1]["policy/grad_norm"]
    assert rows[0]["train/learning_rate"] == 1e-3
    assert rows[0]["train/num_tokens"] > 8 * 2 * 10
    assert [row["step"] for row in rows if "validation/loss" in row] == [2, 4, 6]
    assert rows[-1]["validation/accuracy"] == dpo_run[1]["accuracy"]
    assert {"time/step_seconds", "time/tokens_per_second"} <= set(read_metrics(dpo_run[0] / "timings.jsonl")[0])


def test_kto_learns_from_pairs_taken_apart_and_from_the_same_rows_as_feedback(
    inputs: dict[str, Path], kto_run: Run, tmp_path: Path
) -> None:
    path, summary = kto_run
    assert summary["accuracy"] >= 0.9
    assert summary["margin_mean"] > 0.5
    assert summary["validation_loss_before"] == 0.5
    assert (summary["num_train_items"], summary["num_validation_items"]) == (48, 24)
    feedback = {
        "model": inputs["model"],
        "train_feedback": write_feedback(tmp_path / "a.parquet", taken_apart(make_pairs(24, 1))),
        "validation_feedback": write_feedback(tmp_path / "b.parquet", taken_apart(make_pairs(12, 2))),
    }
    other = run_stage(tmp_path / "run", feedback, "kto", num_steps=6).summary
    assert other == summary
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (path / "metrics.jsonl").read_bytes()
    rows = read_metrics(path / "metrics.jsonl")
    assert max(row["kl/baseline_nats"] for row in rows) > 0


def test_feedback_without_a_label_is_left_out(
    inputs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [(p, a, label if i % 3 else None) for i, (p, a, label) in enumerate(taken_apart(make_pairs(9, 1)))]
    files = {"model": inputs["model"], "validation_pairs": inputs["validation_pairs"]}
    some = {**files, "train_feedback": write_feedback(tmp_path / "some.parquet", rows)}
    assert run_stage(tmp_path / "some", some, "kto", num_steps=1).summary["num_train_items"] == 12
    assert "6 of 18 rows have no label" in caplog.text
    none = {**files, "train_feedback": write_feedback(tmp_path / "none.parquet", [(*row[:2], None) for row in rows])}
    with pytest.raises(DataError, match="none of the 18 feedback rows has a label"):
        run_stage(tmp_path / "none", none, "kto")


def test_kto_needs_two_prompts(inputs: dict[str, Path], tmp_path: Path) -> None:
    rows = [("Why?", answer, True) for answer in ("Yes.", "No.")]
    files = {**inputs, "train_feedback": write_feedback(tmp_path / "one.parquet", rows)}
    with pytest.raises(DataError, match="all 2 answers belong to one prompt"):
        run_stage(tmp_path / "run", files, "kto")


def test_simpo_computes_no_reference(inputs: dict[str, Path], dpo_run: Run, tmp_path: Path) -> None:
    run_stage(tmp_path, inputs, "dpo", loss={"kind": "simpo"}, num_steps=1)
    assert not (tmp_path / REFERENCE_FILE).exists()
    assert (dpo_run[0] / REFERENCE_FILE).exists()


def test_a_loss_of_ones_own_may_do_without_a_reference_and_must_return_one_value_a_pair(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    alone = {"kind": "custom", "import_path": "preference_data:likelier", "uses_reference": False}
    assert run_stage(tmp_path / "a", inputs, loss=alone).summary["accuracy"] >= 0.9
    assert not (tmp_path / "a" / REFERENCE_FILE).exists()
    with pytest.raises(EvaluationError, match=r"returned \(\); it must be a tensor with one value a pair, \(4,\)"):
        run_stage(tmp_path / "b", inputs, loss={"kind": "custom", "import_path": "preference_data:mean_of_pairs"})
    with pytest.raises(ConfigurationError, match="preference loss: import_path"):
        run_stage(tmp_path / "c", inputs, loss={"kind": "custom", "import_path": "preference_data:nothing"})


def test_limits_on_steps(inputs: dict[str, Path], tmp_path: Path) -> None:
    assert run_stage(tmp_path / "a", inputs, "dpo", num_steps=2).summary["num_steps"] == 2
    assert run_stage(tmp_path / "b", inputs, "dpo", num_steps=99, batch_size=20).summary["num_steps"] == 3
    schedule = {"kind": "constant", "warmup_steps": 5}
    with pytest.raises(ConfigurationError, match="warmup_steps is 5"):
        run_stage(tmp_path / "c", inputs, num_steps=4, optimizer={"learning_rate": 1e-3, "schedule": schedule})


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
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from training_core.config.sentinels import SentinelsConfig

    config = make_config("dpo", num_steps=4, checkpoint_every_steps=1)
    original = PreferenceTrainer.train_step
    failed: list[int] = []

    def diverge_once(self: Any, step: int) -> StepRecord:
        if step == 3 and not failed:
            failed.append(step)
            raise TrainingDivergedError("step 3: the loss is nan")
        return original(self, step)

    sentinels = SentinelsConfig.model_validate({"non_finite": {"action": "roll_back"}})
    with monkeypatch.context() as patch:
        patch.setattr(PreferenceTrainer, "train_step", diverge_once)
        after_step(patch, 3, stop)
        with pytest.raises(PreemptedError, match="after step 3"):
            stage.train(make_context(tmp_path, inputs, config), config.algorithm, sentinels)
    stage.train(make_context(tmp_path, inputs, config), config.algorithm, sentinels)
    rates = [row["train/learning_rate"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert rates == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4])
    assert '"learning_rate_factor": 0.5' in (tmp_path / "checkpoints" / "step_000004" / STATE_FILE).read_text()


def test_a_loss_that_is_not_finite_changes_no_weight(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.PairObjective, "losses", broken(stage.PairObjective.losses))
    with pytest.raises(TrainingDivergedError, match="step 1: the loss is nan"):
        run_stage(tmp_path, inputs)


def broken(losses: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def not_a_number(self: Any, split: Any, indices: Any, shared: Any, sums: Any) -> torch.Tensor:
        values = losses(self, split, indices, shared, sums)
        if values.requires_grad:
            sums.add("train/loss", float("nan"), 1)
        return values

    return not_a_number


def test_learning_rate_zero_saves_the_bytes_of_the_checkpoint(inputs: dict[str, Path], tmp_path: Path) -> None:
    summary = run_stage(tmp_path, inputs, optimizer={"learning_rate": 0.0}, num_steps=1).summary
    assert summary["weights_sha256"] == summary["reference_weights_sha256"]
    assert (summary["accuracy"], summary["margin_mean"]) == (0.5, 0.0)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_data_that_teach_nothing_are_refused(inputs: dict[str, Path], tmp_path: Path, name: str) -> None:
    same = write_pairs(tmp_path / "same.parquet", [*make_pairs(2, 1), ("Why?", "Yes.", "Yes.")])
    with pytest.raises(DataError, match="pair 'e2' has the same tokens"):
        run_stage(tmp_path / "a", {**inputs, "train_pairs": same}, name)
    long = write_pairs(tmp_path / "long.parquet", [("Why?", "one two " * 400, "No.")])
    with pytest.raises(DataError, match="the model's limit is 512"):
        run_stage(tmp_path / "b", {**inputs, "validation_pairs": long}, name)
    leaked = write_pairs(tmp_path / "leaked.parquet", [*make_pairs(3, 9), *make_pairs(1, 1)])
    with pytest.raises(DataError, match=r"1 prompts are in both.*Tell me about 1 0"):
        run_stage(tmp_path / "c", {**inputs, "validation_pairs": leaked}, name)
