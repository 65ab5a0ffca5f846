"""The tables that suites look at: one row of numbers, one row a source and metric, a sample of kept rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from data_checks.checks.engines import Engine, Views
from data_checks.checks.histograms import LENGTHS
from data_checks.checks.measured import Measured
from data_checks.checks.metrics_sql import JUDGED, KEPT, flagged
from data_checks.checks.suite_files import CheckInfo
from data_checks.checks.thresholds import bounds
from data_checks.config import CheckDataConfig
from data_checks.features.flags import Flag

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

SAMPLE_ROWS = 40_000
"""Most rows of a sample: half of them in proportion, half spread evenly over the sources; a row may count for both. It
is drawn by hashes, so the size varies by a few hundred; the suite allows 50,000."""


def one_row(measured: Measured, columns: Iterable[str]) -> pd.DataFrame:
    """Return the numbers as a table with one row; a column without a number is empty."""
    import pandas as pd

    return pd.DataFrame({name: [measured.numbers.get(name)] for name in columns})


def long_table(measured: Measured, infos: Iterable[CheckInfo], config: CheckDataConfig) -> list[dict[str, Any]]:
    """Return source, metric, value and bound for the metrics that are asserted per source.

    Chance counts for more in a small source. So a value outside the limits is moved towards them by what chance may add
    on that source's rows, and this `bound` is what the suite holds to the limits.
    """
    rows = []
    for info in infos:
        plain = bounds(info, "warn", measured, config, num_rows=0)
        assert plain is not None, f"{info.name} has no limit"
        for entry in measured.by_source:
            if entry["metric"] != info.metric or entry["value"] is None:
                continue
            wide = bounds(info, "warn", measured, config, num_rows=entry["num_rows"])
            assert wide is not None
            rows.append({**entry, "bound": _bound(entry["value"], plain, wide)})
    return rows


def _bound(value: float, plain: tuple[float | None, float | None], wide: tuple[float | None, float | None]) -> float:
    (low, high), (wide_low, wide_high) = plain, wide
    if high is not None and wide_high is not None and value > high:
        return max(high, value - (wide_high - high))
    if low is not None and wide_low is not None and value < low:
        return min(low, value + (low - wide_low))
    return value


def kept_columns(table: str) -> dict[str, str]:
    """Return the columns of a sample of kept rows: name -> SQL. Numbers and keys only."""
    names = ["example", "row", "group_key", "prompt_key", "content_hash", "num_turns"]
    parts = LENGTHS[table]
    names += ["split"] if table in JUDGED else []
    names += [f"{part}_key" for part in parts[1:]]
    names += [f"{part}_characters" for part in parts] + [f"{part}_words" for part in parts[1:]]
    names += [f"{part}_tokens" for part in parts] if table != "stepwise" else []
    columns = {name: f"t.{name}" for name in names}
    if table == "preferences":
        longer = "case when t.chosen_tokens > t.rejected_tokens then t.chosen_tokens else t.rejected_tokens end"
        columns["total_tokens"] = f"t.prompt_tokens + {longer}"
        columns["margin"] = "t.margin"
        # A tie that is kept has margin 0.
        columns["is_preference"] = "case when coalesce(t.is_tie, false) and t.margin <> 0 then 0 else 1 end"
    if table == "feedback":
        columns["total_tokens"] = "t.prompt_tokens + t.chosen_tokens"
        columns["is_judged"] = "case when t.label is null and t.rating is null then 0 else 1 end"
    columns["has_secret"] = f"case when {flagged(Flag.SECRET)} then 1 else 0 end"
    return columns


def kept_sample(engine: Engine, table: str, views: Views, num_rows: int = SAMPLE_ROWS) -> pa.Table:
    """Return a sample of the kept rows of a kind, stratified by source: all of them where there are few.

    A row is in it when its content hash, as a share of all hashes, is below the share of rows wanted: of the whole set,
    or of its source, whichever is larger. The same rows come on every engine and in whatever order files are read.
    """
    columns = ", ".join(f"{text} as {name}" for name, text in kept_columns(table).items())
    half = num_rows // 2
    share = "cast(t.content_hash as double) / 1.8446744073709551616e19 + 5.0e-1"
    kept = f"select * from {table} where {KEPT}"
    sql = (
        f"with kept as ({kept}), sources as (select coalesce(source, '') as name, count(*) as num_rows from kept "
        "group by coalesce(source, '')), totals as (select count(*) as num_sources, sum(num_rows) as num_rows "
        f"from sources) select {columns} from kept t join sources s on coalesce(t.source, '') = s.name "
        f"cross join totals n where n.num_rows <= {num_rows} or t.content_hash is null "
        f"or ({share}) * cast(n.num_rows as double) < {half} "
        f"or ({share}) * cast(s.num_rows as double) * cast(n.num_sources as double) < {half} order by t.example"
    )
    return engine.table(sql, views)
