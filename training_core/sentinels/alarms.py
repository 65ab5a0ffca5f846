"""Alarms: what a sentinel says, and the file they are kept in."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training_core.metrics import read_metrics
from training_core.protocol.atomic import write_text

ALARMS_FILE = "alarms.jsonl"
NON_FINITE = "non_finite"


@dataclass(frozen=True)
class Alarm:
    """One sentinel's alarm at one step."""

    name: str
    """The sentinel: a field of SentinelsConfig."""
    action: str
    """warn, stop or roll_back."""
    step: int
    message: str
    """What was seen, and what can be done about it."""
    value: float | None
    """What was measured; None when it is no number."""
    limit: float | None
    """What it may be at most (or at least); None when there is no such number."""


def non_finite_metric(metrics: Mapping[str, float], action: str, step: int) -> Alarm | None:
    """Return the alarm for the first metric that is NaN or infinite, or None."""
    for name, value in sorted(metrics.items()):
        if not math.isfinite(value):
            message = f"metric {name} is {value}: what this step learned from it cannot be trusted"
            return Alarm(NON_FINITE, action, step, message, None, None)
    return None


def describe(alarms: Sequence[Alarm]) -> str:
    return "; ".join(f"step {alarm.step}, sentinel {alarm.name}: {alarm.message}" for alarm in alarms)


def append_alarms(path: Path, alarms: Sequence[Alarm], num_roll_backs: int, rolled_back_to: int | None = None) -> None:
    """Append one row an alarm and flush.

    Args:
        path: of alarms.jsonl.
        alarms: of one step.
        num_roll_backs: roll-backs before these alarms.
        rolled_back_to: the step that training went back to because of them.
    """
    with path.open("a", encoding="utf-8") as stream:
        stream.write("".join(_line(alarm, num_roll_backs, rolled_back_to) for alarm in alarms))
        stream.flush()
        os.fsync(stream.fileno())


def truncate_alarms(path: Path, step: int, num_roll_backs: int) -> None:
    """Keep the rows that came before a state: after `step` steps and `num_roll_backs` roll-backs.

    Steps alone do not order the rows: the alarm that caused a roll-back has a later step than what follows it.
    """
    if not path.exists():
        return
    write_text(
        path, "".join(json.dumps(row) + "\n" for row in read_metrics(path) if _is_before(row, step, num_roll_backs))
    )


def _is_before(row: Mapping[str, Any], step: int, num_roll_backs: int) -> bool:
    if row["num_roll_backs"] != num_roll_backs:
        return bool(row["num_roll_backs"] < num_roll_backs)
    return bool(row["step"] <= step)


def _line(alarm: Alarm, num_roll_backs: int, rolled_back_to: int | None) -> str:
    row = {**asdict(alarm), "num_roll_backs": num_roll_backs, "rolled_back_to": rolled_back_to}
    return json.dumps(row, allow_nan=False) + "\n"
