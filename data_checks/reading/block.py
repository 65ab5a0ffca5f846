"""A piece of a file that can be sent to another process, and what all layouts of files have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_checks.rows import Finding, RawRow, Reason

CHUNK_BYTES = 4 << 20
"""Bytes read at once, and about the most a block carries: large enough that costs a block do not count, small enough
that the rows of a few blocks fit beside everything else."""
MAX_BLOCK_ROWS = 8192
"""Most rows of a block."""
MAX_ROW_BYTES = 64 << 20
"""A larger row is not read, whatever stands in it: a conversation of a million tokens has about 4 MiB."""
KEPT_BYTES = 1 << 20
"""How much of a row that is too large is kept for the quarantine."""


@dataclass(slots=True)
class TextRows:
    """Rows that are nearly all objects of the same few texts, as columns; an entry of each list a row."""

    name: str
    """What the file is called."""
    numbers: Sequence[int]
    offsets: Sequence[int | None]
    raws: Sequence[bytes]
    """The rows as they stand in the file."""
    columns: Sequence[Sequence[str]]
    """The texts under each key that was asked for."""
    odd: dict[int, RawRow]
    """Place -> row of those that are no such objects, or not certainly; in their columns anything may stand."""

    def without(self, places: Sequence[int]) -> TextRows:
        """Return the rows but for some."""
        out = set(places)
        left = [place for place in range(len(self.numbers)) if place not in out]
        moved = {place: index for index, place in enumerate(left)}
        picked: list[Sequence[Any]] = [
            [values[place] for place in left] for values in (self.numbers, self.offsets, self.raws, *self.columns)
        ]
        odd = {moved[place]: row for place, row in self.odd.items() if place in moved}
        return TextRows(self.name, picked[0], picked[1], picked[2], picked[3:], odd)


@dataclass(frozen=True, slots=True)
class Block(ABC):
    """Rows that follow each other in one file."""

    name: str
    """What to call the file in `RawRow.file`."""
    number: int
    """Number of the first row or line, from 1."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes that the block carries."""

    @abstractmethod
    def rows(self) -> list[RawRow]:
        """Return its rows, readable or not."""

    def texts(self, keys: Sequence[str]) -> TextRows | None:
        """Return its rows as columns where nearly all of them are objects with a text under each of these keys only.

        It is a quicker way to what `rows` gives; None: this block, or this kind of block, does not offer it.
        """
        return None


@dataclass(frozen=True, slots=True)
class OversizedBlock(Block):
    """One row that is too large to be read."""

    offset: int | None
    head: bytes
    """Its first bytes."""
    row_bytes: int
    """How many bytes it has."""

    @property
    def size_bytes(self) -> int:
        return len(self.head)

    def rows(self) -> list[RawRow]:
        return [oversized_row(self.name, self.number, self.offset, self.head, self.row_bytes)]


def oversized_row(name: str, number: int, offset: int | None, head: bytes, row_bytes: int) -> RawRow:
    """Return the row that stands for one too large to be read."""
    detail = f"the row has {row_bytes} bytes; rows of up to {MAX_ROW_BYTES} bytes are read"
    raw = head.decode("utf-8", errors="backslashreplace")
    return RawRow(name, number, raw, None, Finding(Reason.ROW_TOO_LARGE, detail), offset)
