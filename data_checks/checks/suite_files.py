"""The suites as they stand under version control, and which parts of them a data set is held to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from data_checks.config import CheckDataConfig

SUITE_FOLDER = Path(__file__).resolve().parents[1] / "suites"
SUITES = ("data_set", "sources", "kept_rows")
Limit = float | dict[str, str] | None
"""A number, or {"config": name of a field of the config}."""


@dataclass(frozen=True)
class CheckInfo:
    """One check as its suite declares it."""

    name: str
    suite: str
    numbers: tuple[int, ...]
    """Rows of the defect catalogue that it looks for; empty: it guards the account of rows."""
    tables: tuple[str, ...]
    """Kinds of input; it is run where one of them was read."""
    unit: str
    kind: str
    """How its limits are taken: `exact`, `rate`, `estimate` (`thresholds` explains them) or `rows`."""
    warn: tuple[Limit, Limit] | None
    """Smallest and largest value without a warning; None: it never warns."""
    fail: tuple[Limit, Limit] | None
    source: str
    """Where the limits come from."""
    advice: str
    severity: str
    """`error`: it can fail; `warning`: it warns at most."""
    metric: str
    """The number that it looks at."""
    spread: str | None = None
    """For a gap between two sides: the number that says how often one side alone has it."""
    support: str | None = None
    """The number that says how many rows it rests on, where that is a number of its own."""
    needs: str | None = None
    """`tokenizer`: without one, the check is skipped."""
    sample: bool = False
    """Its number comes from the costly checks on a sample."""
    unless: tuple[tuple[str, str], ...] = ()
    """Where one of these fields of the config has this value, the check cannot fail."""

    def applies(self, tables: set[str]) -> bool:
        return bool(tables & set(self.tables))

    def can_fail(self, config: CheckDataConfig) -> bool:
        return all(getattr(config, field) != value for field, value in self.unless)


@cache
def load_suite(name: str) -> dict[str, Any]:
    """Return the content of `suites/NAME.json`; it must not be changed."""
    definition: dict[str, Any] = json.loads((SUITE_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return definition


@cache
def checks_of(suite: str) -> dict[str, CheckInfo]:
    """Return the checks of a suite by name, in its order."""
    definition = load_suite(suite)
    severities: dict[str, set[str]] = {}
    for item in definition["expectations"]:
        severities.setdefault(item["meta"]["check"], set()).add(item["severity"])
    return {
        name: _info(name, suite, entry, "critical" in severities[name])
        for name, entry in definition["meta"]["checks"].items()
    }


def _info(name: str, suite: str, entry: dict[str, Any], is_critical: bool) -> CheckInfo:
    plain = {key: entry[key] for key in ("unit", "kind", "source", "advice")}
    optional = {key: entry[key] for key in ("spread", "support", "needs", "sample") if key in entry}
    warn, fail = (None if entry[key] is None else tuple(entry[key]) for key in ("warn", "fail"))
    return CheckInfo(
        name=name,
        suite=suite,
        numbers=tuple(entry["numbers"]),
        tables=tuple(entry["tables"]),
        warn=warn,
        fail=fail,
        severity="error" if is_critical else "warning",
        metric=entry.get("metric", name),
        unless=tuple(entry.get("unless", {}).items()),
        **plain,
        **optional,
    )


def catalogue() -> list[CheckInfo]:
    """Return every check of every suite, in the order of the suites."""
    return [info for suite in SUITES for info in checks_of(suite).values()]


def expectations_of(suite: str, tables: set[str], config: CheckDataConfig, has_tokenizer: bool) -> list[dict[str, Any]]:
    """Return the expectations that a data set is held to.

    Args:
        suite: its name.
        tables: kinds of input that were read.
        config: whose policies may take expectations out.
        has_tokenizer: whether tokens were counted.
    """
    infos = checks_of(suite)
    chosen = []
    for item in load_suite(suite)["expectations"]:
        info = infos[item["meta"]["check"]]
        if not info.applies(tables) or (info.needs == "tokenizer" and not has_tokenizer):
            continue
        if item["severity"] == "critical" and not info.can_fail(config):
            continue
        chosen.append(item)
    return chosen
