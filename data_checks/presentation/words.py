"""Numbers and verdicts in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ORDER = ("error", "fail", "warn", "pass", "skipped")
"""Worst first."""


def show_number(value: Any, unit: str = "") -> str:
    """Return a number as people read it: a fraction as per cent, others with four digits, `-` where there is none.

    >>> show_number(0.0123, "fraction"), show_number(12.0, "pairs"), show_number(None)
    ('1.23 %', '12', '-')
    """
    if value is None:
        return "-"
    if unit == "fraction":
        return f"{100 * value:.4g} %"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def show_threshold(check: Mapping[str, Any]) -> str:
    """Return what a check allows: a number, or both ends of a range."""
    threshold = check["threshold"]
    if isinstance(threshold, list | tuple):
        low, high = (show_number(end, check["unit"]) for end in threshold)
        return f"{low} to {high}"
    return show_number(threshold, check["unit"])


def what_to_say(check: Mapping[str, Any]) -> str:
    """Return what went wrong with a check or what to do about it, why it was skipped, nothing where it passed."""
    if check["verdict"] == "pass":
        return ""
    return str(check["reason"] if check["verdict"] == "skipped" else check["error"] or check["advice"])


def account(report: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yield (fate, reason, examples) of all kinds of input together: kept first, then the most frequent reasons."""
    yield "kept", "", report["kept"]
    for fate in ("quarantined", "dropped"):
        for reason, number in sorted(report[fate].items(), key=lambda item: (-item[1], item[0])):
            yield fate, reason, number
