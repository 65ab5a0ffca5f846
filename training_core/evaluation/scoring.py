"""Scores that need a model: the reward model's, and the divergence from the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from training_core.data.batching import batches_by_tokens, pad_sequences
from training_core.errors import EvaluationError
from training_core.evaluation.generation import ModelSource
from training_core.evaluation.samples import EvaluationPrompt, ModelSamples, Sample
from training_core.models.chat import encode_prompt
from training_core.models.loading import DTYPES, load_causal_lm, load_tokenizer, tokenizer_digest, training_device
from training_core.models.reward_ensemble import RewardEnsemble, load_reward_ensemble
from training_core.ops.logprobs import token_logprobs
from training_core.records import PromptRow
from training_core.rewards.model import score_with_model


class RewardScorer:
    """The pipeline's reward model as a measure, in the dtype in which it was saved, validated and rewarded with.

    Args:
        directory: written by the reward-model stage.
        max_tokens_per_batch: bound on a forward pass.
    """

    def __init__(self, directory: Path, max_tokens_per_batch: int) -> None:
        self._model: RewardEnsemble = load_reward_ensemble(directory).to(training_device())
        self._tokenizer = load_tokenizer(directory)
        self._tokenizer_sha256 = tokenizer_digest(directory)
        self._max_tokens = max_tokens_per_batch

    def score(
        self, source: ModelSource, table: ModelSamples, rows: Sequence[PromptRow], prompts: Sequence[EvaluationPrompt]
    ) -> list[float | None]:
        """Return one score an answer, in standard deviations above the mean of the reward model's validation answers.

        Answers are scored as RL scores them: rewards/model.py says how, and which have no score.

        Args:
            source: the model that answered.
            table: its answers.
            rows: the prompts.
            prompts: the same, for messages.

        Raises:
            EvaluationError: a score is not finite; names the prompt.
        """
        prompt_ids = None
        if source.tokenizer_sha256 == self._tokenizer_sha256:
            prompt_ids = [encode_prompt(self._tokenizer, row.prompt) for row in rows]
        try:
            scores = self._scores(table.samples, rows, prompt_ids)
        except EvaluationError:
            for sample in table.samples:
                self._explain(source.name, prompts[sample.prompt_index].prompt_id, sample, rows, prompt_ids)
            raise
        return [None if score is None else self._model.normalise(score) for score in scores]

    def _scores(
        self, samples: Sequence[Sample], rows: Sequence[PromptRow], prompt_ids: Sequence[Sequence[int]] | None
    ) -> list[float | None]:
        return score_with_model(
            self._model,
            self._tokenizer,
            [rows[sample.prompt_index].prompt for sample in samples],
            [sample.answer for sample in samples],
            [sample.stop_reason for sample in samples],
            None if prompt_ids is None else [[*prompt_ids[s.prompt_index], *s.token_ids] for s in samples],
            self._max_tokens,
        )

    def _explain(
        self,
        name: str,
        prompt_id: str,
        sample: Sample,
        rows: Sequence[PromptRow],
        prompt_ids: Sequence[Sequence[int]] | None,
    ) -> None:
        try:
            self._scores([sample], rows, prompt_ids)
        except EvaluationError as error:
            raise EvaluationError(
                f"metric 'reward_model_score' of the {name}'s answer to prompt {prompt_id!r}: {error}. The reward "
                "model is damaged or diverged: train it again with a lower learning rate"
            ) from error


def kl_to_reference(
    source: ModelSource,
    reference: ModelSource,
    table: ModelSamples,
    rows: Sequence[PromptRow],
    *,
    dtype: str,
    temperature: float,
    max_tokens_per_batch: int,
) -> list[float | None]:
    """Return for each answer the sum over its tokens of log p_model - log p_reference, in nats.

    The mean over answers that the model sampled estimates KL(model || reference) without bias (the k1 estimator); one
    answer's value may be negative. Probabilities are those at the sampling temperature; for greedy answers, at 1. With
    top-p below 1, or greedy, answers come from a narrower distribution, and the mean estimates no KL.
    A model with another tokenizer has no such value: all are missing.
    """
    if source.tokenizer_sha256 != reference.tokenizer_sha256:
        return [None] * len(table.samples)
    tokenizer = load_tokenizer(reference.directory)
    prompt_ids = [encode_prompt(tokenizer, row.prompt) for row in rows]
    sequences = [(prompt_ids[sample.prompt_index], list(sample.token_ids)) for sample in table.samples]

    def logprobs_under(model: ModelSource) -> list[float]:
        loaded: Any = load_causal_lm(model.directory, DTYPES[dtype])
        return answer_logprobs(
            loaded.to(training_device()),
            sequences,
            temperature=temperature or 1.0,
            max_tokens_per_batch=max_tokens_per_batch,
        )

    return [ours - theirs for ours, theirs in zip(logprobs_under(source), logprobs_under(reference), strict=True)]


@torch.no_grad()
def answer_logprobs(
    model: Any,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    temperature: float,
    max_tokens_per_batch: int,
) -> list[float]:
    """Return the log-probability of each answer given its prompt, in nats; the sum of its tokens'.

    Args:
        model: a causal language model in evaluation mode.
        sequences: (prompt ids, answer ids), both not empty.
        temperature: divides the logits, above 0.
        max_tokens_per_batch: bound on rows x width of a batch.
    """
    whole = [[*prompt, *answer] for prompt, answer in sequences]
    weight = model.get_output_embeddings().weight
    totals = [math.nan] * len(sequences)
    for batch in batches_by_tokens([len(ids) for ids in whole], max_tokens_per_batch):
        input_ids, mask = pad_sequences([whole[index] for index in batch], pad_token_id=0)
        answer_starts = torch.tensor([len(sequences[index][0]) for index in batch])
        # The hidden state before a token predicts it.
        scored = (mask[:, 1:] & (torch.arange(1, mask.shape[1]) >= answer_starts[:, None])).to(weight.device)
        input_ids = input_ids.to(weight.device)
        # Padding is on the right, where causal attention never looks: no mask needed.
        hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
        targets = input_ids[:, 1:][scored]
        logprobs, _ = token_logprobs(hidden[scored], weight, targets, temperature=temperature, with_entropy=False)
        parts = torch.split(logprobs.double(), scored.sum(dim=1).tolist())
        for index, part in zip(batch, parts, strict=True):
            totals[index] = float(part.sum())
    return totals
