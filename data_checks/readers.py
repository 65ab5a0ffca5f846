"""Files to rows. No row is dropped: what cannot be read becomes a row with a finding."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_checks.rows import REASON_ORDER, Finding, RawRow, Reason
from training_core.errors import DataError

SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".parquet")
GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_rows(path: Path, name: str) -> list[RawRow]:
    """Return every row of a JSONL(.gz) or Parquet file; blank lines are no rows.

    Args:
        path: the file.
        name: what to call it in messages and in `source_file`.

    Raises:
        DataError: there is no such file, it is of another kind than its name says, damaged, or without any row.
    """
    if not path.is_file():
        raise DataError(f"{name} is no file. Name a file that ends in one of: {', '.join(SUFFIXES)}")
    if not path.name.endswith(SUFFIXES):
        raise DataError(
            f"{name} is of an unknown kind. Allowed endings: {', '.join(SUFFIXES)}. Convert it to one of them"
        )
    try:
        rows = list(_read_parquet(path, name) if path.suffix == ".parquet" else _read_lines(path, name))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{name} is a damaged gzip file ({error}). Fetch it again") from None
    except pa.ArrowException as error:
        raise DataError(f"{name} is a damaged Parquet file ({error}). Write it again") from None
    if not rows:
        raise DataError(f"{name} holds no rows. Check the path, or the program that wrote it")
    return rows


def _read_lines(path: Path, name: str) -> Iterator[RawRow]:
    with path.open("rb") as stream:
        magic = stream.read(4)
    if not magic:
        return
    is_gzip = magic.startswith(GZIP_MAGIC)
    if magic == PARQUET_MAGIC or is_gzip != (path.suffix == ".gz"):
        kind = "Parquet" if magic == PARQUET_MAGIC else "gzip" if is_gzip else "plain text"
        raise DataError(f"{name} holds {kind}, which its name does not say. Rename it: {', '.join(SUFFIXES)}")
    with gzip.open(path, "rb") if is_gzip else path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield parse_line(line.rstrip(b"\r\n"), name, number)


def parse_line(line: bytes, name: str, number: int) -> RawRow:
    """Return the row of one JSONL line."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raw = line.decode("utf-8", errors="backslashreplace")
        return _unreadable(name, number, raw, Reason.INVALID_UNICODE, f"byte {error.start} of the line is not UTF-8")
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        return _unreadable(name, number, text, Reason.MALFORMED_JSON, f"{error.msg} at character {error.pos}")
    except (ValueError, RecursionError) as error:
        return _unreadable(name, number, text, Reason.MALFORMED_JSON, f"{type(error).__name__}: {error}"[:200])
    if not isinstance(value, dict):
        return _unreadable(
            name, number, text, Reason.MALFORMED_JSON, f"the line is a JSON {type(value).__name__}, not an object"
        )
    return _checked(name, number, text, value)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return value


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _read_parquet(path: Path, name: str) -> Iterator[RawRow]:
    with path.open("rb") as stream:
        if stream.read(4) != PARQUET_MAGIC:
            raise DataError(f"{name} is no Parquet file, although its name says so. Rename or convert it")
    number = 0
    with pq.ParquetFile(path) as file:
        if len(set(file.schema_arrow.names)) != len(file.schema_arrow.names):
            raise DataError(f"{name} has two columns of one name, so which is meant is unknown. Rename one")
        for batch in file.iter_batches(batch_size=1024):
            for index in range(batch.num_rows):
                number += 1
                yield _parquet_row(batch, index, name, number)


def _parquet_row(batch: pa.RecordBatch, index: int, name: str, number: int) -> RawRow:
    value: dict[str, Any] = {}
    broken: dict[str, Reason] = {}
    for column, array in zip(batch.schema.names, batch.columns, strict=True):
        try:
            value[column] = array[index].as_py()
        except UnicodeDecodeError:
            broken[column] = Reason.INVALID_UNICODE
            scalar = array[index]
            data = scalar.as_buffer().to_pybytes() if hasattr(scalar, "as_buffer") else b"(nested value)"
            value[column] = data.decode("utf-8", errors="backslashreplace")
        except (ValueError, OverflowError):  # A time beyond Python's calendar, for example.
            broken[column] = Reason.WRONG_TYPE
            value[column] = "(unreadable value)"
    raw = json.dumps(value, ensure_ascii=False, default=str)
    if broken:
        reason = min(broken.values(), key=REASON_ORDER.__getitem__)
        return _unreadable(name, number, raw, reason, f"unreadable value in column {', '.join(broken)}")
    return _checked(name, number, raw, value)


def _unreadable(name: str, number: int, raw: str, reason: Reason, detail: str) -> RawRow:
    return RawRow(name, number, raw, None, Finding(reason, detail))


def _checked(name: str, number: int, raw: str, value: dict[str, Any]) -> RawRow:
    """Return the row without its null columns, unless some text in it cannot be stored or passed on."""
    for text in _texts(value):
        if "\x00" in text:
            return _unreadable(name, number, raw, Reason.NUL_CHARACTER, "a text holds a NUL character")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            return _unreadable(name, number, raw, Reason.INVALID_UNICODE, "a text holds a lone surrogate")
    return RawRow(name, number, raw, {key: item for key, item in value.items() if item is not None})


def _texts(value: Any) -> Iterator[str]:
    """Yield every string inside `value`; a stack, since a row may be nested as deep as JSON allows."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
