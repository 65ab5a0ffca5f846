"""Token tables: encoded rows in an Arrow file that the process maps into memory and never holds as Python objects.

A table is built once from the Parquet file that the data checks wrote (columns: docs/stages.md), a few hundred rows at
a time, and read through the operating system's page cache from then on: a table of any size costs the pages that a
step touches, and 8 bytes a row for the lengths. What a table was built from stands in its own metadata, so a stage
that starts again opens the file it finds instead of encoding again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.ipc
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from training_core.data.encoding import (
    FEEDBACK_COLUMNS,
    PAIR_COLUMNS,
    SCORE_COLUMNS,
    feedback_cells,
    pair_cells,
    parquet_batches,
    tokenizer_digest,
)
from training_core.errors import DataError
from training_core.protocol.atomic import atomic_path
from training_core.protocol.digests import config_digest, file_digest

FORMAT_VERSION = 1
"""Part of what a file is recognised by: raise it when the columns or the encoding change."""
ORIGIN_KEY = b"tidegate.origin"
BATCH_ROWS = 256
"""Rows that exist as Python objects at a time while a table is built."""

TOKENS = pyarrow.list_(pyarrow.int32())
PAIR_SCHEMA = pyarrow.schema(
    [
        ("chosen", TOKENS),
        ("rejected", TOKENS),
        ("num_prompt_tokens", pyarrow.int32()),
        ("margin", pyarrow.float64()),
        ("chosen_score", pyarrow.float64()),
        ("rejected_score", pyarrow.float64()),
        ("example_id", pyarrow.string()),
        ("group_id", pyarrow.string()),
    ]
)
FEEDBACK_SCHEMA = pyarrow.schema(
    [
        ("ids", TOKENS),
        ("num_prompt_tokens", pyarrow.int32()),
        ("label", pyarrow.bool_()),
        ("rating", pyarrow.float64()),
        ("example_id", pyarrow.string()),
        ("group_id", pyarrow.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """One preference pair; both sequences are prompt + answer and share the prompt's tokens."""

    chosen: list[int]
    rejected: list[int]
    num_prompt_tokens: int
    margin: float | None
    chosen_score: float | None
    rejected_score: float | None
    example_id: str
    group_id: str

    @property
    def length(self) -> int:
        """Tokens of the longer side."""
        return max(len(self.chosen), len(self.rejected))


@dataclass(frozen=True, slots=True)
class EncodedFeedback:
    """One judged answer, prompt + answer."""

    ids: list[int]
    num_prompt_tokens: int
    label: bool | None
    """True: a good answer (thumb up)."""
    rating: float | None
    example_id: str
    group_id: str

    @property
    def length(self) -> int:
        return len(self.ids)


Row = TypeVar("Row", EncodedPair, EncodedFeedback)


class TokenColumn(Sequence[list[int]]):
    """One column of token ids as a sequence of lists, each made when it is asked for."""

    def __init__(self, table: TokenTable[Any], name: str) -> None:
        self._table = table
        self._name = name
        self.lengths: NDArray[np.int64] = table.token_counts(name)
        """Tokens of each row, int64 [rows]."""

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        found: list[int] = self._table.cell(self._name, index)
        return found


class TokenTable(Generic[Row]):
    """A memory-mapped table; `table[i]` is row `i` in the order of the file that it was built from.

    Args:
        path: an Arrow file that one of the `build_…` functions wrote.

    Raises:
        pyarrow.ArrowException, OSError: the file cannot be read as Arrow.
    """

    row_type: type[Row]
    token_columns: tuple[str, ...]

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
        self.schema: pyarrow.Schema = reader.schema
        self._batches: list[pyarrow.RecordBatch] = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        counts = [self.token_counts(name) for name in self.token_columns]
        self.lengths: NDArray[np.int64] = np.maximum.reduce(counts)
        """Tokens of each row, of the longer side where it has two; int64 [rows]."""

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Row:
        batch, row = self._locate(index)
        return self.row_type(**{name: _value(batch.column(name)[row]) for name in batch.schema.names})

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def cell(self, name: str, index: int) -> Any:
        """Return one value without making the rest of its row."""
        batch, row = self._locate(index)
        return _value(batch.column(name)[row])

    def token_counts(self, name: str) -> NDArray[np.int64]:
        """Return the number of tokens in each row of a token column, int64 [rows]."""
        counts: list[Any] = [
            pyarrow.compute.list_value_length(batch.column(name)).to_numpy() for batch in self._batches
        ]
        lengths: NDArray[np.int64] = np.concatenate([np.zeros(0, np.int64), *counts]).astype(np.int64)
        return lengths

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Return a column of numbers, or of true (1) and false (0), as float64 [rows]; NaN where it is null."""
        floats: list[Any] = [
            batch.column(name).cast(pyarrow.float64()).to_numpy(zero_copy_only=False) for batch in self._batches
        ]
        return np.concatenate([np.zeros(0), *floats])

    def group_ids(self) -> set[str]:
        """Return the prompt groups of the rows, each once."""
        return {value for batch in self._batches for value in batch.column("group_id").unique().to_pylist()}

    def group_numbers(self) -> tuple[NDArray[np.int64], list[str]]:
        """Return each row's prompt group as a number, int64 [rows], and the group that each number stands for."""
        numbers: dict[str, int] = {}
        found = [np.zeros(0, np.int64)]
        for batch in self._batches:
            encoded = batch.column("group_id").dictionary_encode()
            of_batch = [numbers.setdefault(name, len(numbers)) for name in encoded.dictionary.to_pylist()]
            found.append(np.array(of_batch, np.int64)[encoded.indices.to_numpy()])
        return np.concatenate(found), list(numbers)

    def _locate(self, index: int) -> tuple[pyarrow.RecordBatch, int]:
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"row {index} of a table with {len(self)} rows")
        number = int(np.searchsorted(self._ends, position, side="right"))
        batch = self._batches[number]
        return batch, int(position - (self._ends[number] - batch.num_rows))


