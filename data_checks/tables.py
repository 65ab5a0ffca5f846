"""Canonical Parquet tables; docs/stages.md names their columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from data_checks.keys import example_id, feedback_id, group_id
from data_checks.rows import FeedbackRow, PairRow, PromptItem, Quarantined, Turns
from training_core.protocol.atomic import atomic_path

Row = TypeVar("Row")
ROW_GROUP_SIZE = 16_384
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
PAIR_SCHEMA = pa.schema(
    [
        ("example_id", pa.string()),
        ("group_id", pa.string()),
        ("source", pa.string()),
        ("prompt_messages", MESSAGES),
        ("chosen_messages", MESSAGES),
        ("rejected_messages", MESSAGES),
        ("margin", pa.float64()),
        ("chosen_score", pa.float64()),
        ("rejected_score", pa.float64()),
        ("source_file", pa.string()),
        ("source_row", pa.int64()),
    ]
)
FEEDBACK_SCHEMA = pa.schema(
    [
        ("example_id", pa.string()),
        ("group_id", pa.string()),
        ("source", pa.string()),
        ("prompt_messages", MESSAGES),
        ("answer_messages", MESSAGES),
        ("label", pa.bool_()),
        ("rating", pa.float64()),
        ("source_file", pa.string()),
        ("source_row", pa.int64()),
    ]
)
PROMPT_SCHEMA = pa.schema(
    [("prompt_id", pa.string()), ("group_id", pa.string()), ("prompt_messages", MESSAGES), ("extra", pa.string())]
)
QUARANTINE_SCHEMA = pa.schema(
    [
        ("reason_code", pa.string()),
        ("detail", pa.string()),
        ("source_file", pa.string()),
        ("source_row", pa.int64()),
        ("raw", pa.string()),
    ]
)


def as_messages(turns: Turns) -> list[dict[str, str]]:
    return [turn._asdict() for turn in turns]


def pair_table(rows: Sequence[PairRow]) -> pa.Table:
    return _table(rows, _pair_values, PAIR_SCHEMA)


def _pair_values(row: PairRow) -> dict[str, Any]:
    return {
        "example_id": example_id(row),
        "group_id": group_id(row.prompt),
        "source": row.source,
        "prompt_messages": as_messages(row.prompt),
        "chosen_messages": as_messages(row.chosen),
        "rejected_messages": as_messages(row.rejected),
        "margin": row.margin,
        "chosen_score": row.chosen_score,
        "rejected_score": row.rejected_score,
        "source_file": row.origin.file,
        "source_row": row.origin.number,
    }


def feedback_table(rows: Sequence[FeedbackRow]) -> pa.Table:
    return _table(rows, _feedback_values, FEEDBACK_SCHEMA)


def _feedback_values(row: FeedbackRow) -> dict[str, Any]:
    return {
        "example_id": feedback_id(row),
        "group_id": group_id(row.prompt),
        "source": row.source,
        "prompt_messages": as_messages(row.prompt),
        "answer_messages": as_messages(row.answer),
        "label": row.label,
        "rating": row.rating,
        "source_file": row.origin.file,
        "source_row": row.origin.number,
    }


def prompt_table(items: Sequence[PromptItem]) -> pa.Table:
    return _table(items, _prompt_values, PROMPT_SCHEMA)


def _prompt_values(item: PromptItem) -> dict[str, Any]:
    return {
        "prompt_id": item.prompt_id,
        "group_id": group_id(item.prompt),
        "prompt_messages": as_messages(item.prompt),
        "extra": item.extra,
    }


def quarantine_table(rows: Sequence[Quarantined]) -> pa.Table:
    return _table(rows, _quarantine_values, QUARANTINE_SCHEMA)


def _quarantine_values(row: Quarantined) -> dict[str, Any]:
    return {
        "reason_code": row.reason.value,
        "detail": row.detail,
        "source_file": row.file,
        "source_row": row.number,
        "raw": row.raw,
    }


def _table(rows: Sequence[Row], values: Callable[[Row], dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return a table in pieces: only one piece at a time exists twice, as Python values too."""
    pieces = [schema.empty_table()]
    for start in range(0, len(rows), ROW_GROUP_SIZE):
        piece = [values(row) for row in rows[start : start + ROW_GROUP_SIZE]]
        pieces.append(pa.Table.from_pylist(piece, schema=schema))
    return pa.concat_tables(pieces)


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table whole or not at all; the same table gives the same bytes with the same version of Arrow."""
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=ROW_GROUP_SIZE, version="2.6")
