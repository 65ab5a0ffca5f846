"""The reward model as a reward part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from training_core.config.rewards import RewardModelReward
from training_core.models.heads import RewardModel, load_reward_model, score_texts
from training_core.models.loading import DTYPES, load_tokenizer
from training_core.records import Message
from training_core.rewards.base import RewardContext, RewardFunction


def adjust_score(score: float, model: RewardModel, config: RewardModelReward) -> float:
    """Return the score as the config wants it: in standard deviations from the stored mean, within the bound."""
    value = model.normalise(score) if config.normalise else score
    return value if config.clip is None else min(max(value, -config.clip), config.clip)


def reward_from_model(
    model: RewardModel, tokenizer: PreTrainedTokenizerBase, config: RewardModelReward
) -> RewardFunction:
    """Return a reward part that scores prompt and answer with `model`; every answer gets a score."""

    def score(
        prompts: Sequence[Sequence[Message]], answers: Sequence[str], context: RewardContext
    ) -> list[float | None]:
        conversations = [
            (list(prompt), [Message(role="assistant", content=answer)])
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        scores = score_texts(model, tokenizer, conversations, config.max_tokens_per_batch)
        return [adjust_score(value, model, config) for value in scores]

    return score


def load_reward_part(config: RewardModelReward, directory: Path, device: torch.device) -> RewardFunction:
    """Load the reward model in `directory` and return it as a reward part.

    Raises:
        ArtifactError: it cannot be loaded.
    """
    model = load_reward_model(directory, DTYPES[config.dtype]).to(device)
    model.requires_grad_(False)
    return reward_from_model(model, load_tokenizer(directory), config)
