"""Rewards of a small verifiable task, and a model small enough to learn it in a second."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from training_core.models.tiny import build_tiny_checkpoint
from training_core.rewards.base import RewardContext

NUM_LOW_IDS = 150
"""Of a vocabulary of 300: an untrained policy answers with as many high ids."""


def answer_tokens(context: RewardContext) -> list[Sequence[int]]:
    """Return each answer's tokens without the end-of-turn token."""
    found = []
    for sequence, num_tokens, reason in zip(context.sequences, context.num_tokens, context.stop_reasons, strict=True):
        end = len(sequence) - (reason.value == "eos")
        found.append(sequence[end - num_tokens : end])
    return found


def low_ids(prompts: Any, answers: list[str], context: RewardContext) -> list[float]:
    """Return the share of an answer's tokens with a low id; 0 for an empty answer."""
    return [sum(i < NUM_LOW_IDS for i in ids) / len(ids) if ids else 0.0 for ids in answer_tokens(context)]


def high_ids(prompts: Any, answers: list[str], context: RewardContext) -> list[float]:
    """Return the share of an answer's tokens with a high id."""
    return [1.0 - score for score in low_ids(prompts, answers, context)]


def equal(prompts: Any, answers: list[str], context: RewardContext) -> list[float]:
    """Return the same score for every answer; eight times 0.7 has no exact mean in binary."""
    return [0.7] * len(answers)


def number_of_tokens(prompts: Any, answers: list[str], context: RewardContext) -> list[float]:
    """Return an answer's length."""
    return [float(number) for number in context.num_tokens]


def every_other(prompts: Any, answers: list[str], context: RewardContext) -> list[float | None]:
    """Return a score for every other answer."""
    return [None if index % 2 else score for index, score in enumerate(low_ids(prompts, answers, context))]


def low_ids_for_some(prompts: Any, answers: list[str], context: RewardContext, every: int) -> list[float]:
    """Return `low_ids` where the number in the prompt is a multiple of `every`, else the same score."""
    numbers = [int(prompt[-1].content.split()[-1]) for prompt in prompts]
    scores = low_ids(prompts, answers, context)
    return [score if number % every == 0 else 0.7 for number, score in zip(numbers, scores, strict=True)]


def failing(prompts: Any, answers: list[str], context: RewardContext) -> list[float]:
    """Fail as a user's function may."""
    raise KeyError("reference")


def reward(name: str, **others: Any) -> dict[str, Any]:
    """Return the config of one of these rewards."""
    return {"kind": "custom", "import_path": f"small_tasks:{name}", "name": name, **others}


def build_small_checkpoint(directory: Path, **changes: Any) -> Path:
    """Write a model of one layer and 300 tokens."""
    return build_tiny_checkpoint(directory, vocab_size=300, num_layers=1, max_position_embeddings=64, **changes)


def end_with_high_ids(directory: Path) -> Path:
    """Let a checkpoint's answers end with any of 60 tokens, so that an untrained policy's have about five."""
    path = directory / "generation_config.json"
    config = json.loads(path.read_text())
    ends = config["eos_token_id"]
    config["eos_token_id"] = [*(ends if isinstance(ends, list) else [ends]), *range(240, 299)]
    path.write_text(json.dumps(config))
    return directory


def write_numbered_prompts(path: Path, num_prompts: int) -> Path:
    """Write prompts that end with their number, from 0."""
    names = [f"p{number}" for number in range(num_prompts)]
    messages = [[{"role": "user", "content": f"Question {number}"}] for number in range(num_prompts)]
    columns = {"prompt_id": names, "group_id": names, "prompt_messages": messages, "extra": ["{}"] * num_prompts}
    pq.write_table(pa.table(columns), path)
    return path


def small_config(rl_stage: Any, *rewards: dict[str, Any], max_new_tokens: int = 4, **algorithm: Any) -> dict[str, Any]:
    """Return the config of a run of a few tenths of a second: 4 prompts, 8 answers each."""
    values = {
        "num_steps": 10,
        "prompts_per_step": 4,
        "group_size": 8,
        "micro_batch_size": 32,
        "optimizer": {"learning_rate": 1e-2},
        **algorithm,
    }
    values.setdefault("checkpoint_every_steps", values["num_steps"])
    rollout = {"engine": "transformers", "dtype": "float32", "max_new_tokens": max_new_tokens}
    config: dict[str, Any] = rl_stage.config(rollout=rollout, **values)
    return {**config, "rewards": list(rewards) or [reward("low_ids")]}
