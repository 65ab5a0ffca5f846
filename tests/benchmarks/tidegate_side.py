"""Tidegate's side of the step benchmark: `python tidegate_side.py SHAPE_JSON EVENTS_JSONL`.

The trainer of stage `policy` with its defaults: float32 master weights under bfloat16 autocast, answers of one prompt
sharing its forward pass, sampling in vLLM with bfloat16 weights that are replaced and checked before each step.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from shape import Events, Shape, load_shape

from training_core.config.algorithms import PolicyStageConfig
from training_core.memory import release_free_memory
from training_core.protocol.context import StageContext
from training_core.protocol.digests import path_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageSpec
from training_core.rl.stage import build_trainer, load_prompts
from training_core.rollout.build import build_engine
from training_core.seeding import batch_indices


def stage_config(shape: Shape) -> PolicyStageConfig:
    vllm = {"kv_cache_gib": shape.kv_cache_gib} if shape.engine == "vllm" else {}
    return PolicyStageConfig.model_validate(
        {
            "algorithm": {
                "name": "grpo",
                "num_steps": shape.num_steps,
                "prompts_per_step": shape.prompts_per_step,
                "group_size": shape.group_size,
                "micro_batch_size": shape.micro_batch_size,
                "optimizer": {"learning_rate": shape.learning_rate},
                "gradient_checkpointing": shape.recompute,
            },
            "rollout": {"engine": shape.engine, "max_new_tokens": shape.max_new_tokens, **vllm},
            "rewards": [{"kind": "sentiment"}],
        }
    )


def write_prompts(shape: Shape, path: Path) -> None:
    """Write the prompts so that the trainer's own order of data is the order in which the shape lists them."""
    number = len(shape.prompts)
    order = [
        index
        for step in range(shape.num_steps)
        for index in batch_indices(step, shape.prompts_per_step, number, shape.seed, "data_order")
    ]
    texts = [""] * number
    for prompt, index in zip(shape.prompts, order, strict=True):
        texts[index] = prompt
    names = [f"prompt-{index}" for index in range(number)]
    columns = {
        "prompt_id": names,
        "group_id": names,
        "prompt_messages": [[{"role": "user", "content": text}] for text in texts],
        "extra": ["{}"] * number,
    }
    pq.write_table(pa.table(columns), path)


def stage_context(shape: Shape, config: PolicyStageConfig, directory: Path) -> StageContext:
    prompts = directory / "prompts.parquet"
    write_prompts(shape, prompts)
    inputs = {
        "model": Artifact(path=shape.model, sha256=path_digest(Path(shape.model))),
        "rl_prompts": Artifact(path=str(prompts), sha256=path_digest(prompts)),
    }
    spec = StageSpec(
        stage="policy", stage_version=1, config=config.model_dump(mode="json"), inputs=inputs, seed=shape.seed
    )
    place = StageDirectory(directory / "stage")
    place.prepare(spec)
    return StageContext(spec, place)


def train(shape: Shape, events: Events) -> None:
    import torch

    from training_core.models.loading import load_tokenizer

    config = stage_config(shape)
    with tempfile.TemporaryDirectory() as directory:
        context = stage_context(shape, config, Path(directory))
        tokenizer = load_tokenizer(context.input_path("model"))
        prompts = load_prompts(context.input_path("rl_prompts"), tokenizer)
        longest = max(map(len, prompts.token_ids))
        engine = build_engine(config.rollout, context.input_path("model"), max_prompt_tokens=longest)
        try:
            trainer = build_trainer(context, config, tokenizer, prompts, engine)
            release_free_memory()
            weights = next(trainer.updater.policy.parameters()).dtype
            events.add("built", threads=torch.get_num_threads(), weights=str(weights))
            rewards = [do_step(trainer, step, events) for step in range(1, shape.num_steps + 1)]
            events.add("done", rewards=rewards)
        finally:
            engine.close()


def do_step(trainer: Any, step: int, events: Events) -> float:
    """Do a step, and say how long it and its parts took and how long its answers were; return the mean reward."""
    lengths: list[int] = []
    sample = trainer.sampler.generate

    def generate(*arguments: Any) -> Any:
        rollouts = sample(*arguments)
        lengths.extend(len(rollout.token_ids) for rollout in rollouts)
        return rollouts

    trainer.sampler.generate = generate
    events.add("begin", step=step)
    start, start_cpu = time.monotonic(), time.process_time()
    record = trainer.train_step(step)
    seconds, cpu_seconds = time.monotonic() - start, time.process_time() - start_cpu
    trainer.sampler.generate = sample
    phases = {
        name.removeprefix("time/").removesuffix("_seconds"): value
        for name, value in record.timings.items()
        if name.startswith("time/")
    }
    events.add("step", step=step, seconds=seconds, cpu_seconds=cpu_seconds, lengths=lengths, phases=phases)
    return record.metrics["reward/mean"]


if __name__ == "__main__":
    train(load_shape(Path(sys.argv[1])), Events(Path(sys.argv[2])))
