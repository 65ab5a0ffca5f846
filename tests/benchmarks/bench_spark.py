"""The metric stage on Spark beside DuckDB: the same SQL text, every number compared, times as a ratio.

    make bench-spark        or        python tests/benchmarks/bench_spark.py --rows 1000000

Spark runs in this process with two local threads, or on the cluster that SPARK_REMOTE or spark.master names. Its first
query warms up the JVM; both engines run `--repetitions` times and the fastest run of each counts. Needs Java 17 and the
packages of requirements/bench-spark.txt on the path. Exit code 1: a number differs.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "scripted"))

from feature_rows import checked, random_columns, write_features

from data_checks.checks import DuckDbEngine, Engine, SparkEngine, measure
from data_checks.checks.tables import kept_sample
from data_checks.config import CheckDataConfig
from data_checks.result import CheckedData

RELATIVE = 1e-12
"""How far doubles may differ: they are added in another order. Integers, and shares of integers, must be equal."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of preferences; feedback and prompts get a tenth")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def make(folder: Path, num_rows: int, seed: int) -> CheckedData:
    """Write features of every kind and return the data set that they belong to."""
    sizes = {"preferences": num_rows, "feedback": num_rows // 10, "rl_prompts": num_rows // 10}
    features = {
        table: write_features(folder / f"{table}.parquet", random_columns(size, seed, table))
        for table, size in sizes.items()
    }
    return checked(features)


def run(engine: Engine, data: CheckedData) -> dict[str, Any]:
    """Return all that the metric stage measures, and the sample of kept rows."""
    config = CheckDataConfig.model_validate({"preferences": [{"path": "rows.jsonl"}]})
    measured = measure(data, config, engine)
    tables = {table: kept_sample(engine, table, {table: [path]}).to_pydict() for table, path in data.features.items()}
    return {**vars(measured), "samples": tables}


def differences(first: Any, second: Any, place: str = "") -> tuple[int, list[str]]:
    """Return how many numbers and texts were compared, and where two differ."""
    if isinstance(first, dict) and isinstance(second, dict) and list(first) == list(second):
        pairs = [(first[name], second[name], f"{place}.{name}") for name in first]
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = [(a, b, f"{place}[{index}]") for index, (a, b) in enumerate(zip(first, second, strict=True))]
    else:
        return 1, [] if same(first, second) else [place]
    found = [differences(*pair) for pair in pairs]
    return sum(number for number, _ in found), [text for _, texts in found for text in texts]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=RELATIVE, abs_tol=0.0)
    return type(first) is type(second) and bool(first == second)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        data = make(Path(folder), options.rows, options.seed)
        results: dict[str, Any] = {}
        seconds: dict[str, list[float]] = {}
        for name, make_engine in (
            ("duckdb", lambda: DuckDbEngine(Path(folder), num_threads=2)),
            ("spark", SparkEngine),
        ):
            started = time.perf_counter()
            with make_engine() as engine:
                print(f"{name}: ready after {time.perf_counter() - started:.2f} s", flush=True)
                for _ in range(options.repetitions):
                    started = time.perf_counter()
                    results[name] = run(engine, data)
                    seconds.setdefault(name, []).append(time.perf_counter() - started)
            print(f"{name}: {', '.join(f'{value:.2f}' for value in seconds[name])} s", flush=True)
        compared, different = differences(results["duckdb"], results["spark"])
    numbers = len(results["duckdb"]["numbers"])
    print(f"{options.rows} rows of preferences: {numbers} numbers, {compared} values compared, {len(different)} differ")
    for place in different[:20]:
        print(f"  differs: {place}")
    print(f"spark / duckdb: {min(seconds['spark']) / min(seconds['duckdb']):.1f}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
