"""CSV and TSV: a header and records of text, with newlines inside quotes."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from data_checks.naming import name_columns
from data_checks.reading.block import MAX_ROW_BYTES, Block
from data_checks.reading.cutting import Cutter, Piece, Positions, line_ends
from data_checks.reading.records import checked_row, is_deep, load_json, refused_row
from data_checks.reading.streams import DamageError
from data_checks.rows import Finding, RawRow, Reason
from training_core.errors import DataError

DELIMITERS = {".csv": ",", ".tsv": "\t"}
TEXT_COLUMNS = frozenset({
    "answer", "answer_0", "answer_1", "chosen", "completion", "ground_truth", "history", "input", "instruction",
    "output", "prompt", "question", "rejected", "response", "response1", "response2", "response_0", "response_1",
    "response_2", "solution", "system", "text",
})  # fmt: skip
"""Columns whose text may look like JSON and be none: in these, only a list of chat messages is read as one."""
ANSWER_COLUMNS = frozenset({
    "answer_0", "answer_1", "chosen", "completion", "rejected", "response", "response1", "response2", "response_0",
    "response_1", "response_2",
})  # fmt: skip
NUMBER_COLUMNS = frozenset({
    "average_rating", "better_response_id", "choice", "chosen-rating", "chosen_score", "coherence", "complexity",
    "correctness", "helpfulness", "labels", "margin", "num_correct", "num_samples", "overall_preference", "pass_rate",
    "preference_strength", "rating", "rejected-rating", "rejected_score", "safer_response_id", "score_0", "score_1",
    "score_A", "score_B", "score_chosen", "score_rejected", "verbosity",
})  # fmt: skip
"""Columns of numbers, which CSV writes as text. A ground truth is none: "007" may be meant as it stands."""
TRUTH_COLUMNS = frozenset({"is_response_0_safe", "is_response_1_safe", "kto_tag", "label"})
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,20})?(?:[eE][-+]?[0-9]{1,2})?")
PYTHON_NOTATION = re.compile(r"\s*(?:array\(\s*)?[\[(]\s*\{'(?:role|content|from|value)':")
"""How pandas writes a column of chats into CSV: as Python source, which is no JSON."""
CHAT_START = re.compile(r'\[\s*\{\s*"(?:role|content|from|value)"')
TO_CLOSING_QUOTE = re.compile(rb'[^"]*+(?:""[^"]*+)*+')


@dataclass(frozen=True, slots=True)
class RecordBlock(Block):
    """Whole records of a CSV or TSV file."""

    offset: int
    """Where the data starts, in bytes of the unpacked file."""
    data: bytes
    ends: bytes
    """Behind each record and its newline, as 64-bit integers of this machine."""
    header: tuple[str, ...]
    delimiter: str

    @property
    def size_bytes(self) -> int:
        return len(self.data) + len(self.ends)

    def rows(self) -> list[RawRow]:
        csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES))
        rows = []
        start = 0
        for number, end in enumerate(np.frombuffer(self.ends, np.int64).tolist(), start=self.number):
            record = self.data[start:end].rstrip(b"\r\n")
            if record.strip():
                rows.append(self._row(record, number, self.offset + start))
            start = end
        return rows

    def _row(self, record: bytes, number: int, offset: int) -> RawRow:
        try:
            text = record.decode("utf-8")
        except UnicodeDecodeError as error:
            raw = record.decode("utf-8", errors="backslashreplace")
            detail = f"byte {error.start} of the row is not UTF-8"
            return RawRow(self.name, number, raw, None, Finding(Reason.INVALID_UNICODE, detail), offset)
        row = RawRow(self.name, number, text, None, None, offset)
        try:
            fields = next(csv.reader([text], delimiter=self.delimiter))
        except csv.Error as error:
            return refused_row(row, Finding(Reason.MALFORMED_JSON, f"the row is no CSV: {str(error)[:100]}"))
        if len(fields) != len(self.header):
            detail = f"the row has {len(fields)} fields, the header names {len(self.header)}"
            return refused_row(row, Finding(Reason.MALFORMED_JSON, detail))
        row.value = {}
        for column, field in zip(self.header, fields, strict=True):
            try:
                # An empty field is how CSV writes null; an answer that a row must have is blank then.
                row.value[column] = _cell(column, field) if field else "" if column in ANSWER_COLUMNS else None
            except _CellError as error:
                return refused_row(row, Finding(error.reason, f"column {name_columns([column])} {error}"))
        if "\x00" in text or "\\" in text:
            return checked_row(row)
        row.value = {column: value for column, value in row.value.items() if value is not None}
        return row


class _CellError(ValueError):
    """A field is written in a way that looks like text and is meant as something else."""

    def __init__(self, detail: str, reason: Reason) -> None:
        super().__init__(detail)
        self.reason = reason


def _cell(column: str, field: str) -> Any:
    """Return a field's text, or what it holds where that is written as JSON, or is a number or a truth value."""
    if column in NUMBER_COLUMNS and NUMBER.fullmatch(field):
        return load_json(field)
    if column in TRUTH_COLUMNS and field.lower() in ("true", "false"):
        return field.lower() == "true"
    if field[0] not in "[{a( ":
        return field
    if PYTHON_NOTATION.match(field):
        raise _CellError("holds a chat in Python's notation, not in JSON", Reason.WRONG_TYPE)
    is_text = column.lower() in TEXT_COLUMNS
    if field[0] not in "[{" or is_deep(field.encode("utf-8", "replace")):
        return field
    try:
        value = load_json(field)
    except json.JSONDecodeError:
        return field
    except ValueError as error:
        if is_text and not CHAT_START.match(field):
            return field
        raise _CellError(f"holds JSON that cannot be used: {str(error)[:100]}", Reason.MALFORMED_JSON) from None
    return value if not is_text or _is_chat(value) else field


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(item, dict) and _is_message(item) for item in value)
    )


