"""All checks of a data set: measure, assert with Great Expectations, judge."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_checks.checks.engines import DuckDbEngine, Engine, Views
from data_checks.checks.measure import measure
from data_checks.checks.measured import Measured
from data_checks.checks.metrics_sql import PREFIXES
from data_checks.checks.suite_files import CheckInfo, checks_of, expectations_of
from data_checks.checks.tables import kept_sample, long_table, one_row
from data_checks.checks.thresholds import bounds, check_names, parameters
from data_checks.checks.verdicts import Bounds, Check, worst_first
from data_checks.config import CheckDataConfig
from data_checks.result import CheckedData, Numbers

if TYPE_CHECKING:
    from data_checks.checks.gx_run import SuiteRun
    from data_checks.samples import SampleAnalysis

NO_SAMPLE = "there is no kept row with an answer to take a sample of"
NO_SEMANTIC = "data.semantic_duplicates is false"
ONE_SOURCE = "there is one source: the check on the whole set says it"


@dataclass
class Found:
    """What the checks say, and what they rest on."""

    checks: list[Check]
    """Worst first."""
    numbers: Numbers
    """Every number of the whole set, those of the sample included."""
    details: dict[str, Any]
    """`by_source`, `sources`, `histograms` and `lengths`, for reports."""
    results: dict[str, Any]
    """What Great Expectations said, by suite."""
    runs: list[SuiteRun] = field(default_factory=list, repr=False)
    """What was run, for `write_data_docs`."""


def warm_up() -> threading.Thread:
    """Begin to import Great Expectations (about two seconds of one core) while the caller waits for other processes.

    Call it after worker processes were forked: a child that is forked during an import inherits its locks and may hang.
    With spawned ones the order does not matter. Returns the thread; nobody has to join it.
    """
    thread = threading.Thread(target=_import_great_expectations, name="import-great-expectations", daemon=True)
    thread.start()
    return thread


def _import_great_expectations() -> None:
    import data_checks.checks.gx_run  # noqa: F401


def run_checks(
    data: CheckedData,
    config: CheckDataConfig,
    sample: SampleAnalysis | Callable[[], SampleAnalysis | None] | None = None,
    *,
    engine: Engine | None = None,
    temporary_folder: Path | None = None,
) -> Found:
    """Hold a data set to every suite.

    Args:
        data: with its final features on disk.
        config: policies, and limits of its own.
        sample: the numbers of the costly checks, or what waits for them; None: there was nothing to sample.
        engine: where the metrics are computed; it is left open. None: DuckDB, for this call.
        temporary_folder: where that DuckDB may write what does not fit in memory.

    Raises:
        ConfigurationError: `config.thresholds` names a check that does not exist, or a limit that it does not have.
    """
    check_names(config)
    own = engine or DuckDbEngine(temporary_folder)
    try:
        measured = measure(data, config, own)
        sample = sample() if callable(sample) else sample
        _add_sample(measured, sample, config)
        views: Views = {table: [path] for table, path in data.features.items()}
        runs, in_force = _plan(data, config, measured, own, views)
    finally:
        if engine is None:
            own.close()
    checks, results = _evaluate(runs, in_force, measured, data)
    details = {
        "by_source": measured.by_source + ([] if sample is None else sample.by_source),
        "sources": measured.sources,
        "histograms": measured.histograms,
        "lengths": measured.lengths,
    }
    return Found(worst_first(checks), measured.numbers, details, results, runs)


def _add_sample(measured: Measured, sample: SampleAnalysis | None, config: CheckDataConfig) -> None:
    if sample is not None:
        measured.numbers |= sample.numbers
        measured.skipped |= {name: why for name, why in sample.skipped.items() if sample.numbers.get(name) is None}
    else:
        names = [info.metric for info in checks_of("data_set").values() if info.sample]
        measured.skipped |= {name: NO_SAMPLE for name in names if measured.numbers.get(name) is None}
    if not config.semantic_duplicates:
        measured.skipped["semantic_duplicate_fraction"] = NO_SEMANTIC


LimitsInForce = dict[tuple[str, str], Bounds]
LONG_COLUMNS = ["kind", "source", "metric", "value", "num_rows", "bound"]


def _plan(
    data: CheckedData, config: CheckDataConfig, measured: Measured, engine: Engine, views: Views
) -> tuple[list[SuiteRun], LimitsInForce]:
    """Return what to run, and the limits in force by (check, side)."""
    import pandas as pd

    from data_checks.checks.gx_run import SuiteRun

    has_tokenizer = data.limits is not None
    expectations = expectations_of("data_set", set(data.ledgers), config, has_tokenizer)
    infos = _infos("data_set", expectations)
    named, in_force = parameters(infos, measured, config)
    table = one_row(measured, [info.metric for info in infos])
    runs = [SuiteRun("data_set", expectations, table, _used(named, expectations))]
    kinds = [kind for kind in PREFIXES if kind in data.ledgers]
    for kind in kinds:
        own = expectations_of("sources", {kind}, config, has_tokenizer)
        if own and len(measured.sources.get(kind, [])) > 1:
            infos = _infos("sources", own)
            named, limits = _plain(infos, measured, config)
            in_force |= limits
            frame = pd.DataFrame(long_table(measured, infos, config), columns=LONG_COLUMNS)
            runs.append(SuiteRun(_run_name("sources", kind), own, frame, _used(named, own)))
    for kind in kinds:
        own = expectations_of("kept_rows", {kind}, config, has_tokenizer)
        if kind in views and measured.numbers.get(f"{PREFIXES[kind]}examples_kept"):
            frame = kept_sample(engine, kind, views).to_pandas()
            runs.append(SuiteRun(_run_name("kept_rows", kind), own, frame, _used(_token_limits(data), own)))
    return runs, in_force


def _run_name(suite: str, table: str) -> str:
    return f"{suite}_{table}"


def _infos(suite: str, expectations: list[dict[str, Any]]) -> list[CheckInfo]:
    named = checks_of(suite)
    return [named[name] for name in dict.fromkeys(item["meta"]["check"] for item in expectations)]


def _plain(
    infos: list[CheckInfo], measured: Measured, config: CheckDataConfig
) -> tuple[dict[str, float], LimitsInForce]:
    """Return limits that chance does not widen: it is in the long table's bounds already."""
    named: dict[str, float] = {}
    limits: LimitsInForce = {}
    for info in infos:
        found = bounds(info, "warn", measured, config, num_rows=0)
        assert found is not None
        limits[info.name, "warn"] = found
        named |= {f"{info.name}_warn_{w}": v for w, v in zip(("min", "max"), found, strict=True) if v is not None}
    return named, limits


