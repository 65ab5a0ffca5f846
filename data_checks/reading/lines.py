"""JSON lines: one object a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count

from data_checks.reading.block import Block, TextRows
from data_checks.reading.cutting import Cutter, Piece, line_ends
from data_checks.reading.records import parse_records, parse_texts
from data_checks.rows import RawRow


@dataclass(frozen=True, slots=True)
class LineBlock(Block):
    """Whole lines of a file of JSON lines."""

    offset: int
    """Where the first line starts, in bytes of the unpacked file."""
    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def rows(self) -> list[RawRow]:
        records, offsets = self._records()
        return parse_records(records, self.name, count(self.number), offsets, self.data)

    def texts(self, keys: Sequence[str]) -> TextRows | None:
        records, offsets = self._records()
        return parse_texts(records, self.name, self.number, list(offsets), self.data, keys)

    def _records(self) -> tuple[list[bytes], Iterator[int]]:
        """Return the lines without what ends them, and where each starts."""
        lines = self.data.split(b"\n")
        offsets = accumulate(chain([self.offset], (len(line) + 1 for line in lines)))
        return [line.rstrip(b"\r") for line in lines] if b"\r" in self.data else lines, offsets


def line_blocks(chunks: Iterator[tuple[int, bytes]], cutter: Cutter) -> Iterator[Block]:
    """Yield the blocks of a file of JSON lines."""
    for piece in chain(cutter.pieces(chunks), cutter.last()):
        if isinstance(piece, Piece):
            yield LineBlock(cutter.name, piece.number, piece.offset, piece.data)
        else:
            yield piece


def line_cutter(name: str) -> Cutter:
    return Cutter(name, line_ends)
