"""From what Great Expectations said to our verdicts: one check a number, whatever the number of its expectations."""

from __future__ import annotations

import math
from typing import Any

from data_checks.checks.gx_run import SuiteResult, SuiteRun, exception_message
from data_checks.checks.measured import Measured
from data_checks.checks.suite_files import CheckInfo, checks_of
from data_checks.checks.verdicts import VERDICTS, Bounds, Check, Verdict, shown

SEVERITY_SIDES = {"warning": "warn", "critical": "fail"}
FAILED: dict[str, Verdict] = {"warning": "warn", "critical": "fail"}
MISSING = "the number is missing, and nothing says why"


def judge_suite(
    run: SuiteRun, result: SuiteResult, in_force: dict[tuple[str, str], Bounds], measured: Measured
) -> list[Check]:
    """Return one check a name, in the suite's order, and one more that is an error where not all was evaluated."""
    suite = next(name for name in ("data_set", "sources", "kept_rows") if run.name.startswith(name))
    infos = checks_of(suite)
    grouped: dict[str, list[dict[str, Any]]] = {item["meta"]["check"]: [] for item in run.expectations}
    for item in result.results:
        grouped[item["expectation_config"]["meta"]["check"]].append(item)
    checks = []
    for name, items in grouped.items():
        limits = {side: in_force[name, side] for side in SEVERITY_SIDES.values() if (name, side) in in_force}
        if suite == "data_set":
            checks.append(_judge_number(infos[name], items, limits, measured))
        elif suite == "sources":
            checks.append(_judge_sources(infos[name], items, limits, run))
        else:
            checks.append(_judge_rows(infos[name], items))
    return checks + incomplete(result)


def incomplete(result: SuiteResult) -> list[Check]:
    """Return an error when not every declared expectation was evaluated, or none was declared; else nothing."""
    if result.is_complete:
        return []
    message = (
        f"{result.evaluated} of {result.declared} expectations were evaluated and {len(result.results)} have a result"
    )
    advice = "the suite file and the installed Great Expectations do not fit"
    name = f"{result.name}_complete"
    return [Check(name, "error", result.evaluated, result.declared, "expectations", "error", advice, message)]


def skipped_check(info: CheckInfo, why: str) -> Check:
    """Return a check that could not be run."""
    return Check(
        info.name, info.severity, None, None, info.unit, "skipped", info.advice, numbers=info.numbers, reason=why
    )


def _judge_number(info: CheckInfo, items: list[dict[str, Any]], limits: dict[str, Bounds], measured: Measured) -> Check:
    value = measured.numbers.get(info.metric)
    why = measured.skipped.get(info.metric)
    error = _error(items)
    reason = None
    if error is None and isinstance(value, float) and not math.isfinite(value):
        value, error = None, "the number is not finite"
    elif error is None and value is None:
        # Great Expectations lets a missing value pass.
        reason, error = (why, None) if why else (None, MISSING)
    verdict: Verdict = "error" if error else "skipped" if reason else _worst(items)
    return _check(info, value, limits, verdict, error, reason)


def _judge_sources(info: CheckInfo, items: list[dict[str, Any]], limits: dict[str, Bounds], run: SuiteRun) -> Check:
    own = run.table[run.table["metric"] == info.metric]
    error, reason = _error(items), None
    bounds = limits["warn"]
    value = None
    if error is None and not len(own):
        reason = "no source has a row that it could be measured on"
    elif error is None:
        value = max(own["value"].tolist(), key=lambda number: _beyond(number, bounds))
        counted = sum(int(item["result"].get("element_count") or 0) for item in items)
        if counted != len(own) * len(items):
            error = f"{counted} values were looked at, of {len(own) * len(items)}"
    verdict: Verdict = "error" if error else "skipped" if reason else _worst(items)
    return _check(info, value, limits, verdict, error, reason)


def _beyond(value: float, bounds: Bounds) -> float:
    """Return how far a value is beyond its limits; inside, a negative number."""
    low, high = bounds
    distances = [low - value if low is not None else -math.inf, value - high if high is not None else -math.inf]
    return max(distances)


def _judge_rows(info: CheckInfo, items: list[dict[str, Any]]) -> Check:
    error = _error(items)
    value = None if error else sum(_violations(item) for item in items)
    return _check(info, value, {}, "error" if error else _worst(items), error, None)


def _violations(item: dict[str, Any]) -> int:
    """Return how many rows break a rule; for a rule on the whole table 1 when it is broken, else 0."""
    count = item["result"].get("unexpected_count")
    return int(not item["success"]) if count is None else int(count)


def _worst(items: list[dict[str, Any]]) -> Verdict:
    verdicts: list[Verdict] = [
        "pass" if item["success"] else FAILED[item["expectation_config"]["severity"]] for item in items
    ]
    return max(verdicts, key=VERDICTS.index, default="error")


def _error(items: list[dict[str, Any]]) -> str | None:
    if not items:
        return "no expectation was evaluated"
    messages = (exception_message(item.get("exception_info") or {}) for item in items)
    return next((message for message in messages if message is not None), None)


def _check(
    info: CheckInfo,
    value: Any,
    limits: dict[str, Bounds],
    verdict: Verdict,
    error: str | None,
    reason: str | None,
) -> Check:
    # The broken limit; a value that breaks none is nearest to the warning.
    side = "fail" if verdict == "fail" else "warn"
    bounds = limits.get(side) or next(iter(limits.values()), None)
    threshold = shown(bounds) if bounds is not None or info.kind == "rows" else None
    return Check(
        info.name, info.severity, value, threshold, info.unit, verdict, info.advice, error, bounds, info.numbers, reason
    )
