"""Who is told how a run goes on, and how often."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

import tasks.progress
from tasks.progress import GuardedObserver, LogObserver, Pace, Progress, RunObserver

SOME = Progress(stage="grpo", step=1, total=9, phase="sample", seconds=1.0, first_step=0, values={})


def test_a_line_needs_a_new_step_or_phase_and_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(tasks.progress.time, "monotonic", lambda: now[0])
    pace = Pace(5.0)

    def at(seconds: float, **changes: Any) -> bool:
        now[0] = seconds
        return pace.is_due(replace(SOME, **changes))

    assert at(100)
    assert not at(160)  # The same step a minute later is no news.
    assert at(160, phase="update")
    assert not at(164, phase="update", step=2)  # News, but too soon.
    assert at(165, phase="update", step=2)
    assert at(165, stage="evaluate")


def test_the_log_keeps_this_pace(caplog: pytest.LogCaptureFixture) -> None:
    told = LogObserver()
    with caplog.at_level(logging.INFO, logger="tidegate.progress"):
        for step in (1, 1, 2):
            told.stage_progress(replace(SOME, step=step))
    assert [record.getMessage() for record in caplog.records] == ["stage grpo: sample 1 of 9"]


def test_trouble_with_showing_is_noted_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(RunObserver):
        def note(self, text: str) -> None:
            raise BrokenPipeError(text)

        def stage_finished(self, stage: str, state: str, seconds: float) -> None:
            raise ValueError("I/O operation on closed file")

        def run_started(self, run_id: str, stages: list[str]) -> None:
            raise KeyboardInterrupt

    guarded = GuardedObserver(Gone())
    guarded.note("text")
    guarded.stage_finished("grpo", "Completed", 1.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(KeyboardInterrupt):
        guarded.run_started("run", [])