def _token_limits(data: CheckedData) -> dict[str, float]:
    limits = data.limits
    if limits is None:
        return {}
    return {
        "max_prompt_tokens": limits.max_prompt_tokens,
        "max_response_tokens": limits.max_response_tokens or limits.max_total_tokens,
        "max_total_tokens": limits.max_total_tokens,
    }


def _used(named: dict[str, float], expectations: list[dict[str, Any]]) -> dict[str, float]:
    """Return the parameters that these expectations name."""
    wanted = {
        value["$PARAMETER"]
        for item in expectations
        for value in item["kwargs"].values()
        if isinstance(value, dict) and "$PARAMETER" in value
    }
    return {name: value for name, value in named.items() if name in wanted}


def _evaluate(
    runs: list[SuiteRun], in_force: LimitsInForce, measured: Measured, data: CheckedData
) -> tuple[list[Check], dict[str, Any]]:
    from data_checks.checks.gx_run import run_suites, stored
    from data_checks.checks.judge import judge_suite

    checks: list[Check] = []
    results: dict[str, Any] = {}
    for run, result in zip(runs, run_suites(runs), strict=True):
        checks += judge_suite(run, result, in_force, measured)
        results[run.name] = stored(result, run.parameters)
    checks += _not_run(runs, data)
    return checks, results


def _not_run(runs: list[SuiteRun], data: CheckedData) -> list[Check]:
    """Return the checks that apply to this data but could not be run, each with its reason."""
    from data_checks.checks.judge import skipped_check

    names = {run.name for run in runs}
    has_tokenizer = data.limits is not None
    checks = []
    for table in (table for table in PREFIXES if table in data.ledgers):
        for suite, why in (("sources", ONE_SOURCE), ("kept_rows", "no row is kept")):
            infos = [info for info in checks_of(suite).values() if info.applies({table})]
            if _run_name(suite, table) not in names:
                checks += [skipped_check(info, why) for info in infos]
            elif not has_tokenizer:
                checks += [skipped_check(info, "no tokenizer was given") for info in infos if info.needs == "tokenizer"]
    return checks
