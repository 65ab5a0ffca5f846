"""Suites and verdicts: every limit holds, nothing passes by being empty, missing or broken, and no row text is kept."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from feature_rows import checked, good_columns, write_features

from data_checks.checks import (
    Check,
    Found,
    Measured,
    catalogue,
    describe_check,
    overall_verdict,
    run_checks,
    warm_up,
    worst_first,
    write_data_docs,
)
from data_checks.checks import gx_run as gx_run_module
from data_checks.checks.gx_run import SuiteResult, SuiteRun, exception_message, run_suites
from data_checks.checks.judge import incomplete, judge_suite
from data_checks.checks.metrics_sql import PREFIXES
from data_checks.checks.suite_files import SUITES, checks_of, expectations_of, load_suite
from data_checks.checks.tables import one_row
from data_checks.checks.thresholds import parameters
from data_checks.config import CheckDataConfig

CONFIG = CheckDataConfig.model_validate({"preferences": [{"path": "p.jsonl"}], "min_pairs": 2, "min_feedback": 2})
ALL_KINDS = set(PREFIXES)
MANY = 10**12
"""Rows enough for chance to play no part."""


def features(folder: Path, tables: tuple[str, ...] = ("preferences",), num_rows: int = 400) -> dict[str, Path]:
    return {table: write_features(folder / f"{table}.parquet", good_columns(num_rows, table)) for table in tables}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A flawless set with every kind of input."""
    return run_checks(checked(features(tmp_path_factory.mktemp("good"), tuple(PREFIXES))), CONFIG)


def other_than_pass(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.verdict for check in checks if check.verdict not in ("pass", "skipped")}


def verdict_of(columns: dict[str, Any], folder: Path, config: CheckDataConfig = CONFIG, **more: Any) -> dict[str, str]:
    path = write_features(folder / "p.parquet", columns)
    return other_than_pass(run_checks(checked({"preferences": path}, **more), config).checks)


def test_good_data_passes_every_check(found: Found) -> None:
    assert other_than_pass(found.checks) == {}
    assert overall_verdict(found.checks) == "pass"
    names = [check.name for check in found.checks]
    assert len(names) == len(set(names))
    assert set(names) == {info.name for info in catalogue()}
    for run in found.runs:
        statistics = found.results[run.name]["statistics"]
        assert len(run.expectations) == statistics["declared_expectations"] == statistics["evaluated_expectations"] > 0
    skipped = {check.name: check.reason for check in found.checks if check.verdict == "skipped"}
    assert all(skipped.values())
    assert skipped["semantic_duplicate_fraction"] == "data.semantic_duplicates is false"
    assert skipped["unusable_prompts_fraction"] == "no pass rates"


def test_every_row_of_the_catalogue_has_a_check() -> None:
    numbers = {number for info in catalogue() for number in info.numbers}
    assert numbers == set(range(1, 31))


def test_suites_say_of_each_check_what_it_is_and_what_to_do() -> None:
    for info in catalogue():
        assert all((info.advice, info.unit, info.source, info.tables)), info.name
        assert set(info.tables) <= ALL_KINDS, info.name
        assert info.kind in ("exact", "rate", "estimate", "rows"), info.name
        assert (info.warn or info.fail) or info.kind == "rows", info.name
        assert info.severity == "warning" or info.fail or info.kind == "rows", info.name
        assert all(hasattr(CONFIG, field) for field, _ in info.unless), info.name
    for suite in SUITES:
        declared = {item["meta"]["check"] for item in load_suite(suite)["expectations"]}
        assert declared == set(checks_of(suite))
        assert {item["severity"] for item in load_suite(suite)["expectations"]} <= {"critical", "warning"}


def beyond(limits: tuple[Any, Any], by: float) -> float:
    low, high = (getattr(CONFIG, x["config"]) if isinstance(x, dict) else x for x in limits)
    return float(high + by if high is not None else low - by)


def judged(numbers: dict[str, Any], names: set[str], skipped: dict[str, str] | None = None) -> dict[str, Check]:
    """Judge numbers by some checks of the whole set, on so many rows that limits are not widened."""
    everything = expectations_of("data_set", ALL_KINDS, CONFIG, True)
    expectations = [item for item in everything if item["meta"]["check"] in names]
    infos = [info for info in checks_of("data_set").values() if info.name in names]
    measured = Measured(numbers, {info.metric: MANY for info in infos}, skipped or {})
    named, in_force = parameters(infos, measured, CONFIG)
    run = SuiteRun("data_set", expectations, one_row(measured, [info.metric for info in infos]), named)
    (result,) = run_suites([run])
    return {check.name: check for check in judge_suite(run, result, in_force, measured)}