def _is_message(item: dict[str, Any]) -> bool:
    return {"role", "content"} <= item.keys() or {"from", "value"} <= item.keys()


class RecordEnds:
    """Finds where records end: behind each newline outside quotes.

    As Python's csv module reads them: a quote opens a quoted field only at the field's start, two quotes in a quoted
    field are one, and what follows a closing quote belongs to the field.
    """

    def __init__(self, delimiter: str) -> None:
        self.is_inside = False
        """Whether the text so far ends inside quotes."""
        self._opening = re.compile(rb'[\n%s]"' % delimiter.encode())
        self._starts_field = True
        self._delimiter = delimiter.encode()
        self._is_pending = False
        """Whether the last byte inside quotes was a quote: the next byte says whether it closes the field."""

    def __call__(self, chunk: bytes) -> Positions:
        bounds = [0] if self.is_inside else []
        place = 0
        if self._is_pending and chunk:
            self._is_pending = False
            if chunk[:1] == b'"':
                place = 1
            else:
                self.is_inside = self._starts_field = False
                bounds = []
        while place < len(chunk):
            step = self._leave if self.is_inside else self._enter
            place = step(chunk, place, bounds)
        self._starts_field = not self.is_inside and chunk[-1:] in (b"\n", self._delimiter)
        ends = line_ends(chunk)
        if bounds:
            ends = ends[(np.searchsorted(np.array(bounds), ends - 1, side="right") & 1) == 0]
        return ends

    @property
    def is_unclosed(self) -> bool:
        """Whether a text that ends here ends in the middle of a quoted field."""
        return self.is_inside and not self._is_pending

    def _enter(self, chunk: bytes, place: int, bounds: list[int]) -> int:
        """Go to the next quoted field; return where its text starts."""
        if place == 0 and self._starts_field and chunk[:1] == b'"':
            found = 0
        else:
            match = self._opening.search(chunk, place) if chunk.find(b'"', place) >= 0 else None
            if match is None:
                return len(chunk)
            found = match.end() - 1
        self.is_inside = True
        bounds.append(found)
        return found + 1

    def _leave(self, chunk: bytes, place: int, bounds: list[int]) -> int:
        """Go to the end of a quoted field; return where the text behind it starts."""
        match = TO_CLOSING_QUOTE.match(chunk, place)
        assert match is not None  # It matches anywhere.
        end = match.end()
        if end == len(chunk):
            return end
        if end + 1 == len(chunk):
            self._is_pending = True
            return end + 1
        self.is_inside = False
        bounds.append(end)
        return end + 1


