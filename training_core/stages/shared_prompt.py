"""Forward pass in which answers to one prompt share the prompt's part.

The prompt goes through the model once, its keys and values stay in the graph, and each answer attends to them. Same
result and gradient as with the prompt repeated before every answer, up to rounding; about half the work when prompts
are as long as answers.

Shapes: P prompt tokens, B answers to it, t the longest of them, D hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from training_core.rollout.batch import MicroBatch, TrajectoryBatch, build_micro_batch


@dataclass(frozen=True)
class SharedPromptBatch(MicroBatch):
    """Answers to one prompt. The plain fields stay valid, so that every pass can also be done the plain way."""

    num_prompt_tokens: int


def split_by_prompt(
    batch: TrajectoryBatch, rows: Sequence[int], size: int, pad_token_id: int, device: torch.device
) -> list[SharedPromptBatch]:
    """Return `rows` in micro-batches of at most `size` answers to one prompt, longest sequences first."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in sorted(rows, key=lambda row: (-batch.total_length(row), row)):
        by_prompt.setdefault(batch.prompts[row], []).append(row)
    result = []
    for prompt, members in by_prompt.items():
        for start in range(0, len(members), size):
            micro = build_micro_batch(batch, members[start : start + size], pad_token_id, device)
            result.append(SharedPromptBatch(**vars(micro), num_prompt_tokens=len(prompt)))
    return result


def shared_prompt_hidden(model: PreTrainedModel, micro: SharedPromptBatch) -> Tensor:
    """Return [tokens, D]: the last hidden states that predict the answer tokens, in row-major order of the mask.

    Gradient:
        To the model's parameters, through the prompt's keys and values too.
    """
    num_prompt = micro.num_prompt_tokens
    num_rows, num_columns = micro.mask.shape
    cache = DynamicCache(config=model.config)
    prompt = model.base_model(
        input_ids=micro.input_ids[:1, :num_prompt], past_key_values=cache, use_cache=True
    ).last_hidden_state
    # The prompt's last position predicts every answer's first token; answer token t predicts token t + 1.
    hidden = prompt[:, -1:].expand(num_rows, 1, prompt.shape[-1])
    if num_columns > 1:
        cache.batch_repeat_interleave(num_rows)
        # Padding on the right of an answer is never seen by its real tokens: no attention mask.
        answers = model.base_model(
            input_ids=micro.input_ids[:, num_prompt : num_prompt + num_columns - 1],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        hidden = torch.cat([hidden, answers], dim=1)
    return hidden[micro.mask]
