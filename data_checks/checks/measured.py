"""What the metric stage knows, number by number, with the rows that each rests on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from data_checks.result import Numbers


@dataclass
class Measured:
    """Numbers, why some are missing, and tables for reports. No row text."""

    numbers: Numbers = field(default_factory=dict)
    """Name -> number; None: not known, and `skipped` says why."""
    support: dict[str, int] = field(default_factory=dict)
    """Name of a fraction -> rows that it is a fraction of."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Name -> why there is no number."""
    by_source: list[dict[str, Any]] = field(default_factory=list)
    """The long table: kind (of input), source, metric, value, num_rows (that the value rests on)."""
    sources: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Kind of input -> source and num_rows, most rows first."""
    histograms: dict[str, Any] = field(default_factory=dict)
    """Name -> start, width, counts."""
    lengths: dict[str, Any] = field(default_factory=dict)
    """Name -> mean, p50, p95, p99, max."""

    def put(self, name: str, value: float | int | None, support: int | None = None, why: str | None = None) -> None:
        """Add one number. Where it is None, `why` must say why."""
        self.numbers[name] = value
        if support is not None:
            self.support[name] = support
        if value is None and why is not None:
            self.skipped[name] = why

    def put_fraction(self, name: str, part: int, rows: int, why: str, weight: int = 1) -> None:
        """Add `part` of `weight` times `rows`; of no rows there is no fraction."""
        self.put(name, part / (weight * rows) if rows else None, rows, why)
