"""Answers of one step as tensors, and their micro-batches.

Shapes: N answers of the step, T longest answer, B rows of a micro-batch, L its longest prompt plus answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from training_core.ops.masking import lengths_to_mask
from training_core.rollout.base import Rollout, RolloutRequest


@dataclass(frozen=True)
class TrajectoryBatch:
    """The answers of one step. Column t of a [answers, time] tensor is the t-th answer token, whatever the prompt."""

    prompts: list[tuple[int, ...]]
    answers: list[tuple[int, ...]]
    mask: Tensor
    """[answers, time] bool: true at answer tokens."""
    sampler_logprobs: Tensor
    """[answers, time] float32, nats: what the engine said; 0 at masked positions."""

    def __len__(self) -> int:
        return len(self.answers)

    def total_length(self, row: int) -> int:
        return len(self.prompts[row]) + len(self.answers[row])


@dataclass(frozen=True)
class MicroBatch:
    """Some answers, padded on the right to the longest of them, and where their answer tokens are predicted."""

    rows: Tensor
    """[B] int64: which answers of the step."""
    input_ids: Tensor
    """[B, L] int64. With causal attention, padding on the right never reaches a real token: no attention mask."""
    mask: Tensor
    """[B, t] bool over the answer tokens, t the longest answer among the rows."""
    predict_rows: Tensor
    """[tokens] int64: row of each answer token, in row-major order of `mask`."""
    predict_positions: Tensor
    """[tokens] int64: position in `input_ids` that predicts it, one before its own."""
    targets: Tensor
    """[tokens] int64: the answer tokens."""

    def plain(self) -> MicroBatch:
        """Return these rows without what a subclass adds."""
        return MicroBatch(**{field.name: getattr(self, field.name) for field in fields(MicroBatch)})

    def select(self, values: Tensor) -> Tensor:
        """Return the part of a [answers, time] tensor of the step that belongs to these rows, trimmed."""
        return values[self.rows, : self.mask.shape[1]]

    def scatter(self, token_values: Tensor) -> Tensor:
        """Return [B, t] with one value an answer token and 0 elsewhere; gradients pass."""
        zeros = torch.zeros(self.mask.shape, dtype=token_values.dtype, device=token_values.device)
        return zeros.masked_scatter(self.mask, token_values)


def build_batch(requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]) -> TrajectoryBatch:
    """Return the tensors of a step's answers, in the order of the requests."""
    answers = [rollout.token_ids for rollout in rollouts]
    lengths = torch.tensor([len(answer) for answer in answers])
    mask = lengths_to_mask(lengths, int(lengths.max()))
    logprobs = torch.zeros(mask.shape, dtype=torch.float32)
    logprobs[mask] = torch.tensor([value for rollout in rollouts for value in rollout.logprobs], dtype=torch.float32)
    return TrajectoryBatch([request.prompt_ids for request in requests], answers, mask, logprobs)


def split_micro_batches(
    batch: TrajectoryBatch, rows: Sequence[int], size: int, pad_token_id: int, device: torch.device
) -> list[MicroBatch]:
    """Return `rows` sorted by length, longest first, in micro-batches of at most `size`.

    Longest first: the largest memory is asked for at the start, not after an hour.
    """
    ordered = sorted(rows, key=lambda row: (-batch.total_length(row), row))
    return [
        build_micro_batch(batch, ordered[start : start + size], pad_token_id, device)
        for start in range(0, len(ordered), size)
    ]


def build_micro_batch(
    batch: TrajectoryBatch, rows: Sequence[int], pad_token_id: int, device: torch.device
) -> MicroBatch:
    width = max(batch.total_length(row) for row in rows)
    input_ids = torch.full((len(rows), width), pad_token_id, dtype=torch.long)
    for index, row in enumerate(rows):
        sequence = batch.prompts[row] + batch.answers[row]
        input_ids[index, : len(sequence)] = torch.tensor(sequence)
    lengths = torch.tensor([len(batch.answers[row]) for row in rows])
    mask = lengths_to_mask(lengths, int(lengths.max()))
    predict_rows, columns = mask.nonzero(as_tuple=True)
    starts = torch.tensor([len(batch.prompts[row]) for row in rows])
    positions = starts[predict_rows] + columns
    return MicroBatch(
        rows=torch.tensor(list(rows)),
        input_ids=input_ids.to(device),
        mask=mask.to(device),
        predict_rows=predict_rows.to(device),
        predict_positions=(positions - 1).to(device),
        targets=input_ids[predict_rows, positions].to(device),
    )
