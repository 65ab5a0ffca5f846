"""The whole data check of a file of pairs, beside the same assertions made with Great Expectations' pandas engine.

    make bench-data        or        python tests/benchmarks/bench_data.py --pairs 1000000

Both run as processes of their own on the same generated file: `tidegate check FILE` with all its checks, and a script
that reads the file with pandas and asserts, with Great Expectations alone, what its engine can: counts, missing values,
lengths, control characters, pairs whose sides are equal, and repeated rows. Printed: wall time and peak memory (the
sum of the proportional memory of all processes, sampled), and the ratios. `--only ours` leaves the other side out, for
files that do not fit in pandas.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import measure

MIB = 2**20
NUM_WORDS = 4000
SYLLABLES = (
    "ba",
    "co",
    "di",
    "fen",
    "gar",
    "hu",
    "il",
    "jo",
    "ka",
    "lum",
    "mi",
    "nor",
    "ol",
    "pe",
    "qua",
    "ri",
    "sto",
    "tu",
)
QUESTIONS = ("How do I", "Why does the", "Where can I find", "What is the way to", "Who made the")
ENDINGS = ("and go slowly.", "before it rains.", "as the label says.", "until it shines.", "and ask a friend.")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--only", choices=("ours", "gx"), help="run one side alone")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--file", type=Path, help="a file of pairs that is there already")
    parser.add_argument("--output", type=Path, default=Path(".bench/data.json"))
    parser.add_argument("--gx-file", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def generate(path: Path, num_pairs: int) -> None:
    """Write pairs of short text, two a prompt, with a few of the defects that real files have."""
    generator = random.Random(0)
    words = ["".join(generator.choices(SYLLABLES, k=generator.randint(1, 4))) for _ in range(NUM_WORDS)]
    prompt = ""
    with path.open("w", encoding="utf-8") as stream:
        for number in range(num_pairs):
            if number % 2 == 0:
                prompt = f"{generator.choice(QUESTIONS)} {' '.join(generator.choices(words, k=5))}?"
            chosen, rejected = (
                f"{' '.join(generator.choices(words, k=6)).capitalize()} {generator.choice(ENDINGS)}" for _ in "ab"
            )
            if number % 5000 == 17:
                rejected = chosen
            if number % 5000 == 29:
                chosen = "   "
            stream.write(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n")


def assert_with_gx(path: Path) -> dict[str, Any]:
    """Read the file with pandas and assert with Great Expectations; return what it found."""
    import great_expectations as gx
    import great_expectations.expectations as gxe
    import pandas as pd
    from great_expectations.data_context.types.base import ProgressBarsConfig

    frame = pd.read_json(path, lines=True)
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    suite = context.suites.add(gx.ExpectationSuite(name="pairs"))
    columns = ("prompt", "chosen", "rejected")
    for column in columns:
        suite.add_expectation(gxe.ExpectColumnValuesToNotBeNull(column=column))
        suite.add_expectation(gxe.ExpectColumnValueLengthsToBeBetween(column=column, min_value=1, max_value=20_000))
        suite.add_expectation(gxe.ExpectColumnValuesToNotMatchRegex(column=column, regex=r"^\s*$"))
        suite.add_expectation(
            gxe.ExpectColumnValuesToNotMatchRegex(column=column, regex=r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
        )
        suite.add_expectation(gxe.ExpectColumnValuesToNotMatchRegex(column=column, regex=r"[^@\s]+@[^@\s]+\.\w+"))
    suite.add_expectation(gxe.ExpectTableRowCountToBeBetween(min_value=1))
    suite.add_expectation(gxe.ExpectCompoundColumnsToBeUnique(column_list=list(columns)))
    suite.add_expectation(gxe.ExpectColumnPairValuesAToBeGreaterThanB(column_A="chosen", column_B="rejected"))
    batch = (
        context.data_sources.add_pandas("pandas")
        .add_dataframe_asset("pairs")
        .add_batch_definition_whole_dataframe("all")
    )
    validation = context.validation_definitions.add(gx.ValidationDefinition(name="pairs", data=batch, suite=suite))
    result = validation.run(
        batch_parameters={"dataframe": frame},
        result_format={"result_format": "SUMMARY", "exclude_unexpected_values": True, "partial_unexpected_count": 0},
    )
    return {"rows": len(frame), "evaluated": result.statistics["evaluated_expectations"]}


def measured(command: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a command; return its wall seconds, the peak memory of its process tree, and what it printed."""
    errors, output = folder / "errors.txt", folder / "output.txt"
    result = measure(["bash", "-c", 'exec "$@" > "$0"', str(output), *command], errors, interval_seconds=0.25)
    found = {"seconds": result.seconds, "peak_mib": result.peak_bytes("pss") / MIB, "code": result.exit_code}
    return found | {"output": output.read_text(encoding="utf-8"), "errors": errors.read_text(errors="replace")[-2000:]}


def ours(path: Path, folder: Path) -> dict[str, Any]:
    command = str(Path(sys.executable).with_name("tidegate"))
    result = measured([command, "check", str(path), "--json"], folder)
    if result["code"] not in (0, 3):
        raise SystemExit(f"tidegate check ended with {result['code']}: {result['errors'][-2000:]}")
    found = json.loads(result["output"])
    kept = found["kept"] + sum(found["quarantined"].values()) + sum(found["dropped"].values())
    assert kept == found["rows"], "a row is lost"
    return result | {"rows": found["rows"], "checks": len(found["checks"]), "verdict": found["verdict"]}


def with_gx(path: Path, folder: Path) -> dict[str, Any]:
    result = measured([sys.executable, __file__, "--gx-file", str(path)], folder)
    if result["code"]:
        raise SystemExit(f"Great Expectations alone ended with {result['code']}: {result['errors'][-2000:]}")
    return result | json.loads(result["output"].splitlines()[-1])


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    if options.gx_file is not None:
        print(json.dumps(assert_with_gx(options.gx_file)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = options.file or Path(folder) / "pairs.jsonl"
        if options.file is None:
            generate(path, options.pairs)
        sides = {"ours": ours, "gx": with_gx}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides if options.only in (None, name)}
        for _ in range(options.repetitions):
            for name in runs:  # One after the other, in turn: a busy machine hits both.
                runs[name].append(sides[name](path, Path(folder)))
        size = path.stat().st_size
    best = {name: min(results, key=lambda result: result["seconds"]) for name, results in runs.items()}
    print(f"file: {best[next(iter(best))]['rows']:,} pairs, {size / MIB:.0f} MiB, {os.cpu_count()} cores")
    for name, result in best.items():
        what = f"{result['checks']} checks" if name == "ours" else f"{result['evaluated']} expectations"
        print(f"{name:5} {result['seconds']:7.2f} s  {result['peak_mib']:7.0f} MiB  {what}")
    if len(best) == 2:
        ratios = [best["ours"][key] / best["gx"][key] for key in ("seconds", "peak_mib")]
        print(f"ours / Great Expectations alone: time {ratios[0]:.2f}, memory {ratios[1]:.2f}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"bytes": size, "runs": runs}, indent=1, default=str), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
