"""How many prompts for RL teach nothing, by pass rates that the data itself holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from data_checks.ground_truths import loads_or
from data_checks.rows import PromptItem

COLUMNS = ("pass_rate", "pass_rates", "num_correct", "num_samples")
NO_PASS_RATES = (
    "no pass rates in the data: add a column pass_rate (0 to 1), pass_rates (a list of them), or num_correct and "
    "num_samples, measured on several answers a prompt of the model that RL starts from"
)


@dataclass
class PassRates:
    """Counts of prompts by the pass rate in their row; those of parts of a file are added up."""

    num_prompts: int = 0
    num_known: int = 0
    """Prompts with a pass rate."""
    num_unusable: int = 0
    """Prompts that are always or never solved: all answers get one reward, so a policy gradient relative to the others
    of its group is 0."""
    num_unreadable: int = 0
    """Prompts with such a column that holds no share from 0 to 1."""

    def add(self, items: Iterable[PromptItem]) -> None:
        for item in items:
            self.num_prompts += 1
            # Looked for as text first: most rows have none, and reading JSON costs more.
            if '"pass_rate' not in item.extra and '"num_correct"' not in item.extra:
                continue
            present, rate = pass_rate(loads_or(item.extra, {}))
            self.num_known += rate is not None
            self.num_unusable += rate in (0.0, 1.0)
            self.num_unreadable += present and rate is None

    def merge(self, other: PassRates) -> None:
        self.num_prompts += other.num_prompts
        self.num_known += other.num_known
        self.num_unusable += other.num_unusable
        self.num_unreadable += other.num_unreadable

    def unusable_fraction(self) -> tuple[float | None, str | None]:
        """Return the share (0 to 1) of prompts with a pass rate of 0 or 1 among those with any, or why there is none.

        Source of the limit that a suite should set (warn above 0.5): defect 25 of the catalogue, zero-variance groups.
        """
        if self.num_known:
            return self.num_unusable / self.num_known, None
        if self.num_unreadable:
            return None, f"no pass rate from 0 to 1 in the data: {self.num_unreadable} rows have a column of that name"
        return None, NO_PASS_RATES


def pass_rate(extra: dict[str, Any]) -> tuple[bool, float | None]:
    """Return whether a row has columns of pass rates, at the top or in verl's `extra_info`, and the rate they hold.

    A list of rates (of several models or rounds) counts as its mean: 0 or 1 only when all of them are.

    >>> pass_rate({"pass_rate": 0.25}), pass_rate({"extra_info": {"num_correct": 8, "num_samples": 8}})
    ((True, 0.25), (True, 1.0))
    >>> pass_rate({"pass_rates": [0, 0.5]}), pass_rate({"pass_rate": 37}), pass_rate({"answer": 1})
    ((True, 0.25), (True, None), (False, None))
    """
    info = extra.get("extra_info")
    present = False
    for place in (extra, info if isinstance(info, dict) else {}):
        if not any(place.get(column) is not None for column in COLUMNS):
            continue
        present = True
        rates = [_share(place.get("pass_rate"), 1), _mean_of(place.get("pass_rates"))]
        rates.append(_share(place.get("num_correct"), place.get("num_samples")))
        for rate in rates:
            if rate is not None:
                return True, rate
    return present, None


def _mean_of(values: Any) -> float | None:
    if isinstance(values, dict):
        values = list(values.values())
    if not isinstance(values, list) or not values:
        return _share(values, 1)
    shares = [_share(value, 1) for value in values]
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if len(known) == len(shares) else None


def _share(part: Any, whole: Any) -> float | None:
    numbers = [part, whole]
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers) or whole <= 0:
        return None
    return float(part / whole) if 0 <= part <= whole else None
