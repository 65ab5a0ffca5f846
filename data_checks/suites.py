"""Expectation suites: files under version control, run by Great Expectations, judged by us.

Great Expectations counts a failed warning as failure of the suite, and an expectation that could not be evaluated as a
plain failure. Here the verdict comes from severities, an exception is an ERROR, and a suite that did not evaluate
everything it declares is one too. Stored results hold no row text: tables hold lengths and keys only, and
unexpected values are left out.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import great_expectations as gx
import pandas as pd
from great_expectations.data_context.types.base import ProgressBarsConfig

SUITE_FOLDER = Path(__file__).with_name("suites")
RESULT_FORMAT = {"result_format": "SUMMARY", "exclude_unexpected_values": True, "partial_unexpected_count": 0}
STORED_RESULT_KEYS = ("observed_value", "element_count", "unexpected_count", "unexpected_percent", "missing_count")

CheckVerdict = Literal["pass", "warn", "fail", "error"]
VERDICTS: tuple[CheckVerdict, ...] = ("pass", "warn", "fail", "error")
"""From best to worst."""


@dataclass(frozen=True)
class Check:
    """One expectation and what came of it."""

    name: str
    severity: str
    value: Any
    """What was measured; for a rule on rows, how many break it."""
    threshold: Any
    """What is allowed: a number, or [smallest, largest] with null for an open end."""
    unit: str
    verdict: CheckVerdict
    advice: str = ""
    error: str | None = None
    limits: tuple[Any, Any] | None = None
    """Smallest and largest allowed value, None for an open end; None for a rule on rows."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def brief(self) -> dict[str, Any]:
        """Return the check without its texts and what they are made of."""
        return {key: value for key, value in self.as_json().items() if key not in ("advice", "error", "limits")}


def load_suite(name: str) -> dict[str, Any]:
    """Return the definition of a suite: the content of `suites/<name>.json`."""
    definition: dict[str, Any] = json.loads((SUITE_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return definition


def run_suite(
    definition: dict[str, Any], table: pd.DataFrame, parameters: dict[str, float | int]
) -> tuple[list[Check], dict[str, Any]]:
    """Evaluate a suite on a table.

    Args:
        definition: as `load_suite` returns it; each expectation has `meta` with name, unit and advice.
        table: scalar columns only.
        parameters: a value for each `$PARAMETER` of the suite.

    Returns:
        One check an expectation, in the suite's order, with one more that is an error when not every expectation
        was evaluated; and Great Expectations' result without ids, times, paths and row values.
    """
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    suite = context.suites.add(gx.ExpectationSuite(**definition))
    asset = context.data_sources.add_pandas("tables").add_dataframe_asset(definition["name"])
    batch = asset.add_batch_definition_whole_dataframe("whole")
    validation = context.validation_definitions.add(gx.ValidationDefinition(name="check", data=batch, suite=suite))
    result: Any = validation.run(
        batch_parameters={"dataframe": table}, expectation_parameters=dict(parameters), result_format=RESULT_FORMAT
    )
    outcome = result.to_json_dict()
    order = {item["meta"]["name"]: position for position, item in enumerate(definition["expectations"])}
    results = sorted(outcome["results"], key=lambda result: order[result["expectation_config"]["meta"]["name"]])
    checks = [to_check(result, table) for result in results]
    evaluated, declared = outcome["statistics"]["evaluated_expectations"], len(definition["expectations"])
    if (incomplete := completeness_check(definition["name"], declared, evaluated, len(checks))) is not None:
        checks.append(incomplete)
    stored = {
        "suite": definition["name"],
        "statistics": {"declared_expectations": declared, **outcome["statistics"]},
        "parameters": dict(parameters),
        "results": [_stored(result) for result in results],
    }
    return checks, stored


def completeness_check(name: str, declared: int, evaluated: int, num_results: int) -> Check | None:
    """Return an error when not every declared expectation was evaluated, or none was declared; else None.

    Great Expectations calls a suite that evaluated nothing a success.
    """
    if declared and evaluated == declared == num_results:
        return None
    message = f"{evaluated} of {declared} expectations were evaluated and {num_results} have a result"
    advice = "the suite file and the installed Great Expectations do not fit"
    return Check(f"{name}_complete", "critical", evaluated, declared, "expectations", "error", advice, message)


def to_check(result: dict[str, Any], table: pd.DataFrame) -> Check:
    """Return our reading of one expectation's result."""
    config = result["expectation_config"]
    meta, kwargs, severity = config["meta"], config["kwargs"], config["severity"]
    error = exception_message(result.get("exception_info") or {})
    value = _value(result, kwargs, meta, table)
    # Great Expectations lets a missing value pass.
    missing = meta["measures"] == "value" and value is None
    verdict: CheckVerdict = "pass"
    if error is not None:
        verdict = "error"
    elif not result["success"] or missing:
        verdict = "fail" if severity == "critical" else "warn"
    threshold, limits = _threshold(kwargs, meta), _limits(kwargs, meta)
    return Check(meta["name"], severity, value, threshold, meta["unit"], verdict, meta["advice"], error, limits)


def exception_message(info: dict[str, Any]) -> str | None:
    """Return the message of an expectation that raised, or None. Great Expectations has two shapes for it."""
    for shape in (info, *(item for item in info.values() if isinstance(item, dict))):
        if shape.get("raised_exception"):
            return str(shape.get("exception_message") or "it raised an exception without a message")
    return None


def overall_verdict(checks: list[Check]) -> CheckVerdict:
    """Return the worst verdict; no checks at all is an error."""
    return max((check.verdict for check in checks), key=VERDICTS.index, default="error")


def _value(result: dict[str, Any], kwargs: dict[str, Any], meta: dict[str, Any], table: pd.DataFrame) -> Any:
    if meta["measures"] == "value":
        column = kwargs["column"]
        value = table[column].iloc[0] if column in table and len(table) else None
        number = None if value is None or pd.isna(value) else value.item() if hasattr(value, "item") else value
        return None if isinstance(number, float) and not math.isfinite(number) else number
    found = result["result"]
    observed = found.get("unexpected_count", found.get("observed_value"))
    return len(observed) if isinstance(observed, list) else observed


def _threshold(kwargs: dict[str, Any], meta: dict[str, Any]) -> Any:
    if "column_set" in kwargs:
        return len(kwargs["column_set"])
    if meta["measures"] == "violations":
        return 0
    low, high = kwargs.get("min_value"), kwargs.get("max_value")
    if low is not None and high is not None and low != high:
        return [low, high]
    return low if low is not None else high


def _limits(kwargs: dict[str, Any], meta: dict[str, Any]) -> tuple[Any, Any] | None:
    if meta["measures"] == "violations" or not {"min_value", "max_value"} & set(kwargs):
        return None
    return kwargs.get("min_value"), kwargs.get("max_value")


def _stored(result: dict[str, Any]) -> dict[str, Any]:
    config = result["expectation_config"]
    kwargs = {key: value for key, value in config["kwargs"].items() if key != "batch_id"}
    return {
        "success": result["success"],
        "expectation": {key: config[key] for key in ("type", "meta", "severity")} | {"kwargs": kwargs},
        "result": {key: value for key, value in result["result"].items() if key in STORED_RESULT_KEYS},
        "exception": exception_message(result.get("exception_info") or {}),
    }
