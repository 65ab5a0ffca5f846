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

from data_checks.files import GZIP_MAGIC, check_file
from data_checks.rows import REASON_ORDER, Finding, RawRow, Reason, kind_of
from training_core.errors import DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_rows(path: Path, name: str, label: str | None = None) -> list[RawRow]:
    """Return every row of a JSONL(.gz) or Parquet file; blank lines are no rows.

    Args:
        path: the file.
        name: what to call it in `source_file`.
        label: what to call it in messages: the config's field and the path. Default: the name.

    Raises:
        ConfigurationError: there is no such file, or it is of a kind that is not read.
        DataError: it is of another kind than its name says, damaged, or without any row.
    """
    label = label or name
    check_file(path, label)
    try:
        rows = list(_read_parquet(path, name, label) if path.suffix == ".parquet" else _read_lines(path, name))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{label} is a damaged gzip file ({error}). Fetch or write it again") from None
    except (pa.ArrowException, OSError) as error:  # Arrow reports some damage as an OSError without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(f"{label} is a damaged Parquet file ({error}). Write it again") from None
    if not rows:
        raise DataError(f"{label} holds no rows. Check the path, or the program that wrote it")
    return rows


def _read_lines(path: Path, name: str) -> Iterator[RawRow]:
    with path.open("rb") as stream:
        is_gzip = stream.read(len(GZIP_MAGIC)) == GZIP_MAGIC
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
    except ValueError as error:
        return _unreadable(name, number, text, Reason.MALFORMED_JSON, str(error)[:200])
    except RecursionError:
        return _unreadable(name, number, text, Reason.MALFORMED_JSON, "its values are nested too deep to be read")
    if not isinstance(value, dict):
        return _unreadable(name, number, text, Reason.MALFORMED_JSON, f"the line is {kind_of(value)}, not an object")
    return _checked(name, number, text, value)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return value


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _read_parquet(path: Path, name: str, label: str) -> Iterator[RawRow]:
    number = 0
    with pq.ParquetFile(path) as file:
        if len(set(file.schema_arrow.names)) != len(file.schema_arrow.names):
            raise DataError(f"{label} has two columns of one name, so which is meant is unknown. Rename one")
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
