"""The reward model as a reward part. Evaluation scores with the same function: `score_with_model`.

The model was trained on texts as `encode_conversation` renders them, read at the tokenizer's EOS. So an answer that
ended is scored at that token, whichever of the policy's end-of-answer tokens it wrote; one that the token limit cut has
no end to be read at, and is scored at the last token it has. Nothing is cut to fit: a conversation longer than the
model's positions has no score.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from training_core.config.rewards import RewardModelReward
from training_core.models.chat import encode_conversation
from training_core.models.heads import RewardModel, load_reward_model, score_token_ids
from training_core.models.loading import DTYPES, TOKENIZER_FILES, load_tokenizer
from training_core.records import Message, StopReason
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


def sampled_sequences(
    sequences: Sequence[Sequence[int]], stop_reasons: Sequence[StopReason], eos_token_id: int | None
) -> list[list[int]]:
    """Return prompt and answer as sampled, with `eos_token_id` for whichever token ended the answer."""
    return [
        [*ids[:-1], eos_token_id] if reason == StopReason.EOS and eos_token_id is not None else list(ids)
        for ids, reason in zip(sequences, stop_reasons, strict=True)
    ]


def encoded_sequences(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Message]],
    answers: Sequence[str],
    stop_reasons: Sequence[StopReason],
) -> list[list[int]]:
    """Return prompt and answer encoded from text, without an end-of-turn token where the token limit cut the answer."""
    sequences = []
    for prompt, answer, reason in zip(prompts, answers, stop_reasons, strict=True):
        ids, _ = encode_conversation(tokenizer, list(prompt), [Message(role="assistant", content=answer)])
        sequences.append(ids if reason == StopReason.EOS else ids[:-1])
    return sequences


def score_with_model(
    model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Message]],
    answers: Sequence[str],
    stop_reasons: Sequence[StopReason],
    sequences: Sequence[Sequence[int]] | None,
    max_tokens_per_batch: int,
    *,
    share_prefix: bool = False,
) -> list[float | None]:
    """Return the reward model's own score of each answer; None where prompt and answer exceed its positions.

    Args:
        model: the reward model.
        tokenizer: its tokenizer.
        prompts, answers, stop_reasons: one an answer, answers without their end-of-turn token.
        sequences: prompt and answer in the ids that were sampled; None when the policy has another tokenizer, whose ids
            mean nothing here: then the texts are encoded.
        max_tokens_per_batch: bound on a forward pass, padding included.
        share_prefix: compute the ids that all conversations start with once; the same up to rounding.

    Raises:
        EvaluationError: a score is not finite.
    """
    if sequences is not None:
        whole = sampled_sequences(sequences, stop_reasons, tokenizer.eos_token_id)
    else:
        whole = encoded_sequences(tokenizer, prompts, answers, stop_reasons)
    limit = model.backbone.config.max_position_embeddings
    pad = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    fitting = [ids for ids in whole if len(ids) <= limit]
    scores = iter(score_token_ids(model, fitting, pad, max_tokens_per_batch, share_prefix=share_prefix))
    return [next(scores) if len(ids) <= limit else None for ids in whole]


def reward_from_model(
    model: RewardModel, tokenizer: PreTrainedTokenizerBase, config: RewardModelReward, *, shares_tokenizer: bool
) -> RewardFunction:
    """Return a reward part that scores prompt and answer with `model`.

    Args:
        model: the reward model.
        tokenizer: its tokenizer.
        config: scale and batch size.
        shares_tokenizer: the policy has the same tokenizer, so sampled ids are scored as they are.
    """

    def score(
        prompts: Sequence[Sequence[Message]], answers: Sequence[str], context: RewardContext
    ) -> list[float | None]:
        sequences = context.sequences if shares_tokenizer and context.sequences else None
        scores = score_with_model(
            model, tokenizer, prompts, answers, context.stop_reasons, sequences, config.max_tokens_per_batch
        )
        return [None if value is None else adjust_score(value, model, config) for value in scores]

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
