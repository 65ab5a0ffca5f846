"""Texts as one block of bytes: where to look closer, found without touching single texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Rows = NDArray[np.int64]
"""Places of texts in a column, ascending, each once."""

_SPACE, _NEWLINE, _TAB, _RETURN, _DELETE = 32, 10, 9, 13, 127
_UNICODE_SPACE = r"[\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}]"


class TextColumn:
    """A column of texts. Every number of it depends on one text only, whatever stands beside it."""

    def __init__(self, texts: Sequence[str | None]) -> None:
        self.array = _arrow(texts)
        _, offsets, data = self.array.buffers()
        self.size = len(self.array)
        self.offsets = np.frombuffer(offsets, np.int64, count=self.size + 1) if self.size else np.zeros(1, np.int64)
        end = int(self.offsets[-1])
        self.bytes = np.frombuffer(data, np.uint8, count=end) if end else np.zeros(0, np.uint8)
        self.everything: Rows = np.arange(self.size)

    def text(self, row: int) -> str:
        """Return one text; a missing one is empty."""
        return self.bytes[self.offsets[row] : self.offsets[row + 1]].tobytes().decode()

    def characters(self) -> NDArray[np.int32]:
        """Return the length of each text in characters (code points)."""
        return _numbers(pc.utf8_length(self.array))

    def rows_at(self, positions: NDArray[np.int64]) -> Rows:
        """Return the texts in which bytes at some (ascending) positions stand."""
        if not len(positions):
            return positions
        rows: Rows = np.searchsorted(self.offsets, positions, side="right") - 1
        first: Rows = rows[np.concatenate(([True], rows[1:] != rows[:-1]))]
        return first

    def count_at(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return how many of some (ascending) positions each text has."""
        return np.diff(np.searchsorted(positions, self.offsets)).astype(np.int32)

    def rows_with(self, *characters: str) -> Rows:
        """Return the texts that hold one of some ASCII characters."""
        found = self.bytes == ord(characters[0])
        for character in characters[1:]:
            found |= self.bytes == ord(character)
        return self.rows_at(np.flatnonzero(found))

    def rows_with_line_start(self, characters: str) -> Rows:
        """Return at least the texts of which a line starts with one of some characters."""
        starts = np.concatenate([self.offsets[:-1], self.newlines + 1])
        starts = np.sort(starts[starts < len(self.bytes)])
        first = np.zeros(256, np.bool_)
        first[[character.encode()[0] for character in characters]] = True
        return self.rows_at(starts[first[self.bytes[starts]]])

    def matching(self, pattern: str, rows: Rows, beginning: int | None = None) -> Rows:
        """Return those of some texts in which (in whose first characters) an RE2 pattern matches."""
        if not len(rows):
            return rows
        texts = self._taken(rows)
        if beginning is not None:
            texts = pc.utf8_slice_codeunits(texts, 0, beginning)
        mask = pc.fill_null(pc.match_substring_regex(texts, pattern), False)
        return rows[np.asarray(mask, np.bool_)]

    def count_matches(self, pattern: str, rows: Rows) -> NDArray[np.int32]:
        """Return how often an RE2 pattern matches in each text, 0 for texts that are not among `rows`."""
        counts = np.zeros(self.size, np.int32)
        if len(rows):
            counts[rows] = _numbers(pc.count_substring_regex(self._taken(rows), pattern))
        return counts

    def _taken(self, rows: Rows) -> pa.Array:
        return self.array if len(rows) == self.size else self.array.take(pa.array(rows))

    @cached_property
    def digits(self) -> NDArray[np.int64]:
        """Positions of ASCII digits."""
        return np.flatnonzero((self.bytes - np.uint8(48)) < 10)

    @cached_property
    def newlines(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.bytes == _NEWLINE)

    @cached_property
    def not_ascii(self) -> Rows:
        """Texts with a byte that is no ASCII."""
        return self.rows_at(np.flatnonzero(self.bytes >= 128))

    @cached_property
    def controls(self) -> Rows:
        """Texts with a C0 control character other than tab, line feed and carriage return, or with U+007F."""
        low = (self.bytes < _SPACE) & (self.bytes != _NEWLINE) & (self.bytes != _TAB) & (self.bytes != _RETURN)
        return self.rows_at(np.flatnonzero(low | (self.bytes == _DELETE)))

    @cached_property
    def words(self) -> NDArray[np.int32]:
        """Pieces between whitespace in each text, as `str.split` cuts them."""
        data = self.bytes
        inside = ~((data == _SPACE) | ((data - np.uint8(9)) < 5) | ((data - np.uint8(28)) < 4))
        starts = inside.copy()
        starts[1:] &= ~inside[:-1]
        firsts = self.offsets[:-1][self.offsets[:-1] < self.offsets[1:]]
        starts[firsts] = inside[firsts]
        counts = self.count_at(np.flatnonzero(starts))
        for row in self.matching(_UNICODE_SPACE, self.not_ascii):
            counts[row] = len(self.text(int(row)).split())
        return counts

    def digits_within(self, count: int, span: int) -> Rows:
        """Return at least the texts in which `count` digits stand within `span` bytes."""
        positions = self.digits
        if len(positions) < count:
            return positions[:0]
        near = positions[count - 1 :] - positions[: 1 - count] < span
        return self.rows_at(positions[count - 1 :][near])


def _arrow(texts: Sequence[str | None]) -> pa.Array:
    try:
        return pa.array(texts, pa.large_string())
    except UnicodeEncodeError:  # Lone surrogates: the row is quarantined for them, yet has to be counted here.
        repaired = [None if text is None else text.encode("utf-8", "replace").decode() for text in texts]
        return pa.array(repaired, pa.large_string())


def _numbers(array: pa.Array) -> NDArray[np.int32]:
    return np.asarray(pc.fill_null(array, 0)).astype(np.int32)
