"""Limits in force: those of the suites, the config's own, and what chance adds on few rows.

A check's `kind` says how the limits of its suite are taken:

- `exact`: as they stand.
- `rate` (a share of rows with a defect): the warning as it stands, so that one bad row in a small file is seen; the
  failure widened.
- `estimate` (a share or gap that says something about how the data came to be): both widened.

A limit p of a share over n rows is widened by 3.29 standard errors of a share that is truly p, which is
3.29 sqrt(p (1 - p) / n): a data set that lies on the limit breaks it by chance once in a thousand then (both tails of a
normal distribution). For a gap between two sides of n pairs it is 3.29 sqrt(max(d, |p|) / n), where d is how often one
side alone has the property: the largest variance that a paired difference with these counts can have. A limit of 0
stays 0. On a million rows this changes the third digit; on 40 rows it is what keeps a good file from failing.

A limit from the config's `thresholds` is taken as it stands.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from data_checks.checks.measured import Measured
from data_checks.checks.suite_files import CheckInfo, Limit, catalogue
from data_checks.checks.verdicts import Bounds
from data_checks.config import CheckDataConfig, Threshold
from training_core.errors import ConfigurationError

QUANTILE = 3.29
"""Standard errors: both tails of a normal distribution hold one in a thousand beyond."""
SIDES = ("warn", "fail")


def check_names(config: CheckDataConfig) -> None:
    """Refuse limits for checks that do not exist, or that have none.

    Raises:
        ConfigurationError: with the nearest names.
    """
    known = {info.name: info for info in catalogue()}
    for name, threshold in config.thresholds.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"The nearest: {', '.join(near)}. " if near else ""
            raise ConfigurationError(
                f"data.thresholds.{name}: there is no check of that name. {hint}docs/data-checks.md lists all of them"
            )
        info = known[name]
        for side in SIDES:
            if _own(threshold, side) is not None and _declared(info, side) is None:
                other = next((o for o in SIDES if _declared(info, o) is not None), None)
                allowed = f"only `{other}`" if other else "none: it is a rule on rows"
                raise ConfigurationError(f"data.thresholds.{name}.{side}: this check has no such limit ({allowed})")


def bounds(
    info: CheckInfo, side: str, measured: Measured, config: CheckDataConfig, num_rows: int | None = None
) -> Bounds | None:
    """Return the limits in force of one check.

    Args:
        info: the check.
        side: `warn` or `fail`.
        measured: gives the rows that widen a limit.
        config: with limits of its own.
        num_rows: to widen by, instead of those that `measured` knows.
    """
    declared = _declared(info, side)
    if declared is None:
        return None
    low, high = (_number(limit, config) for limit in declared)
    own: Threshold | None = config.thresholds.get(info.name)
    value = None if own is None else _own(own, side)
    if value is not None:
        return _override(low, high, value)
    if info.kind == "exact" or info.kind == "rows" or (info.kind == "rate" and side == "warn"):
        return low, high
    rows = _support(info, measured) if num_rows is None else num_rows
    spread = measured.numbers.get(info.spread) if info.spread else None
    margins = [0.0 if limit is None else allowance(limit, rows, spread) for limit in (low, high)]
    return (None if low is None else low - margins[0]), (None if high is None else high + margins[1])


def allowance(limit: float, num_rows: int, spread: float | None = None) -> float:
    """Return by how much a limit is widened on `num_rows` rows.

    >>> round(allowance(0.6, 40), 3), round(allowance(0.6, 1_000_000), 4), allowance(0, 40)
    (0.255, 0.0016, 0.0)
    """
    if num_rows <= 0 or limit == 0:
        return 0.0
    share = abs(limit)
    variance = share * (1 - share) if spread is None else max(spread, share)
    return QUANTILE * math.sqrt(max(variance, 0.0) / num_rows)


def parameters(
    infos: Iterable[CheckInfo], measured: Measured, config: CheckDataConfig
) -> tuple[dict[str, float], dict[tuple[str, str], Bounds]]:
    """Return the suite parameters by name, and the limits in force by (check, side)."""
    named: dict[str, float] = {}
    in_force: dict[tuple[str, str], Bounds] = {}
    for info in infos:
        for side in SIDES:
            limits = bounds(info, side, measured, config)
            if limits is None:
                continue
            in_force[info.name, side] = limits
            for word, limit in zip(("min", "max"), limits, strict=True):
                if limit is not None:
                    named[f"{info.name}_{side}_{word}"] = limit
    return named, in_force


def _own(threshold: Threshold, side: str) -> float | None:
    return threshold.warn if side == "warn" else threshold.fail


def _declared(info: CheckInfo, side: str) -> tuple[Limit, Limit] | None:
    return info.warn if side == "warn" else info.fail


def _number(limit: Limit, config: CheckDataConfig) -> float | None:
    """Return a limit of the suite, which may be named by a field of the config."""
    if not isinstance(limit, dict):
        return limit
    fields = {
        "min_pairs": config.min_pairs,
        "min_feedback": config.min_feedback,
        "max_quarantined_fraction": config.max_quarantined_fraction,
    }
    return fields[limit["config"]]


def _override(low: float | None, high: float | None, value: float) -> Bounds:
    """Return the config's limit; where there are two, it is mirrored at the middle of the suite's."""
    if low is None:
        return None, value
    if high is None:
        return value, None
    middle = (low + high) / 2
    return middle - abs(value - middle), middle + abs(value - middle)


def _support(info: CheckInfo, measured: Measured) -> int:
    if info.support is not None:
        return int(measured.numbers.get(info.support) or 0)
    return measured.support.get(info.metric, 0)
