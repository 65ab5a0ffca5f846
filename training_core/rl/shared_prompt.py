"""Forward pass in which answers to the same prompt share the prompt's part.

Each prompt goes through the model once, its keys and values stay in the graph, and each of its answers attends to
them. Same result and gradient as with the prompt repeated before every answer, up to rounding, for less work: the more,
the longer prompts are compared with answers.

Shapes: G different prompts, P the longest of them, B answers, t the longest of them, D hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from training_core.data.batching import pad_sequences
from training_core.ops.masking import lengths_to_mask
from training_core.rollout.batch import MicroBatch, TrajectoryBatch, build_micro_batch, chunks


@dataclass(frozen=True)
class SharedPromptBatch(MicroBatch):
    """A micro-batch that knows its prompts. The plain fields stay valid: every pass can also be done the plain way."""

    prompt_ids: Tensor
    """[G, P] int64, padded on the right."""
    prompt_lengths: Tensor
    """[G] int64."""
    prompt_of_row: Tensor
    """[B] int64: which of the prompts."""
    answer_ids: Tensor
    """[B, t] int64, padded on the right."""


def split_by_prompt(
    batch: TrajectoryBatch,
    rows: Sequence[int],
    max_rows: int,
    max_tokens: int | None,
    pad_token_id: int,
    device: torch.device,
) -> list[MicroBatch]:
    """Return `rows` in micro-batches within both bounds, answers to one prompt side by side, longest first."""
    longest: dict[tuple[int, ...], int] = {}
    for row in rows:
        prompt = batch.prompts[row]
        longest[prompt] = max(longest.get(prompt, 0), batch.total_length(row))

    def order(row: int) -> tuple[int, tuple[int, ...], int, int]:
        return -longest[batch.prompts[row]], batch.prompts[row], -batch.total_length(row), row

    ordered = sorted(rows, key=order)
    # A row counts as prompt and answer: an upper bound, since the prompt is not repeated.
    cut = chunks(ordered, lambda row: longest[batch.prompts[row]], max_rows, max_tokens)
    return [_build(batch, chunk, pad_token_id, device) for chunk in cut]


def _build(batch: TrajectoryBatch, rows: Sequence[int], pad_token_id: int, device: torch.device) -> SharedPromptBatch:
    prompts = list(dict.fromkeys(batch.prompts[row] for row in rows))
    plain = build_micro_batch(batch, rows, pad_token_id, device)
    return SharedPromptBatch(
        **vars(plain),
        prompt_ids=pad_sequences(prompts, pad_token_id)[0].to(device),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts], device=device),
        prompt_of_row=torch.tensor([prompts.index(batch.prompts[row]) for row in rows], device=device),
        answer_ids=pad_sequences([batch.answers[row] for row in rows], pad_token_id)[0].to(device),
    )


def shared_prompt_hidden(model: PreTrainedModel, micro: SharedPromptBatch) -> Tensor:
    """Return [tokens, D]: the last hidden states that predict the answer tokens, in row-major order of the mask.

    Padding is on the right of prompts and of answers: causal attention keeps the latter from real tokens, a mask the
    former from the answers.

    Gradient:
        To the model's parameters, through the prompts' keys and values too.
    """
    num_prompts, width = micro.prompt_ids.shape
    cache = DynamicCache(config=model.config)
    prompts = model.base_model(input_ids=micro.prompt_ids, past_key_values=cache, use_cache=True).last_hidden_state
    # A prompt's last position predicts the first token of its answers; answer token t predicts token t + 1.
    last = prompts[torch.arange(num_prompts, device=prompts.device), micro.prompt_lengths - 1]
    hidden = last[micro.prompt_of_row][:, None]
    num_inputs = micro.answer_ids.shape[1] - 1
    if num_inputs:
        cache.batch_select_indices(micro.prompt_of_row)
        lengths = micro.prompt_lengths[micro.prompt_of_row]
        is_real = lengths_to_mask(lengths, width)
        is_answer = torch.ones(len(lengths), num_inputs, dtype=torch.bool, device=is_real.device)
        uneven = not bool(is_real.all())
        answers = model.base_model(
            input_ids=micro.answer_ids[:, :-1],
            attention_mask=torch.cat([is_real, is_answer], dim=1) if uneven else None,
            position_ids=lengths[:, None] + torch.arange(num_inputs, device=lengths.device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        hidden = torch.cat([hidden, answers], dim=1)
    chosen: Tensor = hidden[micro.mask]
    return chosen
