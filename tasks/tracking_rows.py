"""New rows of metrics.jsonl and timings.jsonl as MLflow metrics: each one once, whatever happened before."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from tasks.row_tail import ROWS_PER_READ, Row, RowTail
from tasks.showing import flatten, gate_rules

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

METRICS_PER_BATCH = 1000
"""MLflow's own limit for one request."""
SUMMARY_PREFIX = "summary/"
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
        self.tails = [RowTail(directory / "metrics.jsonl"), RowTail(directory / "timings.jsonl")]
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

    def send_summary(self, values: Mapping[str, float]) -> None:
        """Send numbers of a result, once."""
        self.send_new()
        summary = {SUMMARY_PREFIX + name: value for name, value in values.items()}
        self._send_rows([Row(0, int(time.time() * 1000), summary)])

    def _send_rows(self, rows: list[Row]) -> int:
        metrics = list(self._new_metrics(rows))
        for start in range(0, len(metrics), METRICS_PER_BATCH):
            batch = metrics[start : start + METRICS_PER_BATCH]
            self.client.log_batch(self.run_id, metrics=batch)
            for metric in batch:
                self.last_steps[metric.key] = metric.step  # type: ignore[index]
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
                    yield Metric(key, float(value), row.milliseconds, row.step)


def summary_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a result's summary by their path."""
    flat = flatten(summary)
    return {name.replace(".", "/"): float(value) for name, value in flat.items() if is_finite_number(value)}


def rule_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return what each guard of a gate's summary measured, by the guard's name; nothing for another stage's summary."""
    guards = {str(rule["name"]): rule.get("value") for role, rule in gate_rules(summary) if role == "guard"}
    return {f"guards/{name}": float(value) for name, value in guards.items() if is_finite_number(value)}
