"""Rows of the Parquet files that the data checks write (columns: docs/stages.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from training_core.errors import DataError
from training_core.records import Message


def to_messages(value: list[dict[str, Any]]) -> list[Message]:
    return [Message(role=m["role"], content=m["content"]) for m in value]


def read_rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the named columns of a Parquet file as one dict a row.

    Raises:
        DataError: the file is unreadable, lacks a column or holds no rows.
    """
    try:
        file = pyarrow.parquet.ParquetFile(path)
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise DataError(f"{path} has no column {', '.join(missing)}; it has {', '.join(file.schema_arrow.names)}")
        rows: list[dict[str, Any]] = file.read(columns=list(columns)).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}. Run the data checks again to write it") from error
    if not rows:
        raise DataError(f"{path} has no rows, so there is nothing to work on. See the data report for what was dropped")
    return rows
