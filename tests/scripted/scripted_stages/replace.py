"""Put scripted stages and a silent registry in the place of the real ones, in this process."""

from __future__ import annotations

import dataclasses
from typing import Any

from scripted_stages.table import STAGES

import tasks.champion
import tasks.pipeline
import tasks.planning
import tasks.tracking


class SilentTracker:
    """Takes everything, sends nothing."""

    calls: list[tuple[Any, ...]] = []  # noqa: RUF012 -- shared on purpose: tests read it.

    def __init__(self, run_id: str, config: Any, root: Any, **limits: Any) -> None:
        self.calls.append(("open", run_id))

    def stage_started(self, name: str, directory: Any, *, cached: bool = False) -> None:
        self.calls.append(("started", name, cached))

    def poll(self) -> None:
        """Nothing to send."""

    def stage_finished(self, name: str, outcome: Any) -> None:
        self.calls.append(("finished", name, type(outcome).__name__))

    def close(self, state: str) -> None:
        self.calls.append(("close", state))

    def mlflow_ids(self) -> dict[str, Any]:
        return {}


def replacements() -> list[tuple[Any, str, Any]]:
    """Return (object, attribute, value) for all that is replaced."""
    tasks.planning.PACKAGES["scripted_stages"] = STAGES
    chain = tuple(dataclasses.replace(stage, package="scripted_stages") for stage in tasks.planning.CHAIN)
    by_name = {stage.name: stage for stage in chain}

    return [
        (tasks.planning, "CHAIN", chain),
        (tasks.planning, "BY_NAME", by_name),
        (tasks.pipeline, "BY_NAME", by_name),
        (tasks.tracking, "PipelineTracker", SilentTracker),
        (tasks.champion, "current_champion", lambda *_args, **_named: None),
        (tasks.champion, "verify_registration", lambda *_args, **_named: True),
    ]
