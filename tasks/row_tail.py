"""New rows of a JSON lines file that a stage writes: metrics.jsonl, timings.jsonl."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

ROWS_PER_READ = 2000


@dataclass(frozen=True)
class Row:
    """One row."""

    step: int
    milliseconds: int
    """Unix time at which it was first read; read again without a `confirm` between, it is the same."""
    values: dict[str, Any]


class RowTail:
    """The whole rows that were added since the last look; starts again when the file was replaced or cut.

    A line that is no row is passed over: a damaged file of metrics must not stop what reads it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._inode: int | None = None
        self._seen: dict[int, int] = {}
        """Position -> the time at which its line was first read, for lines not confirmed yet."""

    def rows(self) -> tuple[list[Row], int]:
        """Return rows not confirmed yet, at most `ROWS_PER_READ`, and the position to confirm after them.

        Raises:
            OSError: the file is there but cannot be read.
        """
        rows: list[Row] = []
        now = int(time.time() * 1000)
        try:
            stream = self.path.open("rb")
        except FileNotFoundError:
            return rows, self._offset
        with stream:
            status = os.fstat(stream.fileno())
            # A resumed stage rewrites the file with the steps that count.
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, 0
                self._seen.clear()
            position = self._offset
            stream.seek(position)
            for line in stream:
                if not line.endswith(b"\n") or len(rows) >= ROWS_PER_READ:
                    break
                if (parsed := self._parse(line)) is not None:
                    rows.append(Row(parsed[0], self._seen.setdefault(position, now), parsed[1]))
                position += len(line)
        return rows, position

    def confirm(self, position: int) -> None:
        """Everything up to `position` is dealt with."""
        self._offset = position
        self._seen.clear()

    def rewind(self) -> None:
        """Begin again at the first row."""
        self._offset = 0
        self._seen.clear()

    def take(self) -> list[Row]:
        """Return all new rows, confirmed: for a reader to whom nothing can happen between the two."""
        taken: list[Row] = []
        while True:
            rows, position = self.rows()
            self.confirm(position)
            taken += rows
            if len(rows) < ROWS_PER_READ:
                return taken

    def _parse(self, line: bytes) -> tuple[int, dict[str, Any]] | None:
        try:
            values = json.loads(line)
            step = int(values.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            logger.warning("a line of %s is no row and is passed over: %.80r", self.path, line)
            return None
        return step, values
