"""Examples as Arrow tables: the canonical columns that every later part reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from data_checks.rows import Turns

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
CANONICAL_SCHEMA = pa.schema(
    [
        ("example_id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("group_id", pa.string()),
        ("label_kind", pa.string()),
        ("prompt_messages", MESSAGES),
        ("chosen_messages", MESSAGES),
        ("rejected_messages", MESSAGES),
        ("prompt_text", pa.string()),
        ("chosen_text", pa.string()),
        ("rejected_text", pa.string()),
        ("margin", pa.float64()),
        ("chosen_score", pa.float64()),
        ("rejected_score", pa.float64()),
        ("label", pa.bool_()),
        ("rating", pa.float64()),
        ("annotator", pa.string()),
        ("tools", pa.string()),
        ("ground_truth", pa.string()),
        ("data_source", pa.string()),
        ("ability", pa.string()),
        ("prompt_id", pa.string()),
        ("extra", pa.string()),
        ("source_file", pa.string()),
        ("source_row", pa.int64()),
    ]
)
"""One row an example of any kind. Columns that its kind does not have are null."""


def messages_array(column: Sequence[Turns | None]) -> pa.Array:
    """Return turns as an Arrow array of lists of messages, null where there are none."""
    roles: list[str]
    contents: list[str]
    mask = None
    if all(turns is not None and len(turns) == 1 for turns in column):
        roles, contents = ([turns[0][at] for turns in column if turns] for at in (0, 1))
        offsets = np.arange(len(column) + 1, dtype=np.int32)
    else:
        roles, contents = ([turn[at] for turns in column if turns for turn in turns] for at in (0, 1))
        lengths = [0 if turns is None else len(turns) for turns in column]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        mask = pa.array([turns is None for turns in column])
    values = pa.StructArray.from_arrays([pa.array(roles, pa.string()), pa.array(contents, pa.string())], fields=FIELDS)
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=MESSAGES, mask=mask)


FIELDS = list(MESSAGES.value_type)


def joined_texts(column: Iterable[Turns | None]) -> list[str | None]:
    """Return the contents of each list of turns, joined by line breaks."""
    return [
        None if turns is None else turns[0][1] if len(turns) == 1 else "\n".join(content for _, content in turns)
        for turns in column
    ]


def table_of(columns: dict[str, Any], num_rows: int, schema: pa.Schema) -> pa.Table:
    """Return a table of `schema` from lists or arrays, null in every column that is not given."""
    arrays = []
    for field in schema:
        values = columns.get(field.name)
        if values is None:
            arrays.append(pa.nulls(num_rows, field.type))
        else:
            arrays.append(values if isinstance(values, pa.Array) else pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)
