"""What a check says, and how verdicts add up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["skipped", "pass", "warn", "fail", "error"]
VERDICTS: tuple[Verdict, ...] = ("skipped", "pass", "warn", "fail", "error")
"""From best to worst."""
Bounds = tuple[float | None, float | None]
"""Smallest and largest allowed value, None for an open end."""
LEFT_OUT = ("advice", "error", "limits", "numbers", "reason")


@dataclass(frozen=True)
class Check:
    """One number or rule, and what came of it."""

    name: str
    severity: str
    """`error`: may fail the data set; `warning`: warns at most."""
    value: Any
    """What was measured; for a rule on rows, how many break it."""
    threshold: Any
    """The limit that is broken, or else the nearest: a number, or [smallest, largest]."""
    unit: str
    verdict: Verdict
    advice: str = ""
    error: str | None = None
    limits: Bounds | None = None
    """Smallest and largest allowed value of that limit; None for a rule on rows."""
    numbers: tuple[int, ...] = ()
    """Rows of the defect catalogue."""
    reason: str | None = None
    """Why the check was skipped."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def brief(self) -> dict[str, Any]:
        """Return the check without its texts and what they are made of."""
        return {key: value for key, value in self.as_json().items() if key not in LEFT_OUT}


def overall_verdict(checks: Iterable[Check]) -> Verdict:
    """Return the worst verdict. Skipped checks do not count; where there are no others, that is an error."""
    verdicts = [check.verdict for check in checks if check.verdict != "skipped"]
    return max(verdicts, key=VERDICTS.index, default="error")


def worst_first(checks: Iterable[Check]) -> list[Check]:
    """Return checks by verdict: errors, failures, warnings, passes, skipped; otherwise in the order that they had."""
    return sorted(checks, key=lambda check: -VERDICTS.index(check.verdict))


def shown(bounds: Bounds | None) -> Any:
    """Return limits as one number where one will do, or as a pair."""
    if bounds is None:
        return 0
    low, high = bounds
    if low is not None and high is not None and low != high:
        return [low, high]
    return low if low is not None else high
