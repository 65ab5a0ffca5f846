"""Bytes to pieces of whole records, whatever ends a record; the size of any one record is bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_checks.reading import block
from data_checks.reading.block import OversizedBlock

Positions = NDArray[np.int64]
FindEnds = Callable[[bytes], Positions]
"""Where records end in the next chunk: positions behind their last byte. Called once for each chunk, in order."""


class Piece(NamedTuple):
    """Whole records that follow each other, with what separates them."""

    number: int
    """Number of the first record, from 1."""
    offset: int
    """Where the first record starts, in bytes of the unpacked file."""
    data: bytes
    ends: Positions
    """Behind each record and its separator, from the start of `data`."""


@dataclass(slots=True)
class Cutter:
    """Cuts a stream into pieces. `num_records` says how many whole records were met so far."""

    name: str
    find_ends: FindEnds
    num_records: int = 0
    _start: int = 0
    """Where the unfinished record starts."""
    _parts: list[bytes] = field(default_factory=list)
    """What is kept of the unfinished record."""
    _size: int = 0
    """Bytes of the unfinished record, kept or not."""
    _is_blank: bool = True
    """Whether the unfinished record has only been whitespace so far."""

    def pieces(self, chunks: Iterable[tuple[int, bytes]]) -> Iterator[Piece | OversizedBlock]:
        """Yield the records of `chunks`, which are (offset, bytes) without gaps; blank pieces are left out."""
        for offset, chunk in chunks:
            if not self._size:
                self._start = offset
            ends = self.find_ends(chunk)
            if len(ends):
                yield from self._finish(chunk, ends)
            else:
                self._keep(chunk)

    def last(self) -> Iterator[Piece | OversizedBlock]:
        """Yield the record that the stream ends with, if no separator followed it."""
        if self._size:
            yield from self._finish(b"", np.zeros(1, np.int64))

    def _finish(self, chunk: bytes, ends: Positions) -> Iterator[Piece | OversizedBlock]:
        """Yield the unfinished record, whose end is the first of `ends`, and those behind it."""
        stop = int(ends[-1])
        first_size = self._size + int(ends[0])
        if first_size > block.MAX_ROW_BYTES:
            tail = chunk[: int(ends[0])]
            head = b"".join([*self._parts, tail])[: block.KEPT_BYTES]
            yield from self._oversized(head, first_size, self._is_blank and not tail.strip())
            data, ends = chunk[int(ends[0]) : stop], ends[1:] - ends[0]
        else:
            data, ends = b"".join([*self._parts, chunk[:stop]]), ends + self._size
        start, self._start = self._start, self._start + self._size + stop
        self._parts, self._size, self._is_blank = [], 0, True
        if first_size > block.MAX_ROW_BYTES:
            start += first_size
        yield from self._grouped(start, data, ends)
        self._keep(chunk[stop:])

    def _keep(self, rest: bytes) -> None:
        if not rest:
            return
        self._size += len(rest)
        self._is_blank = self._is_blank and not rest.strip()
        if self._size <= block.MAX_ROW_BYTES:
            self._parts.append(rest)
        else:
            self._parts = [b"".join([*self._parts, rest])[: block.KEPT_BYTES]]

    def _oversized(self, head: bytes, size: int, is_blank: bool, offset: int | None = None) -> Iterator[OversizedBlock]:
        self.num_records += 1
        if not is_blank:
            yield OversizedBlock(self.name, self.num_records, self._start if offset is None else offset, head, size)

    def _grouped(self, offset: int, data: bytes, ends: Positions) -> Iterator[Piece | OversizedBlock]:
        """Yield the records of `data` in groups of bounded size, too large ones on their own."""
        if data.isspace():  # Endless empty lines cost no more than their bytes.
            self.num_records += len(ends)
            return
        begin = 0
        while begin < len(ends):
            base = int(ends[begin - 1]) if begin else 0
            if int(ends[begin]) - base > block.MAX_ROW_BYTES:
                record = data[base : int(ends[begin])]
                yield from self._oversized(record[: block.KEPT_BYTES], len(record), record.isspace(), offset + base)
                begin += 1
                continue
            stop = self._stop(ends, begin, base)
            group = ends[begin:stop] - base
            piece = data[base : int(ends[stop - 1])]
            if not piece.isspace():
                yield Piece(self.num_records + 1, offset + base, piece, group)
            self.num_records += len(group)
            begin = stop

    def _stop(self, ends: Positions, begin: int, base: int) -> int:
        """Return where the group of records that starts at `begin` ends: it has at least one."""
        by_bytes = int(np.searchsorted(ends, base + block.CHUNK_BYTES, side="right"))
        stop = min(len(ends), begin + block.MAX_BLOCK_ROWS, max(by_bytes, begin + 1))
        sizes = np.diff(ends[begin:stop])
        large = np.flatnonzero(sizes > block.MAX_ROW_BYTES)
        return begin + 1 + int(large[0]) if len(large) else stop


def line_ends(chunk: bytes) -> Positions:
    """Return where the lines of `chunk` end: behind each newline."""
    return np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + 1
