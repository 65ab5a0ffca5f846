"""The metric rows that sentinels look at: the first few and the last few of a run, however long it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from training_core.config.sentinels import SentinelsConfig

Row = Mapping[str, float]
"""A row of metrics.jsonl: `step` and metrics."""


class History:
    """Keeps the first and the last rows of those it is given; `rows()` is all that `watch` needs of them.

    Args:
        num_first: rows of the start to keep.
        num_last: newest rows to keep.
    """

    def __init__(self, num_first: int, num_last: int) -> None:
        self.num_first = num_first
        self._first: list[Row] = []
        self._last: deque[Row] = deque(maxlen=num_last)

    @classmethod
    def for_sentinels(cls, config: SentinelsConfig, rows: Iterable[Row] = ()) -> History:
        """Return a history just long enough for `config`, with `rows` in it."""
        history = cls(config.length_drift.num_first_steps, num_last_rows(config))
        for row in rows:
            history.append(row)
        return history

    def append(self, row: Row) -> None:
        if len(self._first) < self.num_first:
            self._first.append(row)
        else:
            self._last.append(row)

    def rows(self) -> list[Row]:
        return [*self._first, *self._last]


def num_last_rows(config: SentinelsConfig) -> int:
    """Return how many of the newest rows the sentinels of `config` read."""
    sentinels = [getattr(config, name) for name in type(config).model_fields]
    patience = max(getattr(sentinel, "patience_steps", 1) for sentinel in sentinels)
    return max(patience, 2 * config.reward_stalled.window_steps, config.proxy_up_gold_down.window_steps)


class View:
    """A history seen from one step.

    Args:
        rows: of steps up to `step`, in order; those in between that nobody reads may be missing.
        step: the step in question.
        start: steps up to this one do not count in windows that must violate a limit.
    """

    def __init__(self, rows: Sequence[Row], step: int, start: int) -> None:
        self.rows = rows
        self.step = step
        self.start = start

    def last(self, metric: str, num_steps: int, before: int = 0) -> list[float]:
        """Return the metric at the last `num_steps` steps, `before` steps ago, where it was reported."""
        newest = self.step - before
        values: list[float] = []
        for row in reversed(self.rows):
            if row["step"] <= newest - num_steps:
                break
            if row["step"] <= newest and metric in row:
                values.append(row[metric])
        return values[::-1]

    def first(self, metric: str, num_steps: int) -> list[float]:
        """Return the metric at steps 1 to `num_steps`, where it was reported."""
        values: list[float] = []
        for row in self.rows:
            if row["step"] > num_steps:
                break
            if metric in row:
                values.append(row[metric])
        return values

    def with_largest(self, metrics: Sequence[str], name: str) -> View:
        """Return this view with one metric more: at each step the largest of those of `metrics` that it reported."""
        rows = [
            {**row, name: max(row[metric] for metric in metrics if metric in row)}
            if any(metric in row for metric in metrics)
            else row
            for row in self.rows
        ]
        return View(rows, self.step, self.start)

    def is_full(self, num_steps: int) -> bool:
        """Return whether all of the last `num_steps` steps count."""
        return self.step - num_steps >= self.start