class PairTable(TokenTable[EncodedPair]):
    """Preference pairs as token ids; see `build_pair_table`."""

    row_type = EncodedPair
    token_columns = ("chosen", "rejected")

    @cached_property
    def chosen(self) -> TokenColumn:
        return TokenColumn(self, "chosen")

    @cached_property
    def rejected(self) -> TokenColumn:
        return TokenColumn(self, "rejected")


class FeedbackTable(TokenTable[EncodedFeedback]):
    """Judged answers as token ids; see `build_feedback_table`."""

    row_type = EncodedFeedback
    token_columns = ("ids",)

    @cached_property
    def ids(self) -> TokenColumn:
        return TokenColumn(self, "ids")


def build_pair_table(parquet: Path, tokenizer: PreTrainedTokenizerBase, limit: int, path: Path) -> PairTable:
    """Encode a Parquet file of pairs into an Arrow file and return it, mapped into memory.

    Args:
        parquet: `train_pairs` or `validation_pairs` of the data checks.
        tokenizer: with a chat template and an EOS token.
        limit: the model's number of positions.
        path: where the Arrow file lies or is written, whole or not at all. A file built from the same Parquet file with
            the same tokenizer and limit is opened as it is; any other one is written again.

    Raises:
        DataError: the Parquet file is unreadable, lacks a column or has no rows; or a pair, which the message names,
            does not render, is too long (nothing is cut: two answers cut to the same tokens would teach nothing), or
            has the same tokens for both answers.
    """
    origin = _origin("pairs", parquet, tokenizer, limit)
    if (found := _open(PairTable, path, origin)) is not None:
        return found
    rows = parquet_batches(parquet, PAIR_COLUMNS, SCORE_COLUMNS, BATCH_ROWS)
    encoded = ([pair_cells(row, tokenizer, limit) for row in batch] for batch in rows)
    _write(encoded, PAIR_SCHEMA, origin, path)
    return PairTable(path)


def build_feedback_table(parquet: Path, tokenizer: PreTrainedTokenizerBase, limit: int, path: Path) -> FeedbackTable:
    """Encode a Parquet file of judged answers into an Arrow file and return it, mapped into memory.

    Args and Raises: as `build_pair_table`, of `train_feedback` or `validation_feedback`.
    """
    origin = _origin("feedback", parquet, tokenizer, limit)
    if (found := _open(FeedbackTable, path, origin)) is not None:
        return found
    rows = parquet_batches(parquet, FEEDBACK_COLUMNS, (), BATCH_ROWS)
    encoded = ([feedback_cells(row, tokenizer, limit) for row in batch] for batch in rows)
    _write(encoded, FEEDBACK_SCHEMA, origin, path)
    return FeedbackTable(path)


Table = TypeVar("Table", PairTable, FeedbackTable)


def _origin(kind: str, parquet: Path, tokenizer: PreTrainedTokenizerBase, limit: int) -> str:
    try:
        digest = file_digest(parquet)
    except OSError as error:
        raise DataError(f"{parquet} cannot be read: {error}. Run the data checks again to write it") from error
    parts = {"kind": kind, "parquet": digest, "tokenizer": tokenizer_digest(tokenizer), "limit": limit}
    return config_digest({"format_version": FORMAT_VERSION, **parts})


def _open(kind: type[Table], path: Path, origin: str) -> Table | None:
    """Return the table at `path`, or None when there is none that was built from the same things."""
    try:
        with pyarrow.memory_map(str(path)) as file:
            found = (pyarrow.ipc.open_file(file).schema.metadata or {}).get(ORIGIN_KEY)
        return kind(path) if found == origin.encode() else None
    except (OSError, pyarrow.ArrowException):  # Absent or damaged: it is written again.
        return None


def _write(batches: Iterable[list[dict[str, Any]]], schema: pyarrow.Schema, origin: str, path: Path) -> None:
    schema = schema.with_metadata({ORIGIN_KEY: origin})
    with atomic_path(path) as temporary, pyarrow.ipc.new_file(str(temporary), schema) as writer:
        for batch in batches:
            writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema=schema))


def _value(scalar: pyarrow.Scalar) -> Any:
    if isinstance(scalar, pyarrow.ListScalar):
        return scalar.values.to_numpy().tolist()
    return scalar.as_py()
