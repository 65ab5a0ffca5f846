"""A small GRPO stage on the tiny model, shared by the tests of its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

TOPICS = ("the sea", "a cat and a dog", "bread", "a train", "an old book")


@dataclass(frozen=True)
class RlStage:
    """Builds configs and runs the stage in this process."""

    prompts: Path
    num_prompts: int = len(TOPICS)

    def config(self, rollout: dict[str, Any] | None = None, **algorithm: Any) -> dict[str, Any]:
        base = {
            "name": "grpo",
            "num_steps": 3,
            "prompts_per_step": 2,
            "group_size": 4,
            "micro_batch_size": 3,
            "optimizer": {"learning_rate": 1e-3},
            "autocast": "none",
            "checkpoint_every_steps": 2,
        }
        plain = {"engine": "transformers", "dtype": "float32", "max_new_tokens": 8}
        rewards = [{"kind": "regex", "pattern": "[aeiou]{2}"}, {"kind": "length", "max_tokens": 5, "weight": 0.5}]
        return {"algorithm": {**base, **algorithm}, "rollout": rollout or plain, "rewards": rewards}

    def context(self, path: Path, model: Path, config: dict[str, Any]) -> Any:
        from training_core.config.algorithms import PolicyStageConfig
        from training_core.protocol.context import StageContext
        from training_core.protocol.digests import path_digest
        from training_core.protocol.directory import StageDirectory
        from training_core.records import Artifact, StageSpec
        from training_core.stages import STAGES

        resolved = PolicyStageConfig.model_validate(config).model_dump(mode="json")
        inputs = {
            "model": Artifact(path=str(model), sha256=path_digest(model)),
            "rl_prompts": Artifact(path=str(self.prompts), sha256=path_digest(self.prompts)),
        }
        spec = StageSpec(stage="policy", stage_version=STAGES["policy"].version, config=resolved, inputs=inputs, seed=3)
        directory = StageDirectory(path)
        directory.prepare(spec)
        return StageContext(spec, directory)

    def run(self, path: Path, model: Path, config: dict[str, Any]) -> dict[str, Any]:
        """Run the stage in directory `path`; return its summary."""
        from training_core.stages import policy

        return policy.run(self.context(path, model, config)).summary


@pytest.fixture(scope="session")
def rl_stage(tmp_path_factory: pytest.TempPathFactory) -> RlStage:
    path = tmp_path_factory.mktemp("prompts") / "rl_prompts.parquet"
    messages = [[{"role": "user", "content": f"Write about {topic}."}] for topic in TOPICS]
    names = [f"p{i}" for i in range(len(TOPICS))]
    columns = {"prompt_id": names, "group_id": names, "prompt_messages": messages, "extra": ["{}"] * len(names)}
    pq.write_table(pa.table(columns), path)
    return RlStage(path)


@pytest.fixture(scope="session")
def tiny_decoder() -> Callable[..., Any]:
    """(model_type, **config) -> a decoder of two layers and 96 tokens with random float32 weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def build(model_type: str, **changes: Any) -> Any:
        sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
        tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        config = AutoConfig.for_model(model_type, **{**sizes, **heads, **tokens, **changes})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
        model.train(False)
        model.config.use_cache = False
        return model

    return build
