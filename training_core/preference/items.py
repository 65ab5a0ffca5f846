"""What is learned from: pairs, or answers that were judged one by one. Tables stay on the disk, mapped into memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training_core.data.tables import ORIGIN_KEY, FeedbackTable, PairTable
from training_core.errors import DataError
from training_core.preference.forward import PromptedAnswer
from training_core.preference.partners import next_fitting

Indices = Sequence[int]


class Items(Protocol):
    """Rows of a training or validation set; an item is what `batch_size` counts."""

    lengths: Sequence[int]
    """Tokens of each item, for sorting into micro-batches."""
    digest: str
    """Of what the items were made from."""

    def __len__(self) -> int: ...

    def forwards(self, indices: Indices) -> list[list[PromptedAnswer]]:
        """Return all answers of these items that need log-probabilities: two for an item, all first ones before all
        second ones, in as many forward passes as training takes."""
        ...

    def group_ids(self) -> set[str]:
        """Return the prompt groups, each once."""
        ...


class PairItems:
    """Preference pairs."""

    def __init__(self, table: PairTable) -> None:
        self.table = table
        self.lengths: Sequence[int] = table.lengths.tolist()
        self.digest = table_digest(table)

    def __len__(self) -> int:
        return len(self.table)

    def answers(self, indices: Indices) -> list[PromptedAnswer]:
        """Return the chosen answers and, after them, the rejected ones."""
        pairs = [self.table[index] for index in indices]
        chosen = [PromptedAnswer(pair.chosen, pair.num_prompt_tokens) for pair in pairs]
        return chosen + [PromptedAnswer(pair.rejected, pair.num_prompt_tokens) for pair in pairs]

    def forwards(self, indices: Indices) -> list[list[PromptedAnswer]]:
        return [self.answers(indices)]

    def group_ids(self) -> set[str]:
        return self.table.group_ids()


class JudgedSource(Protocol):
    """Answers with a judgement, from feedback or from pairs."""

    lengths: NDArray[np.int64]
    num_prompt_tokens: NDArray[np.int64]
    desirable: NDArray[np.bool_]
    groups: NDArray[np.int64]
    """The prompt group of each row, as a place in `group_names`."""
    group_names: list[str]
    digest: str

    def answer(self, index: int) -> PromptedAnswer: ...


class FeedbackSource:
    """The rows of a feedback table that have a label; those with a rating alone say nothing to KTO."""

    def __init__(self, table: FeedbackTable) -> None:
        labels = table.numbers("label")
        self.rows = np.flatnonzero(~np.isnan(labels))
        if not len(self.rows):
            raise DataError(
                f"none of the {len(table)} feedback rows has a label, and KTO learns from labels. Give rows a label "
                "(true for a good answer), or train from pairs by leaving the feedback files out"
            )
        self.table = table
        self.desirable = labels[self.rows] == 1.0
        self.lengths = table.lengths[self.rows]
        self.num_prompt_tokens = table.numbers("num_prompt_tokens")[self.rows].astype(np.int64)
        groups, self.group_names = table.group_numbers()
        self.groups = groups[self.rows]
        self.digest = table_digest(table)

    def answer(self, index: int) -> PromptedAnswer:
        row = self.table[int(self.rows[index])]
        return PromptedAnswer(row.ids, row.num_prompt_tokens)


class TakenApartSource:
    """Pairs as single answers: all chosen ones (desirable), then all rejected ones (undesirable)."""

    def __init__(self, table: PairTable) -> None:
        count = len(table)
        self.table = table
        self.desirable = np.arange(2 * count) < count
        self.lengths = np.concatenate([table.chosen.lengths, table.rejected.lengths])
        self.num_prompt_tokens = np.tile(table.numbers("num_prompt_tokens").astype(np.int64), 2)
        groups, self.group_names = table.group_numbers()
        self.groups = np.tile(groups, 2)
        self.digest = table_digest(table)

    def answer(self, index: int) -> PromptedAnswer:
        side, row = divmod(index, len(self.table))
        ids: list[int] = self.table.cell(("chosen", "rejected")[side], row)
        return PromptedAnswer(ids, int(self.num_prompt_tokens[index]))


class JudgedItems:
    """Judged answers, each with the answer to another prompt that KTO's baseline is measured on."""

    def __init__(self, source: JudgedSource, limit: int) -> None:
        self.source = source
        self.digest = source.digest
        self.lengths: Sequence[int] = source.lengths.tolist()
        self.desirable: Tensor = torch.from_numpy(np.ascontiguousarray(source.desirable))
        self.partners = find_partners(source, limit)

    def __len__(self) -> int:
        return len(self.lengths)

    def answers(self, indices: Indices) -> list[PromptedAnswer]:
        return [self.source.answer(index) for index in indices]

    def mismatched(self, indices: Indices) -> list[PromptedAnswer]:
        """Return each item's prompt with its partner's answer; the item itself where it has no partner."""
        return [self._mismatched(index) for index in indices]

    def _mismatched(self, index: int) -> PromptedAnswer:
        own, partner = self.source.answer(index), int(self.partners[index])
        if partner < 0:
            return own
        other = self.source.answer(partner)
        prompt, answer = own.ids[: own.num_prompt_tokens], other.ids[other.num_prompt_tokens :]
        return PromptedAnswer(prompt + answer, own.num_prompt_tokens)

    def forwards(self, indices: Indices) -> list[list[PromptedAnswer]]:
        return [self.answers(indices), self.mismatched(indices)]

    def group_ids(self) -> set[str]:
        return {self.source.group_names[number] for number in np.unique(self.source.groups).tolist()}


def find_partners(source: JudgedSource, limit: int) -> NDArray[np.int64]:
    """Return for each row the next one (after the last comes the first) that answers another prompt and whose answer
    fits behind this row's prompt, int64 [rows]; -1 where no answer does.

    A function of the data alone: neither steps nor micro-batches change it, so the reference's log-probabilities can be
    computed once.

    Raises:
        DataError: all rows answer the same prompt.
    """
    groups, count = source.groups, len(source.groups)
    if len(np.unique(groups)) < 2:
        raise DataError(
            f"all {count} answers belong to one prompt (group {source.group_names[int(groups[0])]!r}). KTO compares "
            "answers with those of other prompts: it needs at least two"
        )
    lengths = (source.lengths - source.num_prompt_tokens).astype(np.int64)
    return next_fitting(lengths, (limit - source.num_prompt_tokens).astype(np.int64), groups)


def table_digest(table: PairTable | FeedbackTable) -> str:
    """Return what a token table was made from: Parquet file, tokenizer and limit, as one digest."""
    return str((table.schema.metadata or {})[ORIGIN_KEY].decode())


def check_disjoint(train: Items, validation: Items) -> None:
    """Refuse validation data that shares a prompt with the training data: it would measure memory.

    Raises:
        DataError: names one such prompt.
    """
    if shared := train.group_ids() & validation.group_ids():
        raise DataError(
            f"{len(shared)} prompts are in both training and validation data, e.g. group {min(shared)!r}. Split by "
            "prompt, as the data checks do"
        )
