"""A check on a terminal: what was found, worst first, one line of advice each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from data_checks.presentation.words import ORDER, account, show_number, show_threshold, what_to_say


def check_lines(report: Mapping[str, Any], *, every_check: bool = False) -> Iterator[str]:
    """Yield the lines that tell a person what a check found.

    Args:
        report: what report.json holds.
        every_check: also those that passed or were skipped.
    """
    for evidence in report["formats"]:
        yield f"{evidence['path']}: format {evidence['format']} ({'; '.join(evidence['evidence'])})"
        if evidence["unused_columns"]:
            yield f"  kept beside the text, not used: {', '.join(evidence['unused_columns'])}"
    yield ""
    examples = "" if report["examples"] == report["rows"] else f" ({report['examples']:,} examples made of them)"
    yield f"{report['rows']:,} rows{examples}"
    for fate, reason, number in account(report):
        share = number / report["examples"] if report["examples"] else 0.0
        yield f"  {number:>12,}  {share:>7.2%}  {fate}{f': {reason}' if reason else ''}"
    yield ""
    checks = sorted(report["checks"], key=lambda check: ORDER.index(check["verdict"]))
    for check in checks:
        if check["verdict"] in ("pass", "skipped") and not every_check:
            continue
        value, unit = show_number(check["value"], check["unit"]), "" if check["unit"] == "fraction" else check["unit"]
        yield (
            f"{check['verdict'].upper():5} {check['name']}: {value} {unit}".rstrip()
            + f", limit {show_threshold(check)}"
        )
        if text := what_to_say(check):
            yield f"      {text}"
    counts = {verdict: sum(check["verdict"] == verdict for check in checks) for verdict in ORDER}
    told = ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
    yield f"{len(checks)} checks: {told}"
    yield f"fingerprint {report['fingerprint']}"
    yield f"verdict: {report['verdict'].upper()}"
