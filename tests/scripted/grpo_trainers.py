"""A GRPO trainer of a tiny model whose answers come from a script, for tests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from training_core.config.algorithms import GrpoStageConfig
from training_core.models.loading import load_causal_lm, load_tokenizer
from training_core.registries import REWARD_RULES
from training_core.rewards.combine import RewardPart
from training_core.rollout.base import SamplingSettings
from training_core.rollout.batch import build_batch
from training_core.rollout.scripted import ScriptedEngine
from training_core.stages.grpo import build_optimizer, build_reference, load_prompts
from training_core.stages.grpo_signal import ScoredBatch
from training_core.stages.grpo_step import GrpoTrainer
from training_core.stages.grpo_update import GrpoUpdater

SEED = 3


def build_updater(model: Path, config: dict[str, Any], **changes: Any) -> GrpoUpdater:
    algorithm = GrpoStageConfig.model_validate(config).algorithm
    policy = load_causal_lm(model)
    settings: dict[str, Any] = {"temperature": 1.0, "pad_token_id": 0, "seed": SEED, "should_stop": lambda: False}
    return GrpoUpdater(
        algorithm,
        policy,
        build_reference(algorithm, policy),
        build_optimizer(algorithm, policy),
        **{**settings, **changes},
    )


def build_trainer(
    model: Path, prompts: Path, config: dict[str, Any], engine: ScriptedEngine, **changes: Any
) -> GrpoTrainer:
    parsed = GrpoStageConfig.model_validate(config)
    tokenizer = load_tokenizer(model)
    rewards = [RewardPart(r.part_name, r.weight, REWARD_RULES[r.kind](r)) for r in parsed.rewards]
    updater = build_updater(model, config, **changes)
    sampling = SamplingSettings(parsed.rollout.max_new_tokens)
    return GrpoTrainer(updater, engine, sampling, rewards, tokenizer, load_prompts(prompts, tokenizer), "0" * 64)


def answers_of(request: Any, logprob: float = -math.log(512)) -> tuple[list[int], list[float]]:
    """Answers of 1 to 4 tokens, different within a group, with the log-prob of an untrained model."""
    length = 1 + (request.seed % 4)
    return [300 + (request.seed * 7 + t) % 150 for t in range(length)], [logprob] * length


def scored_batch(trainer: GrpoTrainer, step: int = 1) -> ScoredBatch:
    requests, _ = trainer.make_requests(step)
    rollouts = trainer.sampler.generate(requests, trainer.sampling)
    generator = torch.Generator().manual_seed(step)
    scores = torch.randn(len(requests), generator=generator, dtype=torch.float64)
    everything = torch.ones(len(requests), dtype=torch.bool)
    return ScoredBatch(build_batch(requests, rollouts), scores, everything, ~everything)


KLS: dict[str, dict[str, Any]] = {
    "none": {"placement": "none"},
    "measured": {"placement": "none", "measure": True},
    "reward": {"placement": "reward", "coefficient": 0.1},
    "k2": {"placement": "loss", "coefficient": 0.1},
    "k3_ratio": {"placement": "loss", "coefficient": 0.1, "estimator": "k3_ratio"},
    "forward": {"placement": "loss", "coefficient": 0.1, "estimator": "k3", "objective": "forward"},
}
