"""A trainer of a tiny model whose answers come from a script, for tests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from training_core.config.algorithms import PolicyStageConfig
from training_core.models.critic import new_critic
from training_core.models.loading import load_causal_lm, load_tokenizer
from training_core.registries import REWARD_RULES
from training_core.rewards.combine import reward_part
from training_core.rl.critic import CriticUpdater
from training_core.rl.reference import build_reference
from training_core.rl.sampling import Sampler
from training_core.rl.signal import ScoredBatch
from training_core.rl.stage import build_critic_optimizer, build_optimizer, load_prompts
from training_core.rl.trainer import PolicyTrainer
from training_core.rl.update import PolicyUpdater, Surroundings
from training_core.rollout.base import SamplingSettings
from training_core.rollout.batch import build_batch
from training_core.rollout.scripted import ScriptedEngine

SEED = 3


def build_updater(model: Path, config: dict[str, Any], policy: Any = None, **changes: Any) -> PolicyUpdater:
    """Return an updater of the model in a folder (or of `policy`), with a new critic where the algorithm has one."""
    algorithm = PolicyStageConfig.model_validate(config).algorithm
    policy = load_causal_lm(model) if policy is None else policy
    settings: dict[str, Any] = {
        "temperature": 1.0,
        "pad_token_id": 0,
        "seed": SEED,
        "should_stop": lambda: False,
        "max_new_tokens": 8,
    }
    around = Surroundings(**{**settings, **changes})
    critic = None
    if algorithm.critic_config is not None:
        values = new_critic(model)
        critic = CriticUpdater(algorithm.critic_config, algorithm, values, build_critic_optimizer(algorithm, values))
    reference = build_reference(algorithm, policy)
    return PolicyUpdater(algorithm, policy, reference, build_optimizer(algorithm, policy), around, critic)


def build_trainer(
    model: Path, prompts: Path, config: dict[str, Any], engine: ScriptedEngine, **changes: Any
) -> PolicyTrainer:
    parsed = PolicyStageConfig.model_validate(config)
    tokenizer = load_tokenizer(model)
    updater = build_updater(model, config, **changes)
    sampler = Sampler(
        config=parsed.algorithm,
        engine=engine,
        settings=SamplingSettings(parsed.rollout.max_new_tokens),
        rewards=[reward_part(r, REWARD_RULES[r.kind](r)) for r in parsed.rewards],
        tokenizer=tokenizer,
        prompts=load_prompts(prompts, tokenizer),
        seed=updater.around.seed,
        poll=updater.give_up_if_stopped,
    )
    return PolicyTrainer(updater, sampler, "0" * 64)


def answers_of(request: Any, logprob: float = -math.log(512)) -> tuple[list[int], list[float]]:
    """Answers of 1 to 4 tokens, different within a group, with the log-prob of an untrained model."""
    length = 1 + (request.seed % 4)
    return [300 + (request.seed * 7 + t) % 150 for t in range(length)], [logprob] * length


def scored_batch(trainer: PolicyTrainer, step: int = 1) -> ScoredBatch:
    """Return the trainer's answers of a step with random scores."""
    sampler, size = trainer.sampler, trainer.config.group_size
    requests = sampler.make_requests(step, 0, sampler.rounds(step)[0])
    rollouts = sampler.engine.generate(requests, sampler.settings)
    generator = torch.Generator().manual_seed(step)
    scores = torch.randn(len(requests), generator=generator, dtype=torch.float64)
    everything = torch.ones(len(requests), dtype=torch.bool)
    batch = build_batch(
        [request.prompt_ids for request in requests],
        [rollout.token_ids for rollout in rollouts],
        [rollout.logprobs for rollout in rollouts],
    )
    groups = torch.arange(len(requests)) // size
    return ScoredBatch(batch, scores, everything, ~everything, groups, baseline_scores=torch.zeros_like(scores))


KLS: dict[str, dict[str, Any]] = {
    "none": {"placement": "none"},
    "measured": {"placement": "none", "measure": True},
    "reward": {"placement": "reward", "coefficient": 0.1},
    "k2": {"placement": "loss", "coefficient": 0.1},
    "k3_ratio": {"placement": "loss", "coefficient": 0.1, "estimator": "k3_ratio"},
    "k1_ratio": {"placement": "loss", "coefficient": 0.1, "estimator": "k1_ratio"},
    "k3_straight_through": {"placement": "loss", "coefficient": 0.1, "estimator": "k3_straight_through"},
    "forward": {"placement": "loss", "coefficient": 0.1, "estimator": "k3", "objective": "forward"},
    "abs": {"placement": "loss", "coefficient": 0.1, "estimator": "abs", "objective": "penalty"},
}
