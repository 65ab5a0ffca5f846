"""Where the statements of the metric stage run: DuckDB on this machine, Spark where the features lie on a cluster.

Both take the same text. Engines know nothing of metrics, and no statement knows its engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from training_core.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa

Views = Mapping[str, Sequence[Path]]
"""Name in SQL -> the Parquet files that it stands for; not empty."""
Rows = list[dict[str, Any]]
MEMORY_BYTES = 1 << 30
"""What DuckDB may take before it writes to its temporary folder. Default: leaves half of a 2 GiB budget to the rest."""
LOCAL_SPARK = "local[2]"


@runtime_checkable
class Engine(Protocol):
    """Runs portable SQL over Parquet files."""

    name: str

    def query(self, sql: str, views: Views) -> Rows:
        """Return the rows of a statement, in its order, as mappings from column to value."""
        ...

    def table(self, sql: str, views: Views) -> pa.Table:
        """Return the rows of a statement as one table."""
        ...

    def close(self) -> None:
        """Free what the engine holds; it is not used afterwards."""
        ...


class DuckDbEngine:
    """The engine of one machine: streams Parquet and writes what does not fit in memory to disk.

    Args:
        temporary_folder: for what does not fit. None: such a statement fails.
        memory_bytes: limit, in bytes.
        num_threads: None: one a core.
    """

    name = "duckdb"

    def __init__(
        self, temporary_folder: Path | None = None, memory_bytes: int = MEMORY_BYTES, num_threads: int | None = None
    ) -> None:
        import duckdb

        config: dict[str, Any] = {"memory_limit": f"{memory_bytes}B"}
        if temporary_folder is not None:
            config["temp_directory"] = str(temporary_folder)
        else:
            config["max_temp_directory_size"] = "0B"
        if num_threads is not None:
            config["threads"] = num_threads
        self._connection = duckdb.connect(":memory:", config=config)
        self._views: dict[str, tuple[str, ...]] = {}

    def query(self, sql: str, views: Views) -> Rows:
        self._register(views)
        cursor = self._connection.execute(sql)
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def table(self, sql: str, views: Views) -> pa.Table:
        self._register(views)
        return self._connection.sql(sql).to_arrow_table()

    def _register(self, views: Views) -> None:
        for name, paths in views.items():
            files = tuple(str(path) for path in paths)
            if self._views.get(name) != files:
                self._connection.read_parquet(list(files)).create_view(name, replace=True)
                self._views[name] = files

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SparkEngine:
    """An existing Spark cluster, or two local threads. Needs the extra `spark` (pyspark) and Java 17.

    The session is, in this order: `session`; the one that is active in this process; a new one to SPARK_REMOTE (Spark
    Connect) or to `master`, else to the `spark.master` that spark-submit or spark-defaults.conf set, else `local[2]`.
    Paths must mean the same on every executor: a shared or object store on a cluster.

    Args:
        session: a `pyspark.sql.SparkSession`; it is left open.
        master: e.g. "spark://host:7077".
        settings: of a new session, name -> value.

    Raises:
        ConfigurationError: pyspark is not installed.
    """

    name = "spark"

    def __init__(
        self, session: Any = None, *, master: str | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        sql = _pyspark_sql()
        active = session or sql.SparkSession.getActiveSession()
        self._owned = active is None
        self.session: Any = active or _new_session(sql, master, settings or {})
        self._views: dict[str, tuple[str, ...]] = {}

    def query(self, sql: str, views: Views) -> Rows:
        self._register(views)
        return [row.asDict() for row in self.session.sql(sql).collect()]

    def table(self, sql: str, views: Views) -> pa.Table:
        self._register(views)
        return self.session.sql(sql).toArrow()

    def _register(self, views: Views) -> None:
        for name, paths in views.items():
            files = tuple(str(path) for path in paths)
            if self._views.get(name) != files:
                self.session.read.parquet(*files).createOrReplaceTempView(name)
                self._views[name] = files

    def close(self) -> None:
        if self._owned:
            self.session.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pyspark_sql() -> Any:
    try:
        import pyspark.sql
    except ImportError:
        raise ConfigurationError(
            "the Spark engine needs pyspark, which is not installed. Install the extra: pip install 'tidegate[spark]' "
            "(and Java 17), or use the default engine, DuckDB"
        ) from None
    return pyspark.sql


def _new_session(sql: Any, master: str | None, settings: Mapping[str, str]) -> Any:
    builder = sql.SparkSession.builder.appName("tidegate-data-checks")
    if "SPARK_REMOTE" in os.environ and master is None:
        builder = builder.remote(os.environ["SPARK_REMOTE"])
    elif master is not None:
        builder = builder.master(master)
    elif not _has_master():
        builder = builder.master(LOCAL_SPARK).config("spark.ui.enabled", "false")
        builder = builder.config("spark.sql.shuffle.partitions", "4").config("spark.ui.showConsoleProgress", "false")
    # Both engines then divide and overflow alike, and days and hours play no part.
    for name, value in {"spark.sql.session.timeZone": "UTC", "spark.sql.ansi.enabled": "true", **settings}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _has_master() -> bool:
    """Return whether Spark's own configuration names a cluster."""
    if os.environ.get("MASTER") or "spark.master" in os.environ.get("PYSPARK_SUBMIT_ARGS", ""):
        return True
    if "--master" in os.environ.get("PYSPARK_SUBMIT_ARGS", ""):
        return True
    folder = os.environ.get("SPARK_CONF_DIR") or os.path.join(os.environ.get("SPARK_HOME", ""), "conf")
    path = Path(folder, "spark-defaults.conf")
    return path.is_file() and any(line.split()[:1] == ["spark.master"] for line in path.read_text().splitlines())