@pytest.mark.parametrize("side", ["warn", "fail"])
def test_each_limit_is_held(side: str) -> None:
    """All checks with such a limit are put on it, then beyond it: each must say so."""
    infos = [info for info in checks_of("data_set").values() if getattr(info, side)]
    assert len(infos) > 50
    at_limit, outside = {}, {}
    for info in infos:
        limits = getattr(info, side)
        counts = info.unit in ("rows", "pairs", "prompts", "scores")
        step = 1 if counts else 1e-7 if info.unit == "probability" else 1e-5
        at_limit[info.metric], outside[info.metric] = beyond(limits, 0), beyond(limits, step)
    names = {info.name for info in infos}
    inside, broken = judged(at_limit, names), judged(outside, names)
    for info in infos:
        # A warning lies inside its failure, so at the limit of a failure the warning may be broken.
        allowed = {"pass"} if side == "warn" else {"pass", "warn"}
        assert inside[info.name].verdict in allowed, info.name
        assert broken[info.name].verdict == side, info.name
        limits = broken[info.name].limits
        assert limits is not None
        assert beyond(limits, 0) == pytest.approx(beyond(getattr(info, side), 0), rel=1e-3), info.name


def test_a_number_that_is_missing_is_an_error_unless_a_reason_is_given() -> None:
    numbers = {"label_noise_fraction": None, "pii_fraction": float("nan"), "rows_kept": None, "rows": 5}
    names = {*numbers, "duplicate_fraction"}
    checks = judged(numbers, names, {"label_noise_fraction": "too few pairs"})
    assert {name: check.verdict for name, check in checks.items()} == {
        "duplicate_fraction": "error",
        "label_noise_fraction": "skipped",
        "pii_fraction": "error",
        "rows": "pass",
        "rows_kept": "error",
    }
    assert checks["label_noise_fraction"].reason == "too few pairs"
    assert "nothing says why" in str(checks["duplicate_fraction"].error)


def test_a_warning_and_a_failure_on_one_number_are_one_check() -> None:
    numbers = {"duplicate_fraction": 0.02, "pii_fraction": 0.005, "mojibake_fraction": 0.0, "chosen_longer_share": 0.5}
    checks = judged(numbers, set(numbers))
    assert checks["duplicate_fraction"].verdict == "fail"
    assert checks["duplicate_fraction"].threshold == pytest.approx(0.01, rel=1e-4)
    assert (checks["pii_fraction"].verdict, checks["pii_fraction"].threshold) == ("warn", 0.001)
    assert (checks["mojibake_fraction"].verdict, checks["mojibake_fraction"].threshold) == ("pass", 0.001)
    assert checks["chosen_longer_share"].threshold == pytest.approx([0.4, 0.6], abs=1e-4)
    assert (checks["pii_fraction"].severity, checks["mojibake_fraction"].severity) == ("error", "warning")
    assert overall_verdict([checks["pii_fraction"]]) == "warn"


def test_overall_verdict_leaves_skipped_checks_out() -> None:
    one = Check("a", "error", 1, 0, "rows", "pass")
    skipped = replace(one, name="b", verdict="skipped")
    assert overall_verdict([one, skipped]) == "pass"
    assert overall_verdict([skipped]) == overall_verdict([]) == "error"
    order = [replace(one, verdict=v) for v in ("skipped", "pass", "warn", "fail", "error")]  # type: ignore[arg-type]
    assert [check.verdict for check in worst_first(order)] == ["error", "fail", "warn", "pass", "skipped"]


def test_zero_rows_never_pass(tmp_path: Path) -> None:
    columns = good_columns(1)
    columns |= {"fate": ["quarantined"], "reason": ["secret"], "split": [None]}
    verdicts = verdict_of(columns, tmp_path)
    assert {name for name, verdict in verdicts.items() if verdict == "fail"} == {
        *("rows_kept", "num_train_pairs", "num_validation_pairs", "quarantined_fraction")
    }
    assert "error" not in verdicts.values()
    nothing = run_checks(checked({}), CONFIG)
    assert [(check.name, check.verdict) for check in nothing.checks] == [("data_set_complete", "error")]


def test_an_expectation_that_was_not_evaluated_is_an_error() -> None:
    for declared, evaluated, results in ((3, 2, 2), (3, 3, 2), (2, 3, 3), (0, 0, 0)):
        (check,) = incomplete(SuiteResult("suite", declared, evaluated, [{}] * results))
        assert check.verdict == "error"
    assert incomplete(SuiteResult("suite", 3, 3, [{}] * 3)) == []


def test_a_suite_whose_column_is_gone_is_an_error_and_no_failure(found: Found) -> None:
    run = next(run for run in found.runs if run.name == "kept_rows_preferences")
    broken = replace(run, table=run.table.drop(columns=["chosen_characters"]))
    (result,) = run_suites([broken])
    verdicts = other_than_pass(judge_suite(broken, result, {}, Measured()))
    assert verdicts == {"kept_columns": "fail", "kept_known": "error", "kept_not_empty": "error"}


