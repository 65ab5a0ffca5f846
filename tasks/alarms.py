"""What a stage's sentinels said: alarms.jsonl, read for people, for MLflow and for whoever watches.

A file that is damaged says less, and stops nobody: training is what must not be wrong about it, and it checks itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_core.sentinels.alarms import ALARMS_FILE

__all__ = ["ALARMS_FILE", "StageAlarm", "alarm_counts", "news", "read_alarms", "roll_backs", "summarise_alarms"]

MAX_FILE_BYTES = 32 << 20
"""A file beyond that is read up to there; a row has a few hundred bytes."""


@dataclass(frozen=True)
class StageAlarm:
    """One row of alarms.jsonl."""

    sentinel: str
    action: str
    """warn, stop or roll_back."""
    step: int
    message: str
    num_roll_backs: int
    """Roll-backs of the training before this alarm."""
    rolled_back_to: int | None
    """The step that training went back to because of it."""

    @property
    def identity(self) -> tuple[int, int, str]:
        """What no other alarm of the stage has; the same when steps are done again after a stop."""
        return self.num_roll_backs, self.step, self.sentinel

    @property
    def text(self) -> str:
        """What happened, in a line: `step 7, sentinel grad_norm (warn): ...`."""
        text = f"step {self.step}, sentinel {self.sentinel} ({self.action}): {self.message}"
        return text if self.rolled_back_to is None else f"{text}. Rolled back to step {self.rolled_back_to}"


def read_alarms(path: Path) -> list[StageAlarm]:
    """Return the whole rows of an alarms.jsonl in their order; none when there is no file."""
    try:
        with path.open("rb") as stream:
            lines = stream.read(MAX_FILE_BYTES).split(b"\n")[:-1]
    except OSError:
        return []
    return [alarm for line in lines if (alarm := _parsed(line)) is not None]


def _parsed(line: bytes) -> StageAlarm | None:
    try:
        row = json.loads(line)
        target = row["rolled_back_to"]
        return StageAlarm(
            sentinel=str(row["name"]),
            action=str(row["action"]),
            step=int(row["step"]),
            message=str(row["message"]),
            num_roll_backs=int(row["num_roll_backs"]),
            rolled_back_to=None if target is None else int(target),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def roll_backs(alarms: Iterable[StageAlarm]) -> list[int]:
    """Return the step that each roll-back went to, in their order."""
    targets = {alarm.num_roll_backs: alarm.rolled_back_to for alarm in alarms if alarm.rolled_back_to is not None}
    return [targets[number] for number in sorted(targets)]


def alarm_counts(alarms: Iterable[StageAlarm]) -> dict[str, int]:
    """Return how many steps each sentinel raised an alarm at."""
    return dict(sorted(Counter(alarm.sentinel for alarm in alarms).items()))


def news(alarms: Iterable[StageAlarm]) -> Iterator[StageAlarm]:
    """Yield the alarms worth a line: of a sentinel that alarms at step after step the first, and what changed training.

    >>> def alarm(step, action="warn", to=None):
    ...     return StageAlarm("kl_budget", action, step, "", 0, to)
    >>> [a.step for a in news([alarm(3), alarm(4), alarm(6), alarm(7, "roll_back", 0)])]
    [3, 6, 7]
    """
    latest: dict[tuple[int, str], int] = {}
    for alarm in alarms:
        key = (alarm.num_roll_backs, alarm.sentinel)
        if alarm.action != "warn" or latest.get(key) != alarm.step - 1:
            yield alarm
        latest[key] = alarm.step


def summarise_alarms(alarms: Iterable[StageAlarm]) -> list[dict[str, Any]]:
    """Return one entry a sentinel and action: how often, from which step to which, what it last said, what it undid."""
    groups: dict[tuple[str, str], list[StageAlarm]] = {}
    for alarm in alarms:
        groups.setdefault((alarm.sentinel, alarm.action), []).append(alarm)
    return [
        {
            "sentinel": sentinel,
            "action": action,
            "count": len(found),
            "first_step": min(alarm.step for alarm in found),
            "last_step": max(alarm.step for alarm in found),
            "message": found[-1].message,
            "rolled_back_to": [alarm.rolled_back_to for alarm in found if alarm.rolled_back_to is not None],
        }
        for (sentinel, action), found in groups.items()
    ]
