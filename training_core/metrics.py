"""Metrics: partial sums that cannot become means of means, and the files they are written to."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training_core.errors import ArtifactError
from training_core.protocol.atomic import write_text


@dataclass
class MeanMetric:
    """A sum and a count. Two of them add; the mean is taken once, at the end.

    >>> (MeanMetric(6.0, 3) + MeanMetric(1.0, 1)).mean()
    1.75
    """

    total: float = 0.0
    count: float = 0.0

    def __add__(self, other: MeanMetric) -> MeanMetric:
        return MeanMetric(self.total + other.total, self.count + other.count)

    def mean(self) -> float | None:
        """Return the mean, or None when nothing was counted: an absent metric, never NaN."""
        return self.total / self.count if self.count else None


@dataclass
class MetricSums:
    """Named `MeanMetric`s collected over the micro-batches of a step."""

    sums: dict[str, MeanMetric] = field(default_factory=dict)

    def add(self, name: str, total: float, count: float) -> None:
        self.sums[name] = self.sums.get(name, MeanMetric()) + MeanMetric(total, count)

    def means(self) -> dict[str, float]:
        return {name: mean for name, metric in self.sums.items() if (mean := metric.mean()) is not None}


class MetricsWriter:
    """Appends one JSON line a step: `{"step": 3, "group/name": 1.5, ...}`.

    metrics.jsonl must be the same for a run that was stopped and continued as for one that never was, so nothing
    measured by a clock goes there; such values go to timings.jsonl. On resume, `truncate_after` drops the lines of
    steps that will be done again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Append one line and flush it to the disk.

        Raises:
            ValueError: a value is NaN or infinite. Report a count of such events instead.
        """
        for name, value in values.items():
            if not math.isfinite(value):
                raise ValueError(f"metric {name} at step {step} is {value}; metrics must be finite")
        line = json.dumps({"step": step, **dict(sorted(values.items()))}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def truncate_after(self, step: int) -> None:
        """Keep only whole lines with a step of at most `step`."""
        if not self.path.exists():
            return
        kept = [row for row in read_metrics(self.path) if row["step"] <= step]
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in kept)
        write_text(self.path, text)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a metrics file; a last line cut short by a crash is left out.

    Raises:
        ArtifactError: a whole line is no JSON: someone else wrote to the file.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    try:
        return [json.loads(line) for line in lines[:-1]]
    except ValueError as error:
        raise ArtifactError(
            f"{path} is damaged: {error}. Delete the directory {path.parent} and run the same command again to compute "
            "the stage anew"
        ) from None