def test_both_shapes_of_an_exception_are_errors() -> None:
    flat = {"raised_exception": True, "exception_message": "flat", "exception_traceback": "..."}
    assert exception_message(flat) == "flat"
    assert exception_message({"MetricConfigurationID(...)": {**flat, "exception_message": "nested"}}) == "nested"
    assert exception_message({"raised_exception": False, "exception_message": None}) is None
    assert exception_message({}) is None


ROW_DEFECTS = [
    ("chosen_characters", 0, {"kept_not_empty": "fail"}),
    ("rejected_words", 0, {"kept_not_empty": "fail"}),
    ("num_turns", 0, {"kept_has_turns": "fail"}),
    ("chosen_tokens", 2000, {"kept_within_limits": "fail"}),
    ("prompt_tokens", 600, {"kept_within_limits": "fail"}),
    ("total_tokens", 1025, {"kept_within_limits": "fail"}),
    ("rejected_key", None, {"kept_known": "fail"}),
    ("prompt_tokens", None, {"kept_tokens_known": "fail"}),
    ("example", 8, {"kept_examples_distinct": "fail"}),
    ("split", "test", {"kept_split_known": "fail"}),
    ("margin", -1.0, {"kept_margin_not_negative": "warn"}),
    ("is_preference", 0, {"kept_is_preference": "fail"}),
    ("has_secret", 1, {"kept_without_secret": "fail"}),
]


def test_each_rule_on_kept_rows(found: Found) -> None:
    """Each defect is put into a table of its own; all tables are judged in one context."""
    run = next(run for run in found.runs if run.name == "kept_rows_preferences")
    assert {name for _, _, expected in ROW_DEFECTS for name in expected} == {
        item["meta"]["check"] for item in run.expectations
    } - {"kept_sampled", "kept_columns"}
    runs = []
    for index, (column, value, expected) in enumerate(ROW_DEFECTS):
        table = run.table.astype({column: "object"})
        table.loc[7, column] = value
        own = [item for item in run.expectations if item["kwargs"].get("column") == column]
        assert {item["meta"]["check"] for item in own} >= set(expected)
        runs.append(replace(run, name=f"{run.name}_{index}", table=table, expectations=own))
    for result, own_run, (_, value, expected) in zip(run_suites(runs), runs, ROW_DEFECTS, strict=True):
        checks = judge_suite(own_run, result, {}, Measured())
        assert other_than_pass(checks) == expected
        broken = next(check for check in checks if check.name in expected)
        assert broken.value == (2 if value == 8 else 1)  # both rows of a repeated number


def test_policies_lift_what_they_allow(tmp_path: Path) -> None:
    columns = good_columns(400)
    for name in ("prompt_key", "chosen_key", "rejected_key"):
        columns[name] = list(columns[name])
        columns[name][2] = columns[name][1]
    columns["chosen_key"][4], columns["rejected_key"][4] = columns["rejected_key"][3], columns["chosen_key"][3]
    columns["prompt_key"][4] = columns["prompt_key"][3]
    columns["chosen_flags"] = [16] + [0] * 399
    many = {"num_duplicates": 100, "num_conflicts": 100}
    strict = verdict_of(columns, tmp_path, whole=many)
    assert {name: verdict for name, verdict in strict.items() if "secret" not in name} == {
        **dict.fromkeys(("duplicate_fraction", "duplicate_rows_kept"), "fail"),
        **dict.fromkeys(("conflicting_fraction", "conflicting_rows_kept"), "fail"),
    }
    keep = {"duplicates": "keep_all", "conflicts": "keep_all", "secrets": "keep"}
    lenient = verdict_of(columns, tmp_path, CONFIG.model_copy(update=keep), whole=many)
    assert lenient == dict.fromkeys(("duplicate_fraction", "conflicting_fraction", "secret_rows"), "warn")


def test_one_source_among_several_is_found_by_its_own_check(tmp_path: Path) -> None:
    columns = good_columns(2000)
    columns["source"] = ["biased" if index % 10 == 0 else "fine" for index in range(2000)]
    columns["chosen_tokens"] = [16 if index % 20 in (0, 1, 10, 3, 5, 7, 9, 11) else 12 for index in range(2000)]
    columns["rejected_tokens"] = [14] * 2000
    found = run_checks(checked({"preferences": write_features(tmp_path / "q.parquet", columns)}), CONFIG)
    assert other_than_pass(found.checks) == {"chosen_longer_share_by_source": "warn"}
    (check,) = (check for check in found.checks if check.name == "chosen_longer_share_by_source")
    assert check.value == 1.0
    one = run_checks(
        checked({"preferences": write_features(tmp_path / "r.parquet", good_columns(50, sources=1))}), CONFIG
    )
    assert {check.verdict for check in one.checks if check.name.endswith("_by_source")} == {"skipped"}


