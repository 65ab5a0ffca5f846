"""The examples that costly checks look at: those with the smallest content hashes, collected while files are read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from data_checks.decide import JUDGED_TABLES, Decisions, sides_of
from data_checks.examine import ALL_HASHES, Chunk, FileTask

MAX_COPIES = 32
"""Most equal examples that are remembered until it is known which of them is used: people who judged the same."""


class SampleCandidates:
    """Keeps the examples of pairs, or else of feedback, with the `size` smallest hashes so far; equal ones once.

    What is taken in the end depends on the set of examples alone: the limit only ever sinks, so the examples below the
    last one are all there, whatever the limits were when their chunks were read.
    """

    def __init__(self, size: int, tasks: Sequence[FileTask]) -> None:
        tables = {task.table for task in tasks}
        self.size = size
        self.table = next((name for name in JUDGED_TABLES if name in tables), None)
        self._limit = ALL_HASHES
        self._pieces: list[pa.Table] = []
        self._num_rows = 0
        self._num_left = size
        """Rows after the last time that some were forgotten, at least `size`."""

    def limit(self, task: FileTask) -> int:
        """Return the largest hash that may still be taken; below all hashes for kinds of input without a sample."""
        return self._limit if task.table == self.table else -(2**63)

    def add(self, chunk: Chunk) -> Chunk:
        """Take over a chunk's candidates; return the chunk without them."""
        piece, chunk.sample = chunk.sample, chunk.sample.schema.empty_table()
        if chunk.table == self.table and piece.num_rows:
            self._pieces.append(piece)
            self._num_rows += piece.num_rows
            if self._num_rows > 2 * self._num_left:
                self._shrink()
        return chunk

    def _shrink(self) -> None:
        """Forget what is beyond the `size` smallest hashes, and more copies of one than need to be remembered."""
        table = pa.concat_tables(self._pieces)
        hashes = table["content_hash"].to_numpy()
        distinct = np.unique(hashes)
        if len(distinct) > self.size:
            self._limit = int(distinct[self.size - 1])
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        copy = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
        # Chunks come in file order: the first copies are kept. Which of them is used is not known yet.
        kept = np.sort(order[(copy < MAX_COPIES) & (ordered <= self._limit)])
        self._pieces = [table.take(pa.array(kept))]
        self._num_rows = len(kept)
        self._num_left = max(self.size, self._num_rows)

    def take(self, decisions: Decisions) -> pa.Table | None:
        """Return the examples of the sample that are used, in file order, with split and cluster, if there are any."""
        if not self._pieces:
            return None
        self._shrink()
        (table,) = self._pieces
        numbers = table["example"].to_numpy()
        late = decisions.found["example"].to_numpy()
        at = np.searchsorted(late, numbers)
        is_late = (at < len(late)) & (late[np.minimum(at, len(late) - 1)] == numbers) if len(late) else at > 0
        table = table.filter(pa.array(~is_late)).sort_by("example")
        _, first = np.unique(table["content_hash"].to_numpy(), return_index=True)
        table = table.take(pa.array(np.sort(first)))
        clusters, is_validation = sides_of(table["group_key"].fill_null(0).to_numpy(), decisions)
        split = pa.array(np.where(is_validation, "validation", "train").astype(object), pa.string())
        return table.append_column("split", split).append_column("cluster_key", pa.array(clusters))
