"""JSON text to rows: one parser for speed, one for the exact reason of a refusal. They agree on every line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from types import NoneType
from typing import Any

import numpy as np
import orjson

from data_checks.reading.block import TextRows
from data_checks.rows import Finding, RawRow, Reason, kind_of

MAX_DEPTH = 200
"""Deepest nesting of a row. A limit of ours, since what parsers and writers of JSON take depends on the stack they run
on (from 254 levels); rows in the wild have up to about ten."""
EXACT_INTEGER = float(2**63)
"""From here on the fast parser may return an integer as the nearest float."""
TOO_DEEP = "its values are nested too deep to be read"
SPACES = b" \t\r\n"
BRACKETS = re.compile(rb'[\[\]{}]|"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
BEFORE_COLON = np.zeros(256, np.bool_)
BEFORE_COLON[list(b'"' + SPACES)] = True
MAX_ODD_FRACTION = 0.1
"""With more rows that are not plain it is quicker to take each by itself."""
SLICE_BYTES = 1 << 16
"""What is looked at together: it stays in the processor's cache."""
PLAIN = frozenset({str, int, bool, NoneType})
"""Types of values that hold no keys and are what the text says."""


def parse_records(
    records: Sequence[bytes], name: str, numbers: Iterable[int], offsets: Iterable[int], data: bytes
) -> list[RawRow]:
    """Return a row for each JSON text that is not blank.

    Args:
        records: the texts, without what separates them.
        name: what to call the file.
        numbers: the number of each record.
        offsets: where each starts, in bytes of the unpacked file.
        data: text in which all of them stand, to look at once for what is rare.
    """
    rows: list[RawRow] = []
    checks_nul = rb"\u0000" in data
    keys: list[tuple[int, int, bytes]] = []
    num_keys = 0
    loads, refused = orjson.loads, orjson.JSONDecodeError
    for record, number, offset in zip(records, numbers, offsets, strict=False):
        try:
            value = loads(record)
        except refused:
            if record.strip():
                rows.append(parse_line(record, name, number, offset))
            continue
        if type(value) is not dict:
            rows.append(parse_line(record, name, number, offset))
            continue
        kinds = set(map(type, value.values()))
        count = len(value) if kinds <= PLAIN else _count_keys(value, 1)
        if count < 0 or (checks_nul and rb"\u0000" in record):
            rows.append(parse_line(record, name, number, offset))
            continue
        keys.append((len(rows), count, record))
        num_keys += count
        if NoneType in kinds:
            value = {key: item for key, item in value.items() if item is not None}
        rows.append(RawRow(name, number, record.decode(), value, None, offset))
    if num_keys != _most_members(data):
        for index, count, record in keys:
            # A key that occurs twice is one key of the parsed value and two members of the text.
            if _may_repeat_key(record, count):
                row = rows[index]
                rows[index] = parse_line(record, name, row.number, row.offset)
    return rows


def parse_texts(
    records: Sequence[bytes], name: str, first: int, offsets: Sequence[int], data: bytes, keys: Sequence[str]
) -> TextRows | None:
    """Return JSON texts as columns where nearly all are objects of a few texts, else None.

    Args:
        records: the texts, without what separates them.
        name: what to call the file.
        first: number of the first record.
        offsets: where each starts, in bytes of the unpacked file.
        data: text in which all of them stand.
        keys: two or more; an object must have these and no others.
    """
    blank: list[int] = []
    odd: list[int] = []
    texts: list[tuple[str, ...]] = []
    nothing = ("",) * len(keys)
    loads, wanted, num_keys = orjson.loads, itemgetter(*keys), len(keys)
    for place, record in enumerate(records):
        try:
            value = loads(record)
            found = wanted(value)
            if len(value) != num_keys:
                odd.append(place)
        except (orjson.JSONDecodeError, KeyError, TypeError):
            found = nothing
            (odd if record.strip() else blank).append(place)
        texts.append(found)
        if len(odd) > MAX_ODD_FRACTION * len(records):
            return None
    columns: list[Sequence[str]] = list(zip(*texts, strict=True))
    for index, column in enumerate(columns):
        if set(map(type, column)) != {str}:
            odd += [place for place, text in enumerate(column) if type(text) is not str]
            columns[index] = [text if type(text) is str else "" for text in column]
    if rb"\u0000" in data:
        odd += [place for place, record in enumerate(records) if rb"\u0000" in record]
    # Where some records are odd, the sum over all of them says nothing about one.
    if odd or _most_members(data) != num_keys * (len(records) - len(blank)):
        # A key that occurs twice is one key of the parsed value and two members of the text.
        odd += [place for place, record in enumerate(records) if _may_repeat_key(record, num_keys)]
    if len(odd) > MAX_ODD_FRACTION * len(records):
        return None
    rows = {
        place: parse_records(records[place : place + 1], name, [first + place], offsets[place:], records[place])[0]
        for place in sorted(set(odd).difference(blank))
    }
    found_rows = TextRows(name, range(first, first + len(records)), offsets[: len(records)], records, columns, rows)
    return found_rows.without(blank) if blank else found_rows


