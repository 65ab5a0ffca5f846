"""The reward model as a reward part. Evaluation scores with the same function: `score_with_model`.

The model was trained on texts as `encode_conversation` renders them, read at the tokenizer's EOS. At any other token
its number says next to nothing of the answer, and bad answers gain by being read there. So every answer is read at that
token: in place of whichever end-of-answer token the policy wrote, or after the last token of an answer that the token
limit cut, as if it had ended there. Where the cut answer fills the model's positions, the token takes the last place.
A conversation longer than the positions has no score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from training_core.config.rewards import RewardModelReward
from training_core.errors import ConfigurationError
from training_core.models.chat import encode_conversation, end_token_id
from training_core.models.heads import RewardModel
from training_core.models.loading import load_tokenizer, pad_token_id, tokenizer_digest
from training_core.models.reward_ensemble import RewardEnsemble, as_ensemble, load_reward_ensemble
from training_core.records import Message, StopReason
from training_core.rewards.base import MeasuredScores, RewardContext, RewardFunction


def adjust_score(score: float, disagreement: float, model: RewardEnsemble, config: RewardModelReward) -> float:
    """Return the score as the config wants it: less its share of the disagreement, in standard deviations."""
    value = score - config.disagreement_penalty * disagreement
    return model.normalise(value) if config.normalise else value


def ended_sequence(ids: Sequence[int], stop_reason: StopReason, eos_token_id: int, num_positions: int) -> list[int]:
    """Return prompt and answer as the reward model reads them: with its EOS at the end, and nowhere longer for it.

    Args:
        ids: as sampled, with an end-of-turn token when `stop_reason` is EOS.
        stop_reason: why the answer ends.
        eos_token_id: the reward model's.
        num_positions: the reward model's. A cut answer that fills them gives its last id up.

    >>> ended_sequence([5, 6, 9], StopReason.EOS, 2, 8)
    [5, 6, 2]
    >>> ended_sequence([5, 6, 9], StopReason.LENGTH, 2, 8)
    [5, 6, 9, 2]
    >>> ended_sequence([5, 6, 9], StopReason.LENGTH, 2, 3)
    [5, 6, 2]
    """
    if stop_reason == StopReason.EOS or len(ids) == num_positions:
        return [*ids[:-1], eos_token_id]
    return [*ids, eos_token_id]


def encoded_sequences(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[Message]], answers: Sequence[str]
) -> list[list[int]]:
    """Return prompt and answer encoded from text, with the tokenizer's EOS at the end."""
    return [
        encode_conversation(tokenizer, list(prompt), [Message(role="assistant", content=answer)])[0]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def score_with_model(
    model: RewardModel | RewardEnsemble,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Message]],
    answers: Sequence[str],
    stop_reasons: Sequence[StopReason],
    sequences: Sequence[Sequence[int]] | None,
    max_tokens_per_batch: int,
) -> list[float | None]:
    """Return the reward model's own score of each answer; None where prompt and answer exceed its positions.

    Args:
        model: the reward model, or an ensemble, whose score is the mean of its members'.
        tokenizer: its tokenizer.
        prompts, answers, stop_reasons: one an answer, answers without their end-of-turn token.
        sequences: prompt and answer in the ids that were sampled; None when the policy has another tokenizer, whose ids
            mean nothing here: then the texts are encoded.
        max_tokens_per_batch: bound on a forward pass, padding included.

    Raises:
        EvaluationError: a score is not finite.
    """
    ensemble = as_ensemble(model)
    return score_with_ensemble(
        ensemble, tokenizer, prompts, answers, stop_reasons, sequences, max_tokens_per_batch
    ).values


@dataclass(frozen=True)
class AnswerScores:
    """Scores of answers, None where one exceeds the positions."""

    values: list[float | None]
    disagreements: list[float | None]


def score_with_ensemble(
    model: RewardEnsemble,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Message]],
    answers: Sequence[str],
    stop_reasons: Sequence[StopReason],
    sequences: Sequence[Sequence[int]] | None,
    max_tokens_per_batch: int,
) -> AnswerScores:
    """Return score and disagreement of each answer. Args and Raises: as `score_with_model`."""
    limit, eos = model.num_positions, end_token_id(tokenizer)
    if sequences is None:
        # Encoded with the end that a cut answer never wrote: taken off here, since it may be one token too many.
        encoded = encoded_sequences(tokenizer, prompts, answers)
        sequences = [
            ids if reason == StopReason.EOS else ids[:-1] for ids, reason in zip(encoded, stop_reasons, strict=True)
        ]
    whole = [ended_sequence(ids, reason, eos, limit) for ids, reason in zip(sequences, stop_reasons, strict=True)]
    fitting = [index for index, ids in enumerate(whole) if len(ids) <= limit]
    scores = model.score([whole[index] for index in fitting], pad_token_id(tokenizer), max_tokens_per_batch)
    found = AnswerScores([None] * len(whole), [None] * len(whole))
    for index, mean, disagreement in zip(fitting, scores.means, scores.disagreements, strict=True):
        found.values[index], found.disagreements[index] = mean, disagreement
    return found


def reward_from_model(
    model: RewardModel | RewardEnsemble,
    tokenizer: PreTrainedTokenizerBase,
    config: RewardModelReward,
    *,
    shares_tokenizer: bool,
) -> RewardFunction:
    """Return a reward part that scores prompt and answer with `model`.

    Args:
        model: the reward model, or an ensemble.
        tokenizer: its tokenizer.
        config: scale, batch size and what disagreement costs.
        shares_tokenizer: the policy has the same tokenizer, so sampled ids are scored as they are.

    Raises:
        ConfigurationError: disagreement shall cost something, but one model agrees with itself.
    """
    ensemble = as_ensemble(model)
    has_members = len(ensemble.members) > 1
    if config.disagreement_penalty > 0.0 and not has_members:
        raise ConfigurationError(
            f"reward {config.part_name!r}: disagreement_penalty is {config.disagreement_penalty}, but there is one "
            "reward model, which cannot disagree. Set reward_model.num_members to 2 or more, or the penalty to 0"
        )
    unit = ensemble.score_std if config.normalise else 1.0

    def score(
        prompts: Sequence[Sequence[Message]], answers: Sequence[str], context: RewardContext
    ) -> list[float | None]:
        sequences = context.sequences if shares_tokenizer and context.sequences else None
        found = score_with_ensemble(
            ensemble, tokenizer, prompts, answers, context.stop_reasons, sequences, config.max_tokens_per_batch
        )
        values = [
            None if value is None or disagreement is None else adjust_score(value, disagreement, ensemble, config)
            for value, disagreement in zip(found.values, found.disagreements, strict=True)
        ]
        if not has_members:
            return values
        return MeasuredScores(
            values, {"disagreement": [None if value is None else value / unit for value in found.disagreements]}
        )

    return score


def load_reward_part(
    config: RewardModelReward, directory: Path, policy_directory: Path, device: torch.device
) -> RewardFunction:
    """Load the reward model in `directory` and return it as a reward part for answers of a policy.

    Raises:
        ArtifactError: it cannot be loaded.
        ConfigurationError: as `reward_from_model`.
    """
    model = load_reward_ensemble(directory).to(device)
    model.requires_grad_(False)
    shares_tokenizer = tokenizer_digest(directory) == tokenizer_digest(policy_directory)
    return reward_from_model(model, load_tokenizer(directory), config, shares_tokenizer=shares_tokenizer)
