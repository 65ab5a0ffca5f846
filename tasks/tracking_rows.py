"""New rows of metrics.jsonl and timings.jsonl as MLflow metrics: each one once, whatever happened before.

A roll-back of the training cuts the files and steps are done again. MLflow forgets nothing, so a redone step has two
values there, the redone one with the later time. The metric `roll_backs` marks when that began: what has an earlier
time is of the undone steps.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from tasks.alarms import ALARMS_FILE, read_alarms, roll_backs
from tasks.row_tail import ROWS_PER_READ, Row, RowTail
from tasks.showing import flatten, gate_rules

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

METRICS_PER_BATCH = 1000
"""MLflow's own limit for one request."""
SUMMARY_PREFIX = "summary/"
ALARMS_PREFIX = "alarms/"
ROLL_BACKS = "roll_backs"
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")


def mlflow_key(name: str) -> str:
    """Return `name` with the characters that MLflow refuses replaced."""
    return _NOT_ALLOWED.sub("_", name)[:250]


def is_finite_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class MetricLog:
    """Sends rows of one stage to one MLflow run.

    What MLflow has is asked of MLflow: the last step of each metric. So it does not matter which process sent it,
    and whether it lived to write that down.
    """

    def __init__(self, client: MlflowClient, run_id: str, directory: Path) -> None:
        self.client = client
        self.run_id = run_id
        self.alarms_path = directory / ALARMS_FILE
        self.tails = [RowTail(directory / "metrics.jsonl"), RowTail(directory / "timings.jsonl")]
        self.last_steps: dict[str, int] | None = None
        self.num_roll_backs = 0
        """Those that MLflow was told of."""
        self.since = 0
        """Unix time in milliseconds of the newest mark of a roll-back: rows sent from now on are not older."""
        self.newest = 0
        """The latest time of any value that was sent."""

    def send_new(self) -> int:
        """Send what is new; return the number of values sent. After an error, the next call sends the rest."""
        if self.last_steps is None:
            self._ask()
        num_sent = 0
        try:
            for tail in self.tails:
                while True:
                    rows, position = self._rows(tail)
                    num_sent += self._send_rows(rows)
                    tail.confirm(position)
                    if len(rows) < ROWS_PER_READ:
                        break
        except BaseException:
            self.last_steps = None  # A request that failed here may have arrived there: ask again.
            raise
        return num_sent

    def send_summary(self, values: Mapping[str, float]) -> None:
        """Send numbers of a result, once."""
        self.send_new()
        summary = {SUMMARY_PREFIX + name: value for name, value in values.items()}
        self._send_rows([Row(0, int(time.time() * 1000), summary)])

    def _ask(self) -> None:
        """Learn from MLflow which step of each metric it has, undone ones left out."""
        # Only here are steps beside the values; `data.metrics` has none, and histories cost a request a metric.
        logged = self.client.get_run(self.run_id).data._metric_objs
        last = {metric.key: metric.step for metric in logged}
        self.newest = max((metric.timestamp for metric in logged), default=0)
        self.num_roll_backs = self.since = 0
        if ROLL_BACKS in last:
            # The last step says nothing after a roll-back: it may be an undone one.
            marks = sorted(self.client.get_metric_history(self.run_id, ROLL_BACKS), key=lambda mark: mark.timestamp)
            self.num_roll_backs, self.since = int(marks[-1].value), marks[-1].timestamp
            starts = mark_times([(int(mark.value), mark.timestamp) for mark in marks])
            targets = self._targets()[: self.num_roll_backs]
            for key in last:
                if not key.startswith((SUMMARY_PREFIX, ALARMS_PREFIX)) and key != ROLL_BACKS:
                    values = self.client.get_metric_history(self.run_id, key)
                    counted = [v.step for v in values if v.timestamp >= valid_from(v.step, targets, starts)]
                    last[key] = max(counted, default=-1)
                    self.newest = max([self.newest, *(value.timestamp for value in values)])
        self.last_steps = last

    def _targets(self) -> list[int]:
        return roll_backs(read_alarms(self.alarms_path))

    def _rows(self, tail: RowTail) -> tuple[list[Row], int]:
        """Return new rows of a file, with MLflow told of all roll-backs before them.

        The training cuts its files, notes the roll-back, and only then does steps again. So rows read between two
        looks that see the same roll-backs are none of a step that these undid.
        """
        while True:
            targets = self._targets()
            self._mark(targets)
            rows, position = tail.rows()
            if self._targets() == targets:
                return rows, position

    def _mark(self, targets: Sequence[int]) -> None:
        """Tell MLflow of roll-backs that it does not know; the steps after them are sent again."""
        from mlflow.entities import Metric

        assert self.last_steps is not None
        if len(targets) == self.num_roll_backs:
            return
        moment = max(int(time.time() * 1000), self.newest + 1)
        self.client.log_batch(self.run_id, metrics=[Metric(ROLL_BACKS, float(len(targets)), moment, 0)])
        # Fewer than before: the training died while it rolled back, does the same steps again and will roll back again.
        kept = min(targets[self.num_roll_backs :], default=None)
        if kept is not None:
            self.last_steps = {key: min(step, kept) for key, step in self.last_steps.items()}
        self.num_roll_backs, self.since, self.newest = len(targets), moment, moment
        for tail in self.tails:
            tail.rewind()

    def _send_rows(self, rows: list[Row]) -> int:
        metrics = list(self._new_metrics(rows))
        for start in range(0, len(metrics), METRICS_PER_BATCH):
            batch = metrics[start : start + METRICS_PER_BATCH]
            self.client.log_batch(self.run_id, metrics=batch)
            for metric in batch:
                self.last_steps[metric.key] = metric.step  # type: ignore[index]
                self.newest = max(self.newest, metric.timestamp)
        return len(metrics)

    def _new_metrics(self, rows: list[Row]) -> Iterator[Metric]:
        from mlflow.entities import Metric

        assert self.last_steps is not None
        reached = dict(self.last_steps)
        for row in rows:
            for name, value in row.values.items():
                key = mlflow_key(name)
                if is_finite_number(value) and row.step > reached.get(key, -1):
                    reached[key] = row.step
                    yield Metric(key, float(value), max(row.milliseconds, self.since), row.step)


