"""Who is told how a run goes on, and how often."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tasks.progress
from tasks.progress import GuardedObserver, LogObserver, Pace, Progress, RunObserver, StageWatch
from training_core.protocol.atomic import write_json
from training_core.protocol.directory import StageDirectory

SOME = Progress(stage="policy", step=1, total=9, phase="sample", seconds=1.0, first_step=0, values={})


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
    assert [record.getMessage() for record in caplog.records] == ["stage policy: sample 1 of 9"]


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
    guarded.stage_finished("policy", "Completed", 1.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(KeyboardInterrupt):
        guarded.run_started("run", [])


def say(directory: StageDirectory, step: int, **changes: Any) -> None:
    content = {"step": step, "total": 9, "phase": "train", "values": {"reward/mean": 0.5}, "time": time.time()}
    write_json(directory.progress_path, content | changes)


def test_progress_of_an_earlier_attempt_is_not_shown_and_clocks_may_differ(tmp_path: Path) -> None:
    directory = StageDirectory(tmp_path)
    say(directory, 4, time=time.time() + 3600)  # An attempt on a machine whose clock is ahead,
    watch = StageWatch("policy", directory)
    assert watch.look() is None
    say(directory, 5, time=time.time() - 3600)  # and one on a machine whose clock is behind.
    progress = watch.look()
    assert progress is not None
    assert (progress.step, progress.first_step, progress.seconds_left) == (5, 5, None)
    say(directory, 7)
    later = watch.look()
    assert later is not None
    assert later.seconds_left == pytest.approx(later.seconds)


def test_damaged_files_say_nothing_and_end_nothing(tmp_path: Path) -> None:
    directory = StageDirectory(tmp_path)
    watch = StageWatch("policy", directory)
    directory.metrics_path.write_bytes(b'{"step": 1, "kl/a": 0.25}\n{"step": 2, "kl\x00\n')
    directory.timings_path.mkdir()
    for damaged in ("{", "[]", "{}", '{"step": 1, "total": 2, "phase": "x", "values": 3}', "null"):
        directory.progress_path.write_text(damaged)
        assert watch.look() is None
    say(directory, 1)
    progress = watch.look()
    assert progress is not None
    assert progress.values == {"kl/a": 0.25, "reward/mean": 0.5}
