"""The part of an MLflow client that sends metrics, in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class RecordingClient:
    """The part of an MLflow client that MetricLog uses; `fail_after` values it loses the connection."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []
        self.fail_on_batch: int | None = None
        self.lose_answer = False
        self.num_batches = 0

    def get_run(self, run_id: str) -> Any:
        latest: dict[str, Any] = {}
        for metric in self.metrics:
            before = latest.get(metric.key)
            if before is None or (metric.step, metric.timestamp) >= (before.step, before.timestamp):
                latest[metric.key] = metric
        return SimpleNamespace(data=SimpleNamespace(_metric_objs=list(latest.values())))

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        return [metric for metric in self.metrics if metric.key == key]

    def log_batch(self, run_id: str, metrics: Any = (), **ignored: Any) -> None:
        assert len(metrics) <= 1000
        self.num_batches += 1
        fails = self.num_batches == self.fail_on_batch
        if not fails or self.lose_answer:
            self.metrics.extend(metrics)
        if fails:
            raise ConnectionError("server gone")

    def steps(self, key: str) -> list[int]:
        return [metric.step for metric in self.metrics if metric.key == key]
