"""A JSON list of objects, cut into its items without holding it. Each item is then read as a line of JSON lines is.

A parser of JSON events would also stream, but replaces lone surrogates and repeated keys in silence and stops at the
first defect; cutting at the list's commas keeps the exact text of each item, and one bad item costs one row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count

import numpy as np
from numpy.typing import NDArray

from data_checks.naming import name_columns
from data_checks.reading.block import Block
from data_checks.reading.cutting import Cutter, Piece, Positions
from data_checks.reading.records import SLICE_BYTES, SPACES, parse_records
from data_checks.reading.streams import DamageError
from data_checks.rows import RawRow
from training_core.errors import DataError

LIST_KEY = "data"
"""The member that holds the rows where a list is wrapped in an object, as in `{"version": 1, "data": [...]}`."""
MAX_OPEN = 1 << 20
"""Most brackets that are open at once: such a file is no list of rows, and reading on would only take time."""
MAX_WRAPPER_BYTES = 1 << 20
"""Most text before or behind the list in such an object."""
SPACE = re.compile(r"[ \t\r\n]*")
COLON = re.compile(r"[ \t\r\n]*:[ \t\r\n]*")
ITEMS = re.compile(r"\[[ \t\r\n]*(?:[{\]]|\Z)")
STRUCTURE = np.zeros(256, np.bool_)
STRUCTURE[list(b'"[]{},')] = True


@dataclass(frozen=True, slots=True)
class ItemBlock(Block):
    """Whole items of a JSON list."""

    offset: int
    """Where the data starts, in bytes of the unpacked file."""
    data: bytes
    ends: bytes
    """Behind each item and its comma or bracket, as 64-bit integers of this machine."""

    @property
    def size_bytes(self) -> int:
        return len(self.data) + len(self.ends)

    def rows(self) -> list[RawRow]:
        records, offsets, numbers = [], [], []
        start = 0
        for number, end in zip(count(self.number), np.frombuffer(self.ends, np.int64).tolist(), strict=False):
            part = self.data[start : end - 1].lstrip(SPACES)
            # Nothing between two commas is malformed, not a blank line: no item's text is a comma.
            records.append(part.rstrip(SPACES) or b",")
            offsets.append(self.offset + end - 1 - len(part))
            numbers.append(number)
            start = end
        return parse_records(records, self.name, numbers, offsets, self.data)


class ItemEnds:
    """Finds where the items of a list end; the first byte it is given is the list's opening bracket."""

    def __init__(self) -> None:
        self.closed_at: int | None = None
        """Where the bytes behind the list start in the last chunk, once it is closed."""
        self.is_hopeless = False
        """Whether more brackets are open than any list of rows opens."""
        self._depth = 0
        self._in_string = 0
        self._is_escaped = False

    def __call__(self, chunk: bytes) -> Positions:
        if self._is_escaped:
            chunk = b"_" + chunk[1:]
        clean = chunk.replace(rb"\\", b"__")
        self._is_escaped = clean.endswith(b"\\")
        codes = np.frombuffer(clean.replace(rb"\"", b"__"), np.uint8)
        found = []
        for start in range(0, len(codes), SLICE_BYTES):
            found.append(self._ends_in(codes[start : start + SLICE_BYTES]) + start)
            if self.closed_at is not None:
                self.closed_at += start
                break
            if self.is_hopeless:
                break
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _ends_in(self, codes: NDArray[np.uint8]) -> Positions:
        """Return the ends in text without escaped quotes, which follows what was seen before."""
        places = np.flatnonzero(STRUCTURE[codes])
        if not len(places):
            return places
        marks = codes[places]
        inside = (np.cumsum(marks == ord('"')) + self._in_string) & 1
        opens, closes = (marks | 32) == ord("{"), (marks | 32) == ord("}")
        depths = np.cumsum(np.where(inside == 1, 0, opens.astype(np.int64) - closes)) + self._depth
        is_close = closes & (depths == 0) & (inside == 0)
        is_end = is_close | ((marks == ord(",")) & (depths == 1) & (inside == 0))
        self._depth, self._in_string = int(depths[-1]), int(inside[-1])
        self.is_hopeless = self._depth > MAX_OPEN
        ends: Positions = places[is_end] + 1
        if is_close.any():
            self.closed_at = int(places[is_close.argmax()]) + 1
            ends = ends[ends <= self.closed_at]
        return ends


