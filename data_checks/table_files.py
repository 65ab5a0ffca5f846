"""The files that pass 3 writes: their columns, and how one is written."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_checks.canonical import MESSAGES
from data_checks.examples import FEATURE_SCHEMA, NAME_COLUMNS
from training_core.protocol.atomic import atomic_path

ROW_GROUP_SIZE = 16_384
TEXT = pa.string()
ORIGIN = [("source_file", TEXT), ("source_row", pa.int64())]
PAIR_SCHEMA = pa.schema(
    [
        *((name, TEXT) for name in ("example_id", "group_id", "cluster_id", "source", "split", "label_kind")),
        *((f"{part}_messages", MESSAGES) for part in ("prompt", "chosen", "rejected")),
        *((f"{part}_text", TEXT) for part in ("prompt", "chosen", "rejected")),
        *((name, pa.float64()) for name in ("margin", "chosen_score", "rejected_score")),
        *((name, TEXT) for name in ("annotator", "tools", "extra")),
        *ORIGIN,
    ]
)
FEEDBACK_SCHEMA = pa.schema(
    [
        *((name, TEXT) for name in ("example_id", "group_id", "cluster_id", "source", "split", "label_kind")),
        *((f"{part}_messages", MESSAGES) for part in ("prompt", "answer")),
        *((f"{part}_text", TEXT) for part in ("prompt", "answer")),
        ("label", pa.bool_()),
        ("rating", pa.float64()),
        *((name, TEXT) for name in ("annotator", "tools", "extra")),
        *ORIGIN,
    ]
)
PROMPT_SCHEMA = pa.schema(
    [
        *((name, TEXT) for name in ("prompt_id", "group_id")),
        ("prompt_messages", MESSAGES),
        *((name, TEXT) for name in ("prompt_text", "ground_truth", "data_source", "ability", "tools", "extra")),
    ]
)
STEPWISE_SCHEMA = pa.schema(
    [
        *((name, TEXT) for name in ("example_id", "group_id", "source", "label_kind")),
        *((f"{part}_messages", MESSAGES) for part in ("prompt", "answer")),
        ("extra", TEXT),
        *ORIGIN,
    ]
)
REJECTED = [("detail", TEXT), *ORIGIN, ("byte_offset", pa.int64()), ("raw", TEXT)]
QUARANTINE_SCHEMA = pa.schema([("reason_code", TEXT), *REJECTED])
DROPPED_SCHEMA = pa.schema([("policy", TEXT), *REJECTED])
FINAL_FEATURES = pa.schema([*FEATURE_SCHEMA, ("fate", TEXT), ("split", TEXT), ("cluster_key", pa.int64())])
QUICK: dict[str, Any] = {
    "compression": "lz4",
    "use_dictionary": [*NAME_COLUMNS, "fate", "split"],
    "write_statistics": False,
}
"""For files of numbers that are read once."""


class TableWriter:
    """Writes one Parquet file whole or not at all, in row groups of one size whatever the pieces."""

    def __init__(self, stack: ExitStack, path: Path, schema: pa.Schema, **options: Any) -> None:
        self.schema = schema
        self.num_rows = 0
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0
        temporary = stack.enter_context(atomic_path(path))
        options = {"compression": "zstd", "version": "2.6", **options}
        self._writer = stack.enter_context(pq.ParquetWriter(temporary, schema, **options))
        stack.callback(self._flush, 0)

    def write(self, table: pa.Table) -> None:
        if not table.num_rows:
            return
        self._waiting.append(table)
        self._num_waiting += table.num_rows
        self.num_rows += table.num_rows
        if self._num_waiting >= ROW_GROUP_SIZE:
            self._flush(ROW_GROUP_SIZE)

    def _flush(self, size: int) -> None:
        """Write the rows that wait; keep what does not fill a group of `size`, 0: keep nothing."""
        if not self._num_waiting:
            return
        table = pa.concat_tables(self._waiting)
        keep = table.num_rows % size if size else 0
        self._writer.write_table(table.slice(0, table.num_rows - keep), row_group_size=ROW_GROUP_SIZE)
        self._waiting = [table.slice(table.num_rows - keep)] if keep else []
        self._num_waiting = keep