def record_cutter(name: str, suffix: str) -> Cutter:
    """Return what cuts a CSV or TSV file into its records."""
    return Cutter(name, RecordEnds(DELIMITERS[suffix]))


def record_blocks(chunks: Iterator[tuple[int, bytes]], cutter: Cutter, suffix: str, label: str) -> Iterator[Block]:
    """Yield the blocks of a CSV or TSV file. The header has no number; the record behind it is row 1.

    Raises:
        DamageError: a quoted field is not closed.
        DataError: the header names no columns, or one twice.
    """
    ends, delimiter = cutter.find_ends, DELIMITERS[suffix]
    assert isinstance(ends, RecordEnds)
    header: tuple[str, ...] | None = None
    num_skipped = 0
    for piece in chain(cutter.pieces(chunks), _last(cutter, ends)):
        if not isinstance(piece, Piece):
            if header is None:
                raise DataError(f"{label} has no header: its first row has {piece.size_bytes} bytes or more")
            yield type(piece)(piece.name, piece.number - num_skipped, piece.offset, piece.head, piece.row_bytes)
            continue
        start = 0
        if header is None:
            start, first = _first_record(piece)
            header = _header(first, delimiter, label)
            num_skipped = piece.number - 1 + start
        yield from _block(piece, start, num_skipped, cutter.name, header, delimiter)


def _last(cutter: Cutter, ends: RecordEnds) -> Iterator[Any]:
    if ends.is_unclosed:
        raise DamageError("CSV", "a quoted field is not closed")
    yield from cutter.last()


def _first_record(piece: Piece) -> tuple[int, bytes]:
    """Return the first record that is not blank, and how many records it and the blank ones before it are."""
    start = 0
    for index, end in enumerate(piece.ends.tolist(), start=1):
        record = piece.data[start:end]
        if record.strip():
            return index, record
        start = end
    raise AssertionError("a cutter leaves blank pieces out")


def _block(
    piece: Piece, start: int, num_skipped: int, name: str, header: tuple[str, ...], delimiter: str
) -> Iterator[Block]:
    base = int(piece.ends[start - 1]) if start else 0
    data = piece.data[base:]
    if data.strip():
        ends = (piece.ends[start:] - base).astype(np.int64).tobytes()
        number = piece.number + start - num_skipped
        yield RecordBlock(name, number, piece.offset + base, data, ends, header, delimiter)


def _header(record: bytes, delimiter: str, label: str) -> tuple[str, ...]:
    try:
        text = record.decode("utf-8").strip("\r\n")
        columns = tuple(next(csv.reader([text], delimiter=delimiter)))
    except (UnicodeDecodeError, csv.Error, StopIteration):
        advice = "Write it as UTF-8, with the columns' names in the first row and newlines at the ends of rows"
        raise DataError(f"{label} has no readable header. {advice}") from None
    if len(set(columns)) != len(columns):
        raise DataError(f"{label} has two columns of one name, so which is meant is unknown. Rename one")
    others = [other for other in (",", "\t", ";", "|") if other in text and other != delimiter]
    if len(columns) == 1 and others:
        suffix = ".tsv" if delimiter != "," else ".csv"
        raise DataError(
            f"{label} has one column, and {others[0]!r} in its name: columns of a {suffix} file are separated by "
            f"{delimiter!r}. Write it with that, or name it .tsv where tabs separate"
        )
    return columns
