"""Examples as Arrow tables: the canonical columns that every later part reads."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

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