def mark_times(marks: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Return, for each roll-back from 1, since when MLflow knows of it.

    Args:
        marks: (number of roll-backs, time) in the order of time; the number falls when one was begun and not finished.

    >>> mark_times([(1, 50), (0, 60), (2, 70), (3, 90)])
    {1: 70, 2: 70, 3: 90}
    """
    times: dict[int, int] = {}
    for number, moment in marks:
        times = {known: then for known, then in times.items() if known <= number}
        for new in range(len(times) + 1, number + 1):
            times[new] = moment
    return times


def valid_from(step: int, targets: Sequence[int], starts: Mapping[int, int]) -> int:
    """Return the time from which a value of `step` is of the step that counts: since the last roll-back that undid it.

    >>> [valid_from(step, targets=[4, 2], starts={1: 50, 2: 70}) for step in (2, 3)]
    [0, 70]
    """
    undone_by = [number for number, target in enumerate(targets, 1) if target < step]
    return starts.get(undone_by[-1], 0) if undone_by else 0


def summary_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a result's summary by their path."""
    flat = flatten(summary)
    return {name.replace(".", "/"): float(value) for name, value in flat.items() if is_finite_number(value)}


def rule_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return what each guard of a gate's summary measured, by the guard's name; nothing for another stage's summary."""
    guards = {str(rule["name"]): rule.get("value") for role, rule in gate_rules(summary) if role == "guard"}
    return {f"guards/{name}": float(value) for name, value in guards.items() if is_finite_number(value)}
