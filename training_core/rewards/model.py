"""The reward model as a reward part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from training_core.config.rewards import RewardModelReward
from training_core.models.heads import RewardModel, load_reward_model, score_texts, score_token_ids
from training_core.models.loading import DTYPES, TOKENIZER_FILES, load_tokenizer
from training_core.records import Message
from training_core.rewards.base import RewardContext, RewardFunction


def adjust_score(score: float, model: RewardModel, config: RewardModelReward) -> float:
    """Return the score as the config wants it: in standard deviations from the stored mean, within the bound."""
    value = model.normalise(score) if config.normalise else score
    return value if config.clip is None else min(max(value, -config.clip), config.clip)


def same_tokenizer(one: Path, other: Path) -> bool:
    """Return whether two checkpoint directories hold the same tokenizer files, the chat template among them."""

    def contents(directory: Path) -> dict[str, bytes]:
        return {name: path.read_bytes() for name in TOKENIZER_FILES if (path := directory / name).is_file()}

    return contents(one) == contents(other)


def reward_from_model(
    model: RewardModel, tokenizer: PreTrainedTokenizerBase, config: RewardModelReward, *, shares_tokenizer: bool
) -> RewardFunction:
    """Return a reward part that scores prompt and answer with `model`; every answer gets a score.

    Args:
        model: the reward model.
        tokenizer: its tokenizer.
        config: scale and batch size.
        shares_tokenizer: the policy has the same tokenizer, so sampled ids are scored as they are. Else the text is
            encoded anew, with an end-of-turn token whether the policy wrote one or not.
    """

    def score(
        prompts: Sequence[Sequence[Message]], answers: Sequence[str], context: RewardContext
    ) -> list[float | None]:
        if shares_tokenizer and context.sequences:
            pad = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
            scores = score_token_ids(model, context.sequences, pad, config.max_tokens_per_batch)
        else:
            conversations = [
                (list(prompt), [Message(role="assistant", content=answer)])
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
            scores = score_texts(model, tokenizer, conversations, config.max_tokens_per_batch)
        return [adjust_score(value, model, config) for value in scores]

    return score


def load_reward_part(
    config: RewardModelReward, directory: Path, policy_directory: Path, device: torch.device
) -> RewardFunction:
    """Load the reward model in `directory` and return it as a reward part for answers of a policy.

    Raises:
        ArtifactError: it cannot be loaded.
    """
    model = load_reward_model(directory, DTYPES[config.dtype]).to(device)
    model.requires_grad_(False)
    shares_tokenizer = same_tokenizer(directory, policy_directory)
    return reward_from_model(model, load_tokenizer(directory), config, shares_tokenizer=shares_tokenizer)
