"""The whole check: rows, numbers, verdicts, report. The stage and `tidegate check` both run it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_checks.config import CheckDataConfig
from data_checks.result import CheckedData, Numbers
from data_checks.runner import InputFiles, ReportProgress, check_dataset, no_progress

if TYPE_CHECKING:
    import pyarrow as pa

    from data_checks.checks.gx_run import SuiteRun
    from data_checks.samples import SampleAnalysis


@dataclass
class Outcome:
    """What a check found and concluded."""

    data: CheckedData
    checks: list[Any]
    """`checks.Check`, worst first."""
    numbers: Numbers
    report: dict[str, Any]
    """What report.json holds."""
    results: dict[str, Any]
    """What Great Expectations said, by suite."""
    runs: list[SuiteRun]
    """What was run, for Data Docs."""


def check(
    files: InputFiles,
    config: CheckDataConfig,
    tokenizer: Path | None,
    *,
    seed: int,
    work_folder: Path,
    output_folder: Path | None = None,
    progress: ReportProgress = no_progress,
    num_workers: int | None = None,
) -> Outcome:
    """Check a data set whole. Arguments and errors are those of `runner.check_dataset`."""
    from data_checks.checks import DuckDbEngine, SparkEngine, run_checks, warm_up
    from data_checks.report import build_report

    warm_up()
    # In a thread: most of its time is spent outside of Python, as that of writing the tables is.
    with ThreadPoolExecutor(1, "sample") as executor:
        futures: list[Future[SampleAnalysis | None]] = []
        data = check_dataset(
            files,
            config,
            tokenizer,
            seed=seed,
            work_folder=work_folder,
            output_folder=output_folder,
            progress=progress,
            num_workers=num_workers,
            on_sample=lambda sample: futures.append(executor.submit(_analyse, sample, config)),
        )
        progress(0, 0, "measuring")
        engine = SparkEngine() if config.metric_engine == "spark" else DuckDbEngine(work_folder / "metrics")
        try:
            found = run_checks(data, config, futures[0].result, engine=engine)
        finally:
            engine.close()
        analysis = futures[0].result()
    report = build_report(data, found.checks, found.numbers, found.details, analysis)
    return Outcome(data, found.checks, found.numbers, report, found.results, found.runs)


def _analyse(sample: pa.Table | None, config: CheckDataConfig) -> SampleAnalysis | None:
    """Return what the costly checks say of the sample."""
    from data_checks.samples import analyse

    if sample is None:
        return None
    analysis = analyse(sample, config)
    if config.semantic_duplicates:
        from data_checks.whole.semantic import semantic_duplicates_fraction

        fraction = semantic_duplicates_fraction(sample["prompt_text"].to_pylist())
        analysis.numbers["semantic_duplicate_fraction"] = fraction
    return analysis
