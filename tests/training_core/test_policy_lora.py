"""Adapters through the whole policy stage: KL 0 at the start, one model in memory, merged output, exact resume."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_tasks import build_small_checkpoint, reward, small_config
from transformers import PreTrainedModel

from training_core.metrics import read_metrics
from training_core.models.loading import load_causal_lm
from training_core.models.lora import is_lora
from training_core.protocol.digests import weights_digest
from training_core.rl.trainer import PolicyTrainer

LORA = {"rank": 8}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"lora": LORA, "kl": {"placement": "loss", "coefficient": 0.01}},
    "ppo": {
        "name": "ppo",
        "lora": LORA,
        "critic": {"initialise_from": "policy", "optimizer": {"learning_rate": 1e-2}, "lora": {"rank": 4}},
        "kl": {"placement": "reward", "coefficient": 0.01},
        "num_epochs": 2,
    },
}


@pytest.fixture(scope="module")
def model(rl_stage: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that prefers low ids already; from random weights adapters learned nothing on this task."""
    path = tmp_path_factory.mktemp("trained")
    rl_stage.run(path / "stage", build_small_checkpoint(path / "model"), small_config(rl_stage, num_steps=5))
    return path / "stage" / "outputs" / "policy"


def config_of(rl_stage: Any, case: str, **others: Any) -> dict[str, Any]:
    values = {"optimizer": {"learning_rate": 2e-2}, "num_steps": 6, **CASES[case], **others}
    return small_config(rl_stage, reward("high_ids"), **values)


@pytest.mark.parametrize("case", list(CASES))
def test_it_learns_what_the_checkpoint_does_not_do(model: Path, rl_stage: Any, tmp_path: Path, case: str) -> None:
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    summary = rl_stage.run(tmp_path, model, config_of(rl_stage, case))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [rows[0][name] for name in ("kl/policy_ref_nats", "kl/policy_ref_k1_nats")] == [0.0, 0.0]
    assert rows[1]["kl/policy_ref_nats"] > 0.0
    assert rows[0]["reward/mean"] < 0.25
    assert rows[-1]["reward/mean"] > 0.4
    # The engine samples with the merged weights, training with the adapters beside: to rounding the same.
    assert max(row["rollout/sampler_trainer_kl_nats"] for row in rows) < 1e-6
    assert summary["reference_weights_sha256"] == weights_digest(model)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_the_output_is_a_whole_checkpoint_with_the_adapters_in_it(model: Path, rl_stage: Any, tmp_path: Path) -> None:
    lora = {"rank": 4, "target_modules": ["q_proj", "down_proj"]}
    rl_stage.run(tmp_path, model, config_of(rl_stage, "grpo", lora=lora, num_steps=2))
    policy = tmp_path / "outputs" / "policy"
    assert not list(policy.glob("adapter*"))
    before, after = (load_file(path / "model.safetensors") for path in (model, policy))
    assert before.keys() == after.keys()
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "down_proj"}
    loaded = load_causal_lm(policy)
    assert not is_lora(loaded)
    assert all(torch.equal(parameter, after[name]) for name, parameter in loaded.named_parameters())


def test_learning_rate_zero_gives_the_checkpoint_back(model: Path, rl_stage: Any, tmp_path: Path) -> None:
    config = config_of(rl_stage, "grpo", optimizer={"learning_rate": 0.0}, num_steps=2)
    summary = rl_stage.run(tmp_path, model, config)
    assert summary["weights_sha256"] == summary["reference_weights_sha256"] == weights_digest(model)


def models_in_memory() -> list[PreTrainedModel]:
    """Return the language models that exist; their decoders, which are models too, do not count."""
    found = [value for value in gc.get_objects() if issubclass(type(value), PreTrainedModel)]
    return [value for value in found if value.get_output_embeddings() is not None]


@pytest.mark.parametrize(("lora", "number"), [(LORA, 2), (None, 3)], ids=["adapters", "all weights"])
def test_the_reference_is_no_second_copy(
    model: Path, rl_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: Any, number: int
) -> None:
    """The policy and the engine's model; only training of all weights needs the reference beside them."""
    seen: list[int] = []
    original = PolicyTrainer.train_step
    gc.collect()
    old = {id(found) for found in models_in_memory()}

    def counting(self: PolicyTrainer, step: int) -> Any:
        record = original(self, step)
        gc.collect()
        seen.append(sum(id(found) not in old for found in models_in_memory()))
        return record

    monkeypatch.setattr(PolicyTrainer, "train_step", counting)
    rl_stage.run(tmp_path, model, config_of(rl_stage, "grpo", lora=lora, num_steps=2))
    assert seen == [number, number]


class KilledError(BaseException):
    """What a kill looks like from inside."""


@pytest.mark.parametrize("case", list(CASES))
def test_it_continues_to_the_same_bits_and_the_reference_stays_the_checkpoint(
    model: Path, rl_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Fault 34: a continued adapter is not its own reference, or the KL of the later steps would start at 0 again."""
    config = config_of(rl_stage, case, num_steps=4, checkpoint_every_steps=2)
    whole, left, original = tmp_path / "whole", tmp_path / "left", PolicyTrainer.train_step
    summary = rl_stage.run(whole, model, config)

    def killing(self: PolicyTrainer, step: int) -> Any:
        record = original(self, step)
        if step == 3:
            shutil.copytree(tmp_path / "killed", left)
            raise KilledError
        return record

    with monkeypatch.context() as patch:
        patch.setattr(PolicyTrainer, "train_step", killing)
        with pytest.raises(KilledError):
            rl_stage.run(tmp_path / "killed", model, config)
    assert rl_stage.run(left, model, config) == summary
    assert (left / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert read_metrics(left / "metrics.jsonl")[2]["kl/policy_ref_nats"] > 0.0
    weights = whole / "checkpoints" / "step_000004" / "weights.safetensors"
    assert weights.stat().st_size < (model / "model.safetensors").stat().st_size / 4  # Adapters alone.
