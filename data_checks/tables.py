"""Canonical Parquet tables; docs/stages.md names their columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_checks.keys import example_id, group_id
from data_checks.rows import PairRow, PromptItem, Quarantined, Turns
from training_core.protocol.atomic import atomic_path

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
    values = [
        {
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
        for row in rows
    ]
    return pa.Table.from_pylist(values, schema=PAIR_SCHEMA)


def prompt_table(items: Sequence[PromptItem]) -> pa.Table:
    values = [
        {
            "prompt_id": item.prompt_id,
            "group_id": group_id(item.prompt),
            "prompt_messages": as_messages(item.prompt),
            "extra": item.extra,
        }
        for item in items
    ]
    return pa.Table.from_pylist(values, schema=PROMPT_SCHEMA)


def quarantine_table(rows: Sequence[Quarantined]) -> pa.Table:
    values = [
        {
            "reason_code": row.reason.value,
            "detail": row.detail,
            "source_file": row.file,
            "source_row": row.number,
            "raw": row.raw,
        }
        for row in rows
    ]
    return pa.Table.from_pylist(values, schema=QUARANTINE_SCHEMA)


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table whole or not at all; the same table gives the same bytes with the same version of Arrow."""
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=16_384, version="2.6")