def _may_repeat_key(record: bytes, num_keys: int) -> bool:
    """Return whether the objects of a record may have more members than the `num_keys` keys that were parsed."""
    return record.count(b":") != num_keys and record.translate(None, SPACES).count(b'":') != num_keys


def parse_line(line: bytes, name: str, number: int, offset: int | None = None) -> RawRow:
    """Return the row of one JSON text: its value without null columns, or the finding that says why there is none."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raw = line.decode("utf-8", errors="backslashreplace")
        detail = f"byte {error.start} of the line is not UTF-8"
        return RawRow(name, number, raw, None, Finding(Reason.INVALID_UNICODE, detail), offset)
    value, problem = (None, TOO_DEEP) if is_deep(line) else _parse(text)
    if problem is not None:
        return RawRow(name, number, text, None, Finding(Reason.MALFORMED_JSON, problem), offset)
    return checked_row(RawRow(name, number, text, value, None, offset))


def checked_row(row: RawRow) -> RawRow:
    """Return a row with its null columns left out, unless some text in it cannot be stored or passed on."""
    value = row.value or {}
    for text in _texts(value):
        if "\x00" in text:
            return refused_row(row, Finding(Reason.NUL_CHARACTER, "a text holds a NUL character"))
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            return refused_row(row, Finding(Reason.INVALID_UNICODE, "a text holds a lone surrogate"))
    present = {key: item for key, item in value.items() if item is not None}
    return RawRow(row.file, row.number, row.raw, present, None, row.offset)


def refused_row(row: RawRow, finding: Finding) -> RawRow:
    """Return a row without its value, for the reason given."""
    return RawRow(row.file, row.number, row.raw, None, finding, row.offset)


def _count_keys(value: Any, depth: int) -> int:
    """Return the keys of all objects in `value`, or -1 where the fast parser's value may not be the text's."""
    if depth > MAX_DEPTH:
        return -1
    items, count = (value.values(), len(value)) if type(value) is dict else (value, 0)
    for item in items:
        kind = type(item)
        if kind is str:
            continue
        if kind is dict or kind is list:
            inner = _count_keys(item, depth + 1)
            if inner < 0:
                return -1
            count += inner
        elif kind is float and not -EXACT_INTEGER < item < EXACT_INTEGER:
            return -1
    return count


def _most_members(data: bytes) -> int:
    """Return at least how many members the objects in `data` have: a member's colon follows a quote or a space."""
    codes = np.frombuffer(data, np.uint8)
    total = 0
    for start in range(1, len(codes), SLICE_BYTES):
        colons = np.flatnonzero(codes[start : start + SLICE_BYTES] == ord(":")) + (start - 1)
        total += int(np.count_nonzero(BEFORE_COLON[codes[colons]]))
    return total


def is_deep(line: bytes) -> bool:
    """Return whether brackets outside strings are nested deeper than `MAX_DEPTH`."""
    if line.count(b"[") + line.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for token in BRACKETS.finditer(line):
        first = line[token.start()]
        depth += 1 if first in b"[{" else -1 if first in b"]}" else 0
        if depth > MAX_DEPTH:
            return True
    return False


def _parse(text: str) -> tuple[dict[str, Any] | None, str | None]:
    """Return the object that `text` is, or what is wrong with it."""
    try:
        value = load_json(text)
    except json.JSONDecodeError as error:
        return None, f"{error.msg.removesuffix(' at')} at character {error.pos}"
    except ValueError as error:
        return None, str(error)[:200]
    except RecursionError:
        return None, TOO_DEEP
    if not isinstance(value, dict):
        return None, f"the line is {kind_of(value)}, not an object"
    return value, None


def load_json(text: str) -> Any:
    """Return what JSON text holds.

    Raises:
        json.JSONDecodeError: it is no JSON.
        ValueError: it holds a key twice in one object, an infinity, or a number that would become one. NaN, which
            Python writes for a missing number, is taken as it is in tables.
        RecursionError: it is nested very deep.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return value


def _constant(constant: str) -> float:
    if constant == "NaN":
        return float("nan")
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number is too large to be held")
    return value


def _texts(value: Any) -> Iterator[str]:
    """Yield every string inside `value`, keys included; a stack, since a row may be nested deep."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
