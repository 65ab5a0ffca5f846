"""The stage `policy` on preferences: it learns, it stops and continues to the same bits, it refuses what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from preference_data import (
    make_inputs,
    make_pairs,
    run_stage,
    taken_apart,
    write_feedback,
    write_pairs,
)
from safetensors.torch import load_file

from training_core.errors import (
    ConfigurationError,
    DataError,
    EvaluationError,
    TrainingDivergedError,
)
from training_core.metrics import read_metrics
from training_core.models.loading import load_causal_lm
from training_core.preference import stage
from training_core.preference.reference import REFERENCE_FILE
from training_core.protocol.digests import weights_digest

Run = tuple[Path, dict[str, Any]]
LN2 = math.log(2.0)


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
