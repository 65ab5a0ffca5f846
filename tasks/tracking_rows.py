"""New rows of metrics.jsonl and timings.jsonl as MLflow metrics: each one once, whatever happened before."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

logger = logging.getLogger(__name__)

METRICS_PER_BATCH = 1000
"""MLflow's own limit for one request."""
ROWS_PER_READ = 2000
SUMMARY_PREFIX = "summary/"
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")


def mlflow_key(name: str) -> str:
    """Return `name` with the characters that MLflow refuses replaced."""
    return _NOT_ALLOWED.sub("_", name)[:250]


class FileTail:
    """Reads the whole lines that were added to a file of rows; starts again when the file was replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._inode: int | None = None
        self._seen: dict[int, int] = {}
        """Step -> the time it was first read, for rows that MLflow has not confirmed: sent again, they are the same."""

    def rows(self) -> tuple[list[tuple[int, int, dict[str, float]]], int]:
        """Return rows `(step, milliseconds, values)` not confirmed yet, and the position to confirm after them."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return [], self._offset
        # A resumed stage rewrites the file with the steps that count; those already logged are passed over by step.
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset = status.st_ino, 0
        rows: list[tuple[int, int, dict[str, float]]] = []
        position, now = self._offset, int(time.time() * 1000)
        with self.path.open("rb") as stream:
            stream.seek(position)
            for line in stream:
                if not line.endswith(b"\n") or len(rows) >= ROWS_PER_READ:
                    break
                position += len(line)
                if (parsed := parse_row(line)) is not None:
                    step, values = parsed
                    rows.append((step, self._seen.setdefault(step, now), values))
        return rows, position

    def confirm(self, position: int) -> None:
        """MLflow has everything up to `position`."""
        self._offset = position
        self._seen.clear()


def parse_row(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Return (step, finite values) of one line, or None when it is no row. What is not a finite number is left out."""
    try:
        row = json.loads(line)
        step = int(row.pop("step"))
    except (ValueError, KeyError, TypeError, AttributeError):
        logger.warning("a line of a metrics file is no row and is not sent to MLflow: %.80r", line)
        return None
    return step, {name: float(value) for name, value in row.items() if is_finite_number(value)}


def is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class MetricLog:
    """Sends rows of one stage to one MLflow run.

    What MLflow has is asked of MLflow: the last step of each metric. So it does not matter which process sent it,
    and whether it lived to write that down.
    """

    def __init__(self, client: MlflowClient, run_id: str, directory: Path) -> None:
        self.client = client
        self.run_id = run_id
        self.tails = [FileTail(directory / "metrics.jsonl"), FileTail(directory / "timings.jsonl")]
        self.last_steps: dict[str, int] | None = None

    def send_new(self) -> int:
        """Send what is new; return the number of values sent. After an error, the next call sends the rest."""
        if self.last_steps is None:
            # Only here are steps beside the values; `data.metrics` has none, and histories cost a request a metric.
            logged = self.client.get_run(self.run_id).data._metric_objs
            self.last_steps = {metric.key: metric.step for metric in logged}
        num_sent = 0
        try:
            for tail in self.tails:
                while True:
                    rows, position = tail.rows()
                    num_sent += self._send_rows(rows)
                    tail.confirm(position)
                    if len(rows) < ROWS_PER_READ:
                        break
        except BaseException:
            self.last_steps = None  # A request that failed here may have arrived there: ask again.
            raise
        return num_sent

    def send_summary(self, values: Mapping[str, float], prefix: str = SUMMARY_PREFIX) -> None:
        """Send numbers of a result, once."""
        self.send_new()
        self._send_rows([(0, int(time.time() * 1000), {prefix + name: value for name, value in values.items()})])

    def _send_rows(self, rows: list[tuple[int, int, dict[str, float]]]) -> int:
        metrics = list(self._new_metrics(rows))
        for start in range(0, len(metrics), METRICS_PER_BATCH):
            batch = metrics[start : start + METRICS_PER_BATCH]
            self.client.log_batch(self.run_id, metrics=batch)
            for metric in batch:
                self.last_steps[metric.key] = metric.step  # type: ignore[index]
        return len(metrics)

    def _new_metrics(self, rows: list[tuple[int, int, dict[str, float]]]) -> Iterator[Metric]:
        from mlflow.entities import Metric

        assert self.last_steps is not None
        reached = dict(self.last_steps)
        for step, milliseconds, values in rows:
            for name, value in values.items():
                key = mlflow_key(name)
                if step > reached.get(key, -1):
                    reached[key] = step
                    yield Metric(key, value, milliseconds, step)


def flatten(values: Mapping[str, Any], prefix: str = "", depth: int = 4) -> dict[str, Any]:
    """Return nested mappings as `a.b.c` -> leaf; lists and deeper mappings stay whole."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value and depth > 1:
            flat |= flatten(value, f"{prefix}{name}.", depth - 1)
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def summary_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a result's summary by their path."""
    flat = flatten(summary)
    return {name.replace(".", "/"): float(value) for name, value in flat.items() if is_finite_number(value)}


def rule_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return what each guard of a gate's summary measured, by the guard's name; nothing for another stage's summary."""
    guards = {str(guard["name"]): guard.get("value") for guard in summary.get("guards") or []}
    return {f"guards/{name}": float(value) for name, value in guards.items() if is_finite_number(value)}
