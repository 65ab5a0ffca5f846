"""Checks in words: what was measured, what is allowed."""

from __future__ import annotations

from typing import Any

from data_checks.runner import CheckedData
from data_checks.suites import Check

TABLES = {
    "feedback": "feedback rows",
    "rl_prompts": "rows of data.rl_prompts",
    "eval_prompts": "rows of data.eval_prompts",
}


def describe_check(check: Check, data: CheckedData) -> str:
    """Return e.g. "quarantined_fraction is 11.11 % of the preference rows (1 of 9), allowed: at most 5 %"."""
    return f"{check.name} is {_measured(check, data)}, allowed: {allowed(check)}"


def allowed(check: Check) -> str:
    """Return what a check allows: "at least 100 pairs", "at most 5 %", "40 % to 60 %", "none"."""
    if check.limits is None:
        return "none" if check.threshold == 0 else _number(check.threshold, check.unit)
    low, high = check.limits
    if low is None:
        return f"at most {_number(high, check.unit)}"
    if high is None:
        return f"at least {_number(low, check.unit)}"
    return _number(low, check.unit) if low == high else f"{_number(low, check.unit)} to {_number(high, check.unit)}"


def _measured(check: Check, data: CheckedData) -> str:
    if check.value is None:
        return "not known"
    if check.unit != "fraction":
        return _number(check.value, check.unit)
    if check.name.endswith("_share"):  # Ties count half, so there is no number of rows to name.
        what = "labelled feedback rows" if check.name.startswith("feedback") else "kept pairs"
        return f"{_number(check.value, check.unit)} of the {what}"
    table = next((name for name in TABLES if check.name.startswith(name)), "preferences")
    what = TABLES.get(table, "preference rows")
    if table not in data.counts:
        return f"{_number(check.value, check.unit)} of the {what}"
    rows = data.counts[table].rows
    return f"{_number(check.value, check.unit)} of the {what} ({round(check.value * rows)} of {rows})"


def _number(value: Any, unit: str) -> str:
    if unit == "fraction":
        return f"{100 * value:.4g} %"
    unit = unit.removesuffix("s") if value == 1 else unit
    return f"{f'{value:.4g}' if isinstance(value, float) else value} {unit}"