def item_cutter(name: str) -> Cutter:
    """Return what cuts a list into its items."""
    return Cutter(name, ItemEnds())


def item_blocks(chunks: Iterator[tuple[int, bytes]], cutter: Cutter, prefix: bytes, label: str) -> Iterator[Block]:
    """Yield the blocks of a file that is one list.

    Args:
        chunks: the file from the list's opening bracket on.
        cutter: made by `item_cutter`.
        prefix: what stands before the list; empty unless it is wrapped in an object.
        label: what to call the file in messages.

    Raises:
        DamageError: the list is not closed, or something follows it.
        DataError: the object around the list holds another one.
    """
    ends = cutter.find_ends
    assert isinstance(ends, ItemEnds)
    start, first = next(chunks)
    ends(first[:1])  # The bracket is no part of the first item.
    for offset, chunk in chain([(start + 1, first[1:])], chunks):
        for piece in cutter.pieces([(offset, chunk)]):
            if isinstance(piece, Piece):
                yield from _block_of(piece, cutter.name, ends)
            else:
                yield piece
        if ends.is_hopeless:
            raise DamageError("JSON", f"more than {MAX_OPEN} brackets are open")
        if ends.closed_at is not None:
            _check_close(chunk[ends.closed_at - 1 : ends.closed_at])
            _check_rest(chain([chunk[ends.closed_at :]], (rest for _, rest in chunks)), prefix, label)
            return
    raise DamageError("JSON", "the list is not closed: the file ends inside it")


def find_list(head: bytes) -> int | None:
    """Return where the list's bracket stands in a file that starts with `head`: one list, or an object around one.

    >>> find_list(b' [{"a": 1}]'), find_list(b'{"version": "1", "data": [{"a": 1}]}'), find_list(b'{"a": 1}')
    (1, 25, None)
    """
    blank = len(head) - len(head.lstrip(SPACES))
    if head[blank : blank + 1] == b"[":
        return blank
    text = head[:MAX_WRAPPER_BYTES].decode("utf-8", errors="surrogateescape")
    decoder = json.JSONDecoder()
    place = SPACE.match(text).end()  # type: ignore[union-attr]  # It matches anywhere.
    try:
        while text[place : place + 1] in ("{", ","):
            key, place = decoder.raw_decode(text, SPACE.match(text, place + 1).end())  # type: ignore[union-attr]
            colon = COLON.match(text, place)
            if colon is None or not isinstance(key, str):
                return None
            place = colon.end()
            if key == LIST_KEY:
                return len(text[:place].encode("utf-8", "surrogateescape")) if ITEMS.match(text, place) else None
            _, place = decoder.raw_decode(text, place)
            place = SPACE.match(text, place).end()  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        pass
    return None


def _block_of(piece: Piece, name: str, ends: ItemEnds) -> Iterator[ItemBlock]:
    is_whole_list = piece.number == 1 and len(piece.ends) == 1 and ends.closed_at is not None
    if not (is_whole_list and not piece.data[:-1].strip(SPACES)):  # `[]` has no item.
        yield ItemBlock(name, piece.number, piece.offset, piece.data, piece.ends.astype(np.int64).tobytes())


def _check_close(bracket: bytes) -> None:
    if bracket != b"]":
        raise DamageError("JSON", "the list ends with a curly bracket: one is closed twice, or not opened")


def _check_rest(parts: Iterator[bytes], prefix: bytes, label: str) -> None:
    """Check that nothing but the end of the object around it follows the list."""
    rest = b""
    for part in parts:
        rest = (rest + part).lstrip(SPACES)
        if len(rest) > MAX_WRAPPER_BYTES or (rest and not prefix):
            break
    if not prefix:
        if rest:
            raise DamageError("JSON", "something follows the list's end")
        return
    try:
        members = json.loads(prefix + b"null" + rest)
    except (ValueError, RecursionError):
        raise DamageError("JSON", "what follows the list is not the end of the object around it") from None
    others = [key for key, value in members.items() if isinstance(value, list)]
    if others:
        raise DataError(
            f"{label} holds several lists: {name_columns([LIST_KEY, *others])}. Write the rows that are meant into a "
            "file of their own"
        )
