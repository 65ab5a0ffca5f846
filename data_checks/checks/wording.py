"""Checks in words: what was measured, what is allowed."""

from __future__ import annotations

from typing import Any

from data_checks.checks.metrics_sql import PREFIXES
from data_checks.checks.verdicts import Check
from data_checks.result import CheckedData

ROWS = {
    "preferences": "preference rows",
    "feedback": "feedback rows",
    "rl_prompts": "rows of data.rl_prompts",
    "eval_prompts": "rows of data.eval_prompts",
    "stepwise": "stepwise rows",
}
OF_ALL = ("quarantined_fraction", "dropped_fraction", "duplicate_fraction", "conflicting_fraction", "too_long_fraction")
"""Fractions of all rows of a kind (of the others, the support is known to the metric stage only)."""


def describe_check(check: Check, data: CheckedData) -> str:
    """Return e.g. "quarantined_fraction is 11.11 % of the preference rows (1 of 9), allowed: at most 5 %"."""
    if check.verdict == "skipped":
        return f"{check.name} was skipped: {check.reason}"
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
    text = _number(check.value, check.unit)
    if check.unit != "fraction":
        return text
    table, name = kind_of(check.name)
    if name.endswith("_share"):  # Equal ones count half, so there is no number of rows to name.
        return f"{text} of the {'labelled feedback rows' if table == 'feedback' else 'kept pairs'}"
    what, rows = ROWS[table], data.ledger(table).examples
    if name not in OF_ALL or not rows:
        return f"{text} of the {what}" if name in OF_ALL else text
    return f"{text} of the {what} ({round(check.value * rows)} of {rows})"


def kind_of(name: str) -> tuple[str, str]:
    """Return the kind of input that a check looks at, and its name without the kind."""
    for table, prefix in PREFIXES.items():
        if prefix and name.startswith(prefix):
            return table, name.removeprefix(prefix)
    return "preferences", name


def _number(value: Any, unit: str) -> str:
    if unit == "fraction":
        return f"{100 * value:.4g} %"
    if unit == "points":
        return f"{100 * value:.4g} points"
    unit = unit.removesuffix("s") if value == 1 else unit
    return f"{f'{value:.4g}' if isinstance(value, float) else value} {unit}"
