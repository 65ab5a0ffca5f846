"""How lengths, margins and sources are spread: counts by value, from which percentiles and histograms follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_checks.checks.engines import Engine, Views
from data_checks.checks.metrics_sql import KEPT, PREFIXES
from data_checks.checks.whole_sql import number

PERCENTILES = (50, 95, 99)
NUM_BUCKETS = 30
LENGTHS = {
    "preferences": ("prompt", "chosen", "rejected"),
    "feedback": ("prompt", "chosen"),
    "rl_prompts": ("prompt",),
    "eval_prompts": ("prompt",),
    "stepwise": ("prompt", "chosen"),
}
DOUBLES = {"preferences": ("margin", "chosen_score", "rejected_score"), "feedback": ("rating",)}
ANSWER_NAMES = {"feedback": {"chosen": "answer"}, "stepwise": {"chosen": "answer"}}
"""What the columns chosen_* are called where there is one answer."""


@dataclass(frozen=True)
class Spread:
    """Counts of ascending values; values from 1,000 on are rounded down to three digits."""

    values: list[float]
    counts: list[int]
    sum: float

    @property
    def num_rows(self) -> int:
        return sum(self.counts)

    def percentile(self, percent: int) -> float:
        """Return the smallest value that at least `percent` % of the rows do not exceed."""
        needed, seen = percent * self.num_rows, 0
        for value, count in zip(self.values, self.counts, strict=True):
            seen += count
            if 100 * seen >= needed:
                return value
        raise ValueError("no rows")

    def statistics(self) -> dict[str, float]:
        """Return mean, percentiles and maximum."""
        named = {f"p{percent}": float(self.percentile(percent)) for percent in PERCENTILES}
        return {"mean": self.sum / self.num_rows, **named, "max": float(self.values[-1])}

    def histogram(self) -> dict[str, Any]:
        """Return at most 31 buckets of equal width: `start`, `width` and `counts`; the last holds all above too."""
        top = max(self.percentile(99), 1)
        width = _nice_width(top / NUM_BUCKETS)
        counts = [0] * (int(top // width) + 1)
        for value, count in zip(self.values, self.counts, strict=True):
            counts[min(int(value // width), len(counts) - 1)] += count
        return {"start": 0, "width": width, "counts": counts}


def _nice_width(at_least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, … that is not below.

    >>> _nice_width(0.3), _nice_width(3), _nice_width(51)
    (1, 5, 100)
    """
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale >= at_least:
                return step * scale
        scale *= 10


def rounded(column: str) -> str:
    """Return SQL that keeps three digits of an integer, so that a column has a few thousand values at most."""
    steps = "".join(
        f"when {column} < {10**power} then {column} - {column} % {10 ** (power - 3)} " for power in range(4, 10)
    )
    return f"case when {column} < 1000 then {column} {steps}else {column} - {column} % 10000000 end"


def spreads(engine: Engine, table: str, views: Views) -> dict[str, Spread]:
    """Return the spread of each length of the kept rows that is known, by the column's name."""
    names = [f"{part}_{unit}" for unit in ("characters", "tokens") for part in LENGTHS[table]]
    parts = [
        f"select '{name}' as name, {rounded(name)} as length, count(*) as num_rows, "
        f"cast(sum(cast({name} as bigint)) as bigint) as total from {table} "
        f"where {KEPT} and {name} is not null group by {rounded(name)}"
        for name in names
    ]
    rows = engine.query(" union all ".join(parts) + " order by 1, 2", views)
    found = {}
    for name in names:
        own = [row for row in rows if row["name"] == name]
        if own:
            values = [float(row["length"]) for row in own]
            found[name] = Spread(values, [row["num_rows"] for row in own], float(sum(row["total"] for row in own)))
    return found


def histogram_of_doubles(engine: Engine, table: str, column: str, views: Views) -> dict[str, Any] | None:
    """Return the histogram of a column of doubles over the kept rows, or None where all are null.

    Buckets are of equal width between the smallest and the largest value; one value only is one bucket.
    """
    where = f"from {table} where {KEPT} and {column} is not null"
    (ends,) = engine.query(f"select min({column}) as low, max({column}) as high {where}", views)
    low, high = ends["low"], ends["high"]
    if low is None:
        return None
    width = (high - low) / NUM_BUCKETS or 1.0
    bucket = f"cast(floor(({column} - {number(low)}) / {number(width)}) as bigint)"
    last = NUM_BUCKETS - 1
    rows = engine.query(
        f"select case when {bucket} > {last} then {last} else {bucket} end as bucket, count(*) as num_rows {where} "
        "group by 1 order by 1",
        views,
    )
    counts = [0] * (rows[-1]["bucket"] + 1)
    for row in rows:
        counts[row["bucket"]] = row["num_rows"]
    return {"start": low, "width": width, "counts": counts}


def histograms(engine: Engine, tables: Sequence[str], views: Views) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the histograms by name, and mean, percentiles and maximum of each length by name; of kept rows.

    Names begin as those of the kind's numbers; the answer of feedback and stepwise rows is called `answer`.
    """
    shapes: dict[str, Any] = {}
    lengths: dict[str, Any] = {}
    for table in tables:
        for name, spread in spreads(engine, table, views).items():
            side, unit = name.split("_")
            full = f"{PREFIXES[table]}{ANSWER_NAMES.get(table, {}).get(side, side)}_{unit}"
            shapes[full], lengths[full] = spread.histogram(), spread.statistics()
        for column in DOUBLES.get(table, ()):
            if (shape := histogram_of_doubles(engine, table, column, views)) is not None:
                shapes[f"{PREFIXES[table]}{column}"] = shape
    return shapes, lengths
