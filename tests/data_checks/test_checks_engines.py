"""Engines: what they refuse, and that Spark gives the same numbers as DuckDB (skipped where pyspark is absent)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from data_checks.checks import DuckDbEngine, Engine, SparkEngine
from data_checks.checks.whole_sql import number
from training_core.errors import ConfigurationError

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_spark.py"
NO_SPARK = "pyspark is not installed (extra `spark`): `make bench-spark` compares the engines"


def bench_spark() -> Any:
    spec = importlib.util.spec_from_file_location("bench_spark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_pyspark_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(ConfigurationError, match=r"tidegate\[spark\]"):
        SparkEngine()


def test_a_double_is_written_so_that_it_is_read_as_one() -> None:
    with DuckDbEngine(num_threads=1) as engine:
        assert isinstance(engine, Engine)
        (row,) = engine.query(f"select {number(0.1)} as a, {number(-3)} as b", {})
    assert row == {"a": 0.1, "b": -3.0}


def test_a_query_is_refused_without_room(tmp_path: Path) -> None:
    import duckdb

    with DuckDbEngine(memory_bytes=20 << 20, num_threads=1) as engine, pytest.raises(duckdb.Error):
        engine.query("select count(distinct a) from (select i * 7919 as a from range(20000000) t(i))", {})


class FakeSession:
    """What SparkEngine uses of a session."""

    def __init__(self) -> None:
        self.views: dict[str, tuple[str, ...]] = {}
        self.stopped = False
        self.read = self

    def parquet(self, *paths: str) -> FakeSession:
        self.paths = paths
        return self

    def createOrReplaceTempView(self, name: str) -> None:
        self.views[name] = self.paths

    def sql(self, text: str) -> FakeSession:
        self.text = text
        return self

    def collect(self) -> list[Any]:
        return [type("Row", (), {"asDict": lambda self: {"a": 1}})()]

    def toArrow(self) -> str:
        return "table"

    def stop(self) -> None:
        self.stopped = True


def test_a_given_session_is_used_and_left_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("data_checks.checks.engines._pyspark_sql", lambda: None)
    session = FakeSession()
    with SparkEngine(session) as engine:
        assert isinstance(engine, Engine)
        assert engine.query("select 1", {"t": [tmp_path / "a", tmp_path / "b"]}) == [{"a": 1}]
        assert engine.table("select 2", {}) == "table"
    assert session.views == {"t": (str(tmp_path / "a"), str(tmp_path / "b"))}
    assert not session.stopped


class Builder:
    """Records how a session is built."""

    def __init__(self) -> None:
        self.calls: dict[str, str] = {}
        self.session = FakeSession()

    def appName(self, name: str) -> Builder:
        return self

    def master(self, name: str) -> Builder:
        self.calls["master"] = name
        return self

    def remote(self, name: str) -> Builder:
        self.calls["remote"] = name
        return self

    def config(self, name: str, value: str) -> Builder:
        self.calls[name] = value
        return self

    def getOrCreate(self) -> FakeSession:
        return self.session


@pytest.mark.parametrize(
    ("environment", "master", "defaults", "expected"),
    [
        ({}, None, "", {"master": "local[2]"}),
        ({}, "spark://a:7077", "", {"master": "spark://a:7077"}),
        ({"SPARK_REMOTE": "sc://b"}, None, "", {"remote": "sc://b"}),
        ({"SPARK_REMOTE": "sc://b"}, "spark://a:7077", "", {"master": "spark://a:7077"}),
        ({"PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell"}, None, "", {}),
        ({}, None, "# comment\nspark.master  k8s://c\n", {}),
        ({}, None, "spark.executor.memory 2g\n", {"master": "local[2]"}),
    ],
)
def test_which_cluster_is_used(
    environment: dict[str, str],
    master: str | None,
    defaults: str,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    builder = Builder()
    session = type("SparkSession", (), {"builder": builder, "getActiveSession": staticmethod(lambda: None)})
    monkeypatch.setattr("data_checks.checks.engines._pyspark_sql", lambda: type("sql", (), {"SparkSession": session}))
    for name in ("SPARK_REMOTE", "PYSPARK_SUBMIT_ARGS", "MASTER", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "spark-defaults.conf").write_text(defaults)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    with SparkEngine(master=master, settings={"spark.x": "1"}):
        pass
    assert {name: builder.calls[name] for name in ("master", "remote") if name in builder.calls} == expected
    assert builder.calls["spark.x"] == "1"
    assert builder.session.stopped


def test_differences_between_results_are_found() -> None:
    bench = bench_spark()
    assert bench.differences({"a": [1, 2.0, None]}, {"a": [1, 2.0 * (1 + 1e-13), None]}) == (3, [])
    assert bench.differences({"a": [1, 2.0]}, {"a": [1, 2.0 * (1 + 1e-11)]}) == (2, [".a[1]"])
    assert bench.differences({"a": 1}, {"a": 1.0}) == (1, [".a"])
    assert bench.differences({"a": 1}, {"b": 1})[1] == [""]


@pytest.mark.skipif(importlib.util.find_spec("pyspark") is None, reason=NO_SPARK)
def test_spark_gives_the_same_numbers(tmp_path: Path) -> None:
    bench = bench_spark()
    data = bench.make(tmp_path, 5000, seed=2)
    with DuckDbEngine(num_threads=1) as duckdb, SparkEngine(settings={"spark.sql.shuffle.partitions": "2"}) as spark:
        compared, different = bench.differences(bench.run(duckdb, data), bench.run(spark, data))
    assert compared > 1000
    assert different == []
