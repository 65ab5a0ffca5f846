"""JSON lines: one object a line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, count

from data_checks.reading.block import Block
from data_checks.reading.cutting import Cutter, Piece, line_ends
from data_checks.reading.records import parse_records
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
        lines = self.data.split(b"\n")
        offsets = accumulate(chain([self.offset], (len(line) + 1 for line in lines)))
        records = [line.rstrip(b"\r") for line in lines] if b"\r" in self.data else lines
        return parse_records(records, self.name, count(self.number), offsets, self.data)


def line_blocks(chunks: Iterator[tuple[int, bytes]], cutter: Cutter) -> Iterator[Block]:
    """Yield the blocks of a file of JSON lines."""
    for piece in chain(cutter.pieces(chunks), cutter.last()):
        if isinstance(piece, Piece):
            yield LineBlock(cutter.name, piece.number, piece.offset, piece.data)
        else:
            yield piece


def line_cutter(name: str) -> Cutter:
    return Cutter(name, line_ends)
