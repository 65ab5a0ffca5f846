"""A database in the work folder that spills to disk instead of growing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import duckdb

MIN_MEMORY_BYTES = 64 << 20
"""With less, DuckDB cannot hold the blocks that one operator has pinned."""


def open_store(folder: Path, memory_bytes: int, threads: int) -> duckdb.DuckDBPyConnection:
    """Open an empty database whose temporary files lie in `folder`.

    It writes nowhere else: not to the home folder, and it neither loads nor downloads extensions.

    Args:
        folder: exists and is the caller's to delete.
        memory_bytes: most that its buffers take; what needs more goes to disk. At least 64 MiB.
        threads: of its own, at least 1.
    """
    import duckdb

    if memory_bytes < MIN_MEMORY_BYTES or threads < 1:
        raise ValueError(f"at least {MIN_MEMORY_BYTES} bytes and 1 thread, not {memory_bytes} and {threads}")
    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": f"{memory_bytes}B",
        "threads": threads,
        "temp_directory": str(folder / "duckdb"),
        "home_directory": str(folder),
        "extension_directory": str(folder / "duckdb_extensions"),
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        # Rows come back as they lie in the files: what is found does not depend on threads.
        "preserve_insertion_order": True,
    }
    return duckdb.connect(":memory:", config=settings)


def register(connection: duckdb.DuckDBPyConnection, name: str, parquet_paths: Sequence[Path]) -> None:
    """Make a view of Parquet files of one schema, rows in the order of the files.

    Args:
        connection: from `open_store`.
        name: of the view.
        parquet_paths: at least one.
    """
    if not parquet_paths:
        raise ValueError(f"{name}: a view needs at least one file")
    connection.execute(f'create or replace view "{name}" as select * from {parquet_source(parquet_paths)}')


def parquet_source(parquet_paths: Iterable[Path]) -> str:
    """Return a table expression that reads Parquet files of one schema."""
    names = ", ".join("'" + str(path).replace("'", "''") + "'" for path in parquet_paths)
    return f"read_parquet([{names}])"


def number(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    """Return the one whole number that a query gives."""
    # All rows are fetched, also where there is one: an unfinished result holds the connection.
    ((value,),) = connection.sql(query).fetchall()
    return int(value)


def columns(connection: duckdb.DuckDBPyConnection, query: str) -> list[NDArray[np.int64]]:
    """Return the columns of whole numbers that a query gives, which must have no nulls."""
    found = connection.sql(query).fetchnumpy()
    return [np.asarray(column, np.int64) for column in found.values()]
