"""Mixtures of experts through the whole policy stage under GSPO: stable, learning, experts in use; and resume."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_tasks import build_small_checkpoint, small_config

from training_core.errors import ConfigurationError
from training_core.metrics import read_metrics
from training_core.models.loading import load_causal_lm
from training_core.models.moe import is_moe
from training_core.protocol.digests import weights_digest
from training_core.rl.trainer import PolicyTrainer

ARCHITECTURES = ("mixtral", "qwen3_moe")
LOAD_METRICS = {"moe/load_max_fraction", "moe/load_entropy_nats", "moe/idle_expert_fraction"}
ALWAYS = LOAD_METRICS | {"moe/auxiliary_loss", "moe/router_entropy_nats"}
TWO_OF_FOUR_NATS, ALL_FOUR_NATS = math.log(2), math.log(4)
"""Entropy of the load when every token goes to the same two experts, and when it is spread evenly."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("moe")
    return {name: build_small_checkpoint(path / name, architecture=name) for name in (*ARCHITECTURES, "llama")}


def gspo(rl_stage: Any, experts: dict[str, Any], **others: Any) -> dict[str, Any]:
    return small_config(rl_stage, name="gspo", experts=experts, **others)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_trains_stably_under_gspo(
    models: dict[str, Path], rl_stage: Any, tmp_path: Path, architecture: str, replay: bool
) -> None:
    experts = {"auxiliary_coefficient": 0.01, "replay": replay}
    config = gspo(rl_stage, experts, optimizer={"learning_rate": 5e-3}, num_minibatches=2)
    summary = rl_stage.run(tmp_path, models[architecture], config)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert len(rows) == 10
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["reward/mean"] < 0.65
    assert sum(row["reward/mean"] for row in rows[-3:]) / 3 > 0.85
    assert max(row["policy/grad_norm"] for row in rows) < 10.0
    # The engine routes as training does: also after its experts were handed over.
    assert max(row["rollout/sampler_trainer_kl_nats"] for row in rows) < 1e-4
    names = ALWAYS | ({"moe/replay_changed_fraction"} if replay else set())
    assert all({name for name in row if name.startswith("moe/")} == names for row in rows)
    assert all(TWO_OF_FOUR_NATS - 1e-9 < row["moe/load_entropy_nats"] <= ALL_FOUR_NATS for row in rows)
    if replay:  # The second update's own choices would have been others.
        assert max(row["moe/replay_changed_fraction"] for row in rows) > 0.0
    policy = tmp_path / "outputs" / "policy"
    assert is_moe(load_causal_lm(policy))
    assert weights_digest(policy) == summary["weights_sha256"] != summary["reference_weights_sha256"]


def test_the_auxiliary_loss_keeps_the_experts_in_use(models: dict[str, Path], rl_stage: Any, tmp_path: Path) -> None:
    """On this model and seed: without it, training leaves all but two of four experts idle."""
    loads = {}
    for coefficient in (0.0, 0.01):
        experts = {"auxiliary_coefficient": coefficient, "replay": True}
        config = gspo(rl_stage, experts, optimizer={"learning_rate": 2e-3}, num_steps=14)
        rl_stage.run(tmp_path / str(coefficient), models["qwen3_moe"], config)
        rows = read_metrics(tmp_path / str(coefficient) / "metrics.jsonl")
        loads[coefficient] = [row["moe/load_entropy_nats"] for row in rows]
        assert rows[-1]["reward/mean"] > 0.65
    assert min(loads[0.01]) > 0.9
    assert max(loads[0.0][-3:]) < 0.85


class KilledError(BaseException):
    """What a kill looks like from inside."""


def test_it_continues_to_the_same_bits(
    models: dict[str, Path], rl_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"auxiliary_coefficient": 0.01, "z_coefficient": 0.1, "replay": True}
    config = gspo(rl_stage, experts, num_epochs=2, num_steps=3, checkpoint_every_steps=1, autocast="bfloat16")
    whole, left, original = tmp_path / "whole", tmp_path / "left", PolicyTrainer.train_step
    summary = rl_stage.run(whole, models["mixtral"], config)

    def killing(self: PolicyTrainer, step: int) -> Any:
        record = original(self, step)
        if step == 2:
            shutil.copytree(tmp_path / "killed", left)
            raise KilledError
        return record

    with monkeypatch.context() as patch:
        patch.setattr(PolicyTrainer, "train_step", killing)
        with pytest.raises(KilledError):
            rl_stage.run(tmp_path / "killed", models["mixtral"], config)
    assert rl_stage.run(left, models["mixtral"], config) == summary
    assert (left / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_dense_model_has_no_experts_to_watch(models: dict[str, Path], rl_stage: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"LlamaForCausalLM has no router.*Leave them off, or use Mixtral"):
        rl_stage.run(tmp_path, models["llama"], gspo(rl_stage, {}, num_steps=1))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_mixture_trains_without_being_watched(models: dict[str, Path], rl_stage: Any, tmp_path: Path) -> None:
    rl_stage.run(tmp_path, models["mixtral"], small_config(rl_stage, name="gspo", num_steps=2))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert not any(name.startswith("moe/") for row in rows for name in row)
    assert rows[-1]["rollout/sampler_trainer_kl_nats"] < 1e-4
