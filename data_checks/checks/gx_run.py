"""One suite on one table, by a Great Expectations checkpoint. Importing this module imports Great Expectations.

What is kept of a result holds no row text: tables hold numbers, keys and names of sources, and unexpected values are
left out of every result, stored or shown.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import great_expectations as gx
import pandas as pd
from great_expectations.checkpoint.actions import ActionContext, UpdateDataDocsAction, ValidationAction
from great_expectations.checkpoint.checkpoint import CheckpointResult
from great_expectations.compatibility.pydantic import PrivateAttr
from great_expectations.data_context.types.base import ProgressBarsConfig

RESULT_FORMAT: Any = {"result_format": "SUMMARY", "exclude_unexpected_values": True, "partial_unexpected_count": 0}
STORED_RESULT_KEYS = ("observed_value", "element_count", "unexpected_count", "unexpected_percent", "missing_count")
LOCK = threading.Lock()
"""A context sets a project for the whole process: one run at a time."""


@dataclass(frozen=True)
class SuiteRun:
    """What a suite is run on; enough to run it again."""

    name: str
    expectations: list[dict[str, Any]]
    table: pd.DataFrame
    parameters: Mapping[str, float]


@dataclass(frozen=True)
class SuiteResult:
    """What Great Expectations said."""

    name: str
    declared: int
    evaluated: int
    results: list[dict[str, Any]]
    """One an expectation, in the order of the suite."""

    @property
    def is_complete(self) -> bool:
        """Whether every declared expectation was evaluated. A suite without any counts as a success there, not here."""
        return bool(self.declared) and self.declared == self.evaluated == len(self.results)


class CollectResults(ValidationAction):
    """Keeps the results of a checkpoint's suites as plain data, for verdicts that are ours."""

    type: Literal["tidegate_collect_results"] = "tidegate_collect_results"
    _collected: list[dict[str, Any]] = PrivateAttr(default_factory=list)

    @property
    def collected(self) -> list[dict[str, Any]]:
        return self._collected

    def run(self, checkpoint_result: CheckpointResult, action_context: ActionContext | None = None) -> dict[str, Any]:
        run_results: Any = checkpoint_result.run_results
        outcomes = [result.to_json_dict() for result in run_results.values()]
        self._collected.extend(outcomes)
        return {"num_suites": len(outcomes)}


def run_suites(runs: Iterable[SuiteRun]) -> list[SuiteResult]:
    """Evaluate suites, each on its table, in memory."""
    with LOCK:
        context = gx.get_context(mode="ephemeral")
        return [_run(context, run, []) for run in runs]


def write_data_docs(folder: Path, runs: Iterable[SuiteRun]) -> Path:
    """Evaluate suites once more and write their Data Docs, the pages of Great Expectations.

    Args:
        folder: gets the site; what was there is replaced.
        runs: what `run_checks` ran.

    Returns:
        The site's first page.
    """
    with LOCK, tempfile.TemporaryDirectory() as project:
        context = gx.get_context(mode="file", project_root_dir=project)
        for run in runs:
            _run(context, run, [UpdateDataDocsAction(name="pages", site_names=[])])
        (site,) = Path(project, "gx", "uncommitted", "data_docs").iterdir()
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(site, folder)
    return folder / "index.html"


def _run(context: Any, run: SuiteRun, actions: list[ValidationAction]) -> SuiteResult:
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    suite = context.suites.add(gx.ExpectationSuite(name=run.name, expectations=run.expectations))
    asset = context.data_sources.add_pandas(run.name).add_dataframe_asset(run.name)
    batch = asset.add_batch_definition_whole_dataframe("whole")
    validation = context.validation_definitions.add(gx.ValidationDefinition(name=run.name, data=batch, suite=suite))
    collect = CollectResults(name="collect")
    checkpoint = context.checkpoints.add(
        gx.Checkpoint(
            name=run.name,
            validation_definitions=[validation],
            actions=[collect, *actions],
            result_format=RESULT_FORMAT,
        )
    )
    checkpoint.run(batch_parameters={"dataframe": run.table}, expectation_parameters=dict(run.parameters))
    collected = collect.collected or next(
        action.collected for action in checkpoint.actions if isinstance(action, CollectResults)
    )
    (outcome,) = collected
    evaluated = int(outcome["statistics"]["evaluated_expectations"])
    places = {_key(item): place for place, item in enumerate(run.expectations)}
    results = sorted(outcome["results"], key=lambda item: places[_key(item["expectation_config"])])
    return SuiteResult(run.name, len(run.expectations), evaluated, results)


def _key(expectation: dict[str, Any]) -> tuple[str, ...]:
    """Return what tells an expectation from the others of its suite."""
    kwargs = expectation["kwargs"]
    ends = ("min_value" in kwargs, "max_value" in kwargs)
    return (
        expectation["meta"]["check"],
        expectation["severity"],
        expectation["type"],
        str(kwargs.get("column")),
        str(ends),
    )


def exception_message(info: dict[str, Any]) -> str | None:
    """Return the message of an expectation that raised, or None. Great Expectations has two shapes for it."""
    for shape in (info, *(item for item in info.values() if isinstance(item, dict))):
        if shape.get("raised_exception"):
            return str(shape.get("exception_message") or "it raised an exception without a message")
    return None


def stored(result: SuiteResult, parameters: Mapping[str, float]) -> dict[str, Any]:
    """Return what is written of a suite's result: no ids, times, paths or row values."""
    return {
        "suite": result.name,
        "statistics": {
            "declared_expectations": result.declared,
            "evaluated_expectations": result.evaluated,
            "successful_expectations": sum(bool(item["success"]) for item in result.results),
        },
        "parameters": dict(parameters),
        "results": [_stored_item(item) for item in result.results],
    }


def _stored_item(item: dict[str, Any]) -> dict[str, Any]:
    config = item["expectation_config"]
    kwargs = {key: value for key, value in config["kwargs"].items() if key != "batch_id"}
    return {
        "success": item["success"],
        "expectation": {
            "type": config["type"],
            "severity": config["severity"],
            "meta": config["meta"],
            "kwargs": kwargs,
        },
        "result": {key: value for key, value in item["result"].items() if key in STORED_RESULT_KEYS},
        "exception": exception_message(item.get("exception_info") or {}),
    }
