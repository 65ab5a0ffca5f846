"""What a data set is held to: metrics by SQL, suites of Great Expectations, and our verdicts.

Importing this imports neither Great Expectations nor an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from data_checks.checks.engines import DuckDbEngine, Engine, SparkEngine
from data_checks.checks.measure import measure
from data_checks.checks.measured import Measured
from data_checks.checks.run import Found, run_checks, warm_up
from data_checks.checks.suite_files import CheckInfo, catalogue
from data_checks.checks.verdicts import VERDICTS, Check, Verdict, overall_verdict, worst_first
from data_checks.checks.wording import allowed, describe_check

if TYPE_CHECKING:
    from data_checks.checks.gx_run import SuiteRun


def write_data_docs(folder: Path, runs: Iterable[SuiteRun]) -> Path:
    """Write the Data Docs of `Found.runs` and return their first page (`gx_run.write_data_docs`)."""
    from data_checks.checks import gx_run

    return gx_run.write_data_docs(folder, runs)


__all__ = [
    "VERDICTS",
    "Check",
    "CheckInfo",
    "DuckDbEngine",
    "Engine",
    "Found",
    "Measured",
    "SparkEngine",
    "Verdict",
    "allowed",
    "catalogue",
    "describe_check",
    "measure",
    "overall_verdict",
    "run_checks",
    "warm_up",
    "worst_first",
    "write_data_docs",
]
