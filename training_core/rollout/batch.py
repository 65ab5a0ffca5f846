"""Answers of one step as tensors, and their micro-batches.

Shapes: N answers of the step, T longest answer, B rows of a micro-batch, L its longest prompt plus answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from training_core.data.batching import pad_sequences
from training_core.ops.masking import lengths_to_mask


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


def build_batch(
    prompts: Sequence[tuple[int, ...]], answers: Sequence[tuple[int, ...]], logprobs: Sequence[Sequence[float]]
) -> TrajectoryBatch:
    """Return the tensors of a step's answers.

    Args:
        prompts: token ids of each answer's prompt.
        answers: token ids, at least one each.
        logprobs: what the engine said of each answer token, nats.
    """
    lengths = torch.tensor([len(answer) for answer in answers])
    mask = lengths_to_mask(lengths, int(lengths.max()))
    filled = torch.zeros(mask.shape, dtype=torch.float32)
    filled[mask] = torch.tensor([value for row in logprobs for value in row], dtype=torch.float32)
    return TrajectoryBatch(list(prompts), list(answers), mask, filled)


def by_size(batch: TrajectoryBatch, rows: Sequence[int]) -> list[int]:
    """Return `rows`, longest prompt plus answer first: the largest memory is asked for at the start, not after an
    hour."""
    return sorted(rows, key=lambda row: (-batch.total_length(row), row))


def chunks(
    ordered: Sequence[int],
    length_of: Callable[[int], int],
    max_rows: int,
    max_tokens: int | None,
    *,
    is_padded: bool = True,
) -> list[list[int]]:
    """Cut rows, longest first, into chunks within both bounds; a row above the token bound is a chunk of its own.

    Args:
        ordered: rows, longest first.
        length_of: a row's tokens.
        max_rows: most rows of a chunk.
        max_tokens: most tokens of a chunk; None for no bound.
        is_padded: whether each row takes as many tokens as the chunk's longest.

    >>> chunks([9, 4, 3, 2], lambda row: row, 3, 9)
    [[9], [4, 3], [2]]
    >>> chunks([9, 4, 3, 2], lambda row: row, 3, 9, is_padded=False)
    [[9], [4, 3, 2]]
    """
    result: list[list[int]] = []
    used = 0
    for row in ordered:
        length = length_of(row)
        width = length_of(result[-1][0]) if result and is_padded else length
        if result and len(result[-1]) < max_rows and (max_tokens is None or used + width <= max_tokens):
            result[-1].append(row)
            used += width
        else:
            result.append([row])
            used = length
    return result


def build_micro_batch(
    batch: TrajectoryBatch, rows: Sequence[int], pad_token_id: int, device: torch.device
) -> MicroBatch:
    """Return some answers of a step as a micro-batch."""
    sequences = [batch.prompts[row] + batch.answers[row] for row in rows]
    return micro_batch_of(rows, sequences, [len(batch.prompts[row]) for row in rows], pad_token_id, device)


def micro_batch_of(
    rows: Sequence[int],
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    pad_token_id: int,
    device: torch.device,
) -> MicroBatch:
    """Return sequences padded on the right, and where their answer tokens are predicted.

    Args:
        rows: what the caller calls each of them.
        sequences: token ids of prompt and answer, at least one each.
        prompt_lengths: tokens of each that are the prompt.
        pad_token_id: fills the rest; which id it is makes no difference.
        device: where the tensors go.
    """
    input_ids, _ = pad_sequences(sequences, pad_token_id)
    starts = torch.tensor(list(prompt_lengths))
    lengths = torch.tensor([len(sequence) for sequence in sequences]) - starts
    mask = lengths_to_mask(lengths, int(lengths.max()))
    predict_rows, columns = mask.nonzero(as_tuple=True)
    positions = starts[predict_rows] + columns
    return MicroBatch(
        rows=torch.tensor(list(rows)),
        input_ids=input_ids.to(device),
        mask=mask.to(device),
        predict_rows=predict_rows.to(device),
        predict_positions=(positions - 1).to(device),
        targets=input_ids[predict_rows, positions].to(device),
    )
