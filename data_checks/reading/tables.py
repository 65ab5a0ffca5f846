"""Parquet and Arrow files, and folders of Arrow files: batches of columns, turned into rows where they are used.

A block carries its columns as an Arrow stream: the reading process decodes them once, in order. Opening the file again
for a range of rows would decode a row group (often a million rows) as often as it has blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from data_checks.files import ARROW_MAGIC
from data_checks.reading import block
from data_checks.reading.block import Block, OversizedBlock
from data_checks.reading.records import checked_row
from data_checks.reading.streams import FREE_BYTES, MAX_RATIO, DamageError
from data_checks.rows import REASON_ORDER, Finding, RawRow, Reason
from training_core.errors import DataError

MAX_BATCH_ROWS = 2048
"""Most rows of a Parquet file that are decoded at once: a value that many rows share is stored once in the file."""
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""How an Arrow stream ends; without it rows may be missing."""


@dataclass(frozen=True, slots=True)
class BatchBlock(Block):
    """Rows of a table, as an Arrow stream of one batch."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def rows(self) -> list[RawRow]:
        with pa.ipc.open_stream(self.data) as stream:
            batch = stream.read_next_batch()
        try:
            columns = [_plain(array).to_pylist() for array in batch.columns]
        except (ValueError, OverflowError):  # Some value cannot be one of Python's: find out which.
            return [self._single(batch, index) for index in range(batch.num_rows)]
        names = batch.schema.names
        rows = []
        for number, values in enumerate(zip(*columns, strict=True), start=self.number):
            value = {name: item for name, item in zip(names, values, strict=True) if item is not None}
            raw = _as_text(value)
            row = RawRow(self.name, number, raw, value)
            rows.append(checked_row(row) if "\\u" in raw else row)
        return rows or [RawRow(self.name, self.number + index, "{}", {}) for index in range(batch.num_rows)]

    def _single(self, batch: pa.RecordBatch, index: int) -> RawRow:
        value: dict[str, Any] = {}
        broken: dict[str, Reason] = {}
        for column, array in zip(batch.schema.names, batch.columns, strict=True):
            try:
                value[column] = _plain(array.slice(index, 1)).to_pylist()[0]
            except UnicodeDecodeError:
                broken[column] = Reason.INVALID_UNICODE
                scalar = array[index]
                data = scalar.as_buffer().to_pybytes() if hasattr(scalar, "as_buffer") else b"(nested value)"
                value[column] = data.decode("utf-8", errors="backslashreplace")
            except (ValueError, OverflowError):  # A time beyond Python's calendar, for example.
                broken[column] = Reason.WRONG_TYPE
                value[column] = "(unreadable value)"
        row = RawRow(self.name, self.number + index, _as_text(value), value)
        if not broken:
            return checked_row(row)
        reason = min(broken.values(), key=REASON_ORDER.__getitem__)
        finding = Finding(reason, f"unreadable value in column {', '.join(broken)}")
        return RawRow(row.file, row.number, row.raw, None, finding)


@dataclass(slots=True)
class TableCutter:
    """Cuts batches into blocks. `num_records` says how many rows were met so far."""

    name: str
    num_records: int = 0

    def blocks(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Block]:
        """Yield the rows of `batches` in blocks of bounded size."""
        for batch in batches:
            for piece in _sliced(_decoded(batch)):
                number = self.num_records + 1
                self.num_records += piece.num_rows
                if piece.num_rows == 1 and piece.nbytes > block.MAX_ROW_BYTES:
                    yield OversizedBlock(self.name, number, None, _head(piece), piece.nbytes)
                elif piece.num_rows:
                    yield BatchBlock(self.name, number, _as_stream(piece))


def parquet_batches(path: Path, label: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a Parquet file.

    Raises:
        DamageError: it cannot be read to its end.
        DataError: it has two columns of one name, or unpacks to far more than data does.
    """
    with _damage("Parquet"), pq.ParquetFile(path, page_checksum_verification=True) as file:
        _check_schema(file.schema_arrow, label)
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        size, unpacked = path.stat().st_size, sum(group.total_byte_size for group in groups)
        if unpacked > max(FREE_BYTES, MAX_RATIO * size):
            raise DataError(
                f"{label} has {size} bytes and unpacks to more than {MAX_RATIO} times as many ({unpacked}): no data "
                "does. If it is meant, write it without compression"
            )
        for index, group in enumerate(groups):
            row_bytes = group.total_byte_size // max(group.num_rows, 1) + 1
            batch_rows = min(max(block.CHUNK_BYTES // row_bytes, 1), MAX_BATCH_ROWS)
            yield from file.iter_batches(batch_size=batch_rows, row_groups=[index])


def arrow_batches(files: Iterable[Path], label: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of Arrow files or streams, one after the other.

    Raises:
        DamageError: one cannot be read to its end.
        DataError: one has two columns of one name.
    """
    for path in files:
        with _damage("Arrow"), pa.memory_map(str(path)) as source:
            is_file = source.read(len(ARROW_MAGIC)) == ARROW_MAGIC
            source.seek(0)
            with pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source) as reader:
                _check_schema(reader.schema, label)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches)) if is_file else reader
                for batch in batches:
                    _validate(batch)
                    yield batch
            if not is_file:
                source.seek(max(source.size() - len(END_OF_STREAM), 0))
                if source.read(len(END_OF_STREAM)) != END_OF_STREAM:
                    raise DamageError("Arrow", "the mark at its end is missing")


@contextmanager
def _damage(kind: str) -> Iterator[None]:
    """Turn what Arrow raises on damaged files into a DamageError."""
    try:
        yield
    except DataError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # Arrow reports damage as an OSError without one.
            raise
        raise DamageError(kind, str(error)[:300]) from None


def _check_schema(schema: pa.Schema, label: str) -> None:
    if len(set(schema.names)) != len(schema.names):
        raise DataError(f"{label} has two columns of one name, so which is meant is unknown. Rename one")


def _validate(batch: pa.RecordBatch) -> None:
    """Check that the batch's parts fit together: reading one that does not would crash. Texts may be no UTF-8."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        for array in batch.columns:
            array.view(_bytes_type(array.type)).validate(full=True)


def _bytes_type(kind: pa.DataType) -> pa.DataType:
    """Return the type with bytes in the place of texts."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_list(kind):
        return pa.list_(_bytes_type(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_bytes_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct(
            [(kind.field(index).name, _bytes_type(kind.field(index).type)) for index in range(kind.num_fields)]
        )
    return kind


def _decoded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with each value where its row is: dictionaries and views share values between rows."""
    columns = []
    for array in batch.columns:
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):
            array = array.cast(pa.large_string() if pa.types.is_string_view(array.type) else pa.large_binary())
        columns.append(array)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names) if columns else batch


def _sliced(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the batch in halves of halves, until each part is small or a single row."""
    if batch.num_rows <= 1 or (batch.num_rows <= block.MAX_BLOCK_ROWS and batch.nbytes <= block.CHUNK_BYTES):
        yield batch
        return
    middle = batch.num_rows // 2
    yield from _sliced(batch.slice(0, middle))
    yield from _sliced(batch.slice(middle))


def _as_stream(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _head(row: pa.RecordBatch) -> bytes:
    """Return the start of a row that is too large, as JSON text."""
    share = block.KEPT_BYTES // (2 * row.num_columns)
    values = {}
    for name, array in zip(row.schema.names, row.columns, strict=True):
        scalar = array[0]
        if hasattr(scalar, "as_buffer") and scalar.is_valid:
            values[name] = scalar.as_buffer()[:share].to_pybytes().decode("utf-8", errors="backslashreplace")
        else:
            values[name] = f"({array.type})"
    return json.dumps(values, ensure_ascii=False).encode("utf-8")


def _plain(array: pa.Array) -> pa.Array:
    """Return the array with numbers that JSON has."""
    return array.cast(pa.float64()) if pa.types.is_decimal(array.type) else array


def _as_text(value: dict[str, Any]) -> str:
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_PASSTHROUGH_DATETIME).decode()
    except (TypeError, orjson.JSONEncodeError):  # An integer beyond 64 bits, or nested deeper than it writes.
        return json.dumps(value, ensure_ascii=False, default=str)