def test_without_a_tokenizer_what_needs_one_is_skipped(tmp_path: Path) -> None:
    columns = good_columns(400)
    for part in ("prompt", "chosen", "rejected"):
        columns[f"{part}_tokens"] = [None] * 400
    found = run_checks(checked({"preferences": write_features(tmp_path / "p.parquet", columns)}, limits=None), CONFIG)
    assert other_than_pass(found.checks) == {}
    reasons = {check.name: check.reason for check in found.checks if check.verdict == "skipped"}
    for name in ("too_long_fraction", "special_token_fraction", "over_long_gap", "kept_within_limits"):
        assert reasons[name] == "no tokenizer was given"


def test_results_are_the_same_each_time_and_hold_no_values(tmp_path: Path) -> None:
    columns = good_columns(60)
    columns["margin"] = [-4711.25] + [0.5] * 59
    data = checked({"preferences": write_features(tmp_path / "p.parquet", columns)})
    first, second = (run_checks(data, CONFIG) for _ in range(2))
    texts = [json.dumps([run.results, [c.as_json() for c in run.checks], run.numbers]) for run in (first, second)]
    assert texts[0] == texts[1]
    assert "4711" not in texts[0]
    assert '"unexpected_count": 1' in texts[0]
    # Pages name metrics and limits, and show no value of a row either.
    page = write_data_docs(tmp_path / "pages", first.runs)
    assert page == tmp_path / "pages" / "index.html"
    pages = list(page.parent.rglob("*.html"))
    assert len(pages) >= 1 + 2 * len(first.runs)
    text = "".join(file.read_text(encoding="utf-8") for file in pages)
    assert "4711" not in text
    assert "duplicate_fraction" in text


def test_an_action_of_ours_collects_what_the_checkpoint_found(monkeypatch: pytest.MonkeyPatch, found: Found) -> None:
    calls = []
    original = gx_run_module.CollectResults.run
    monkeypatch.setattr(
        gx_run_module.CollectResults,
        "run",
        lambda *a, **k: calls.append(1) or original(*a, **k),  # type: ignore[func-returns-value]
    )
    run_suites(replace(run, expectations=run.expectations[:1]) for run in found.runs[:2])
    assert len(calls) == 2


def test_importing_the_checks_imports_no_engine_and_no_great_expectations() -> None:
    heavy = ["great_expectations", "pandas", "duckdb", "pyspark", "sklearn", "torch"]
    code = f"import data_checks.checks, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_warm_up_imports_in_the_background() -> None:
    code = (
        "import sys; from data_checks.checks import warm_up; thread = warm_up(); assert thread.daemon; thread.join();"
        "print('great_expectations' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
    assert warm_up().daemon


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("rows_kept", 1, 2, "pairs", (2, None)), "rows_kept is 1 pair, allowed: at least 2 pairs"),
        (("quarantined_fraction", 0.025, 0, "fraction", (None, 0.001)), "(1 of 40), allowed: at most 0.1 %"),
        (("chosen_longer_share", 0.75, 0, "fraction", (0.4, 0.6)), "75 % of the kept pairs, allowed: 40 % to 60 %"),
        (("truncated_gap", 0.075, 0, "points", (-0.05, 0.05)), "is 7.5 points, allowed: -5 points to 5 points"),
        (("rows_unaccounted", 3, 0, "rows", (0, 0)), "is 3 rows, allowed: 0 rows"),
        (("kept_not_empty", 3, 0, "rows", None), "is 3 rows, allowed: none"),
        (("pii_fraction", None, 0, "fraction", (None, 0.1)), "pii_fraction is not known"),
    ],
)
def test_checks_in_words(values: tuple[Any, ...], words: str, tmp_path: Path) -> None:
    name, value, threshold, unit, limits = values
    data = checked(features(tmp_path, num_rows=40))
    check = Check(name, "error", value, threshold, unit, "fail", limits=limits)
    assert words in describe_check(check, data)
    skipped = replace(check, verdict="skipped", reason="no tokenizer")
    assert describe_check(skipped, data) == f"{name} was skipped: no tokenizer"


def test_output_has_the_promised_fields(found: Found) -> None:
    check = found.checks[0]
    assert list(check.brief()) == ["name", "severity", "value", "threshold", "unit", "verdict"]
    assert {"advice", "error", "limits", "numbers", "reason"} <= set(check.as_json())
    assert isinstance(pd.DataFrame([c.brief() for c in found.checks]), pd.DataFrame)
