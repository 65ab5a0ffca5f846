"""What someone watching a run sees: a stage's progress.json, its newest metrics and alarms, and who is told of them."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tasks.alarms import ALARMS_FILE, StageAlarm, news, read_alarms
from tasks.row_tail import RowTail
from training_core.protocol.directory import StageDirectory

logger = logging.getLogger("tidegate.progress")

LOG_EVERY_SECONDS = 15.0


@dataclass(frozen=True)
class Progress:
    """How far a stage is."""

    stage: str
    step: int
    total: int
    phase: str
    seconds: float
    """Since this attempt of the stage started."""
    first_step: int
    """The step at which this attempt started; more than 0 when it continues from a checkpoint."""
    values: dict[str, Any]
    """Newest metrics and timings, and the values of progress.json."""

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the steps of this attempt, or None before the first one is done."""
        done = self.step - self.first_step
        if done <= 0 or self.total <= 0:
            return None
        return self.seconds / done * (self.total - self.step)


class StageWatch:
    """Follows one stage directory while its process runs."""

    def __init__(self, stage: str, directory: StageDirectory) -> None:
        self.stage = stage
        self.directory = directory
        self.values: dict[str, Any] = {}
        self._started = time.monotonic()
        self._first_step: int | None = None
        self._tails = [RowTail(directory.metrics_path), RowTail(directory.timings_path)]
        self._earlier = self._read()
        """progress.json of an earlier attempt, known by its content: the stage's machine may have another clock."""
        self._alarms_path = directory.path / ALARMS_FILE
        self._alarms_state: tuple[int, ...] | None = None
        """Of the file at the last look: the same, the same content."""
        self._said = {alarm.identity for alarm in self._changed_alarms()}
        """Alarms that someone was told of, in this attempt or in one before."""

    def look(self) -> Progress | None:
        """Return the newest progress of this attempt, or None before the stage said anything.

        Files that cannot be read at this moment, or that are damaged, say nothing: a look must not end a stage.
        """
        for tail in self._tails:
            with contextlib.suppress(OSError):
                for row in tail.take():
                    self.values.update(row.values)
        found = self._read()
        if found is None or found == self._earlier:
            return None
        try:
            content = json.loads(found)
            return self._progress(content["step"], content["total"], content["phase"], content["values"])
        except (ValueError, KeyError, TypeError):
            return None

    def new_alarms(self) -> list[StageAlarm]:
        """Return the alarms worth a line that nobody was told of yet. Roll-backs cut the file; none comes twice."""
        found = [alarm for alarm in news(self._changed_alarms()) if alarm.identity not in self._said]
        self._said.update(alarm.identity for alarm in found)
        return found

    def tell_alarms(self, told: RunObserver) -> None:
        for alarm in self.new_alarms():
            told.stage_alarm(self.stage, alarm)

    def _changed_alarms(self) -> list[StageAlarm]:
        try:
            found = self._alarms_path.stat()
        except OSError:
            return []
        state = (found.st_ino, found.st_size, found.st_mtime_ns)
        if state == self._alarms_state:
            return []
        self._alarms_state = state
        return read_alarms(self._alarms_path)

    def _progress(self, step: int, total: int, phase: str, values: dict[str, Any]) -> Progress:
        if self._first_step is None:
            self._first_step = step
        return Progress(
            stage=self.stage,
            step=step,
            total=total,
            phase=phase,
            seconds=time.monotonic() - self._started,
            first_step=min(self._first_step, step),
            values={**self.values, **values},
        )

    def _read(self) -> bytes | None:
        try:
            return self.directory.progress_path.read_bytes()
        except OSError:
            return None


class RunObserver:
    """Told what happens in a run. The base class tells nobody; subclasses override what they show."""

    def run_started(self, run_id: str, stages: list[str]) -> None:
        """A run starts or continues."""

    def stage_started(self, stage: str, state: str, why: str) -> None:
        """A stage's process is about to start."""

    def stage_progress(self, progress: Progress) -> None:
        """Called several times a second while a stage runs."""

    def stage_alarm(self, stage: str, alarm: StageAlarm) -> None:
        """A sentinel of a stage's training saw something."""

    def stage_finished(self, stage: str, state: str, seconds: float) -> None:
        """A stage is complete; `state` is Completed or Cached."""

    def stage_stopping(self, stage: str, grace_seconds: float) -> None:
        """The stage was asked to save and stop."""

    def note(self, text: str) -> None:
        """Something a person should read."""


class GuardedObserver(RunObserver):
    """Passes everything on. A reader who went away (`tidegate run | head`) must not stop a run: that is noted once."""

    def __init__(self, told: RunObserver) -> None:
        self.told = told
        self._silent = False

    def run_started(self, run_id: str, stages: list[str]) -> None:
        self._pass_on(self.told.run_started, run_id, stages)

    def stage_started(self, stage: str, state: str, why: str) -> None:
        self._pass_on(self.told.stage_started, stage, state, why)

    def stage_progress(self, progress: Progress) -> None:
        self._pass_on(self.told.stage_progress, progress)

    def stage_alarm(self, stage: str, alarm: StageAlarm) -> None:
        self._pass_on(self.told.stage_alarm, stage, alarm)

    def stage_finished(self, stage: str, state: str, seconds: float) -> None:
        self._pass_on(self.told.stage_finished, stage, state, seconds)

    def stage_stopping(self, stage: str, grace_seconds: float) -> None:
        self._pass_on(self.told.stage_stopping, stage, grace_seconds)

    def note(self, text: str) -> None:
        self._pass_on(self.told.note, text)

    def _pass_on(self, tell: Callable[..., None], *what: Any) -> None:
        try:
            tell(*what)
        except (OSError, ValueError) as error:  # ValueError: printing to a closed file.
            if not self._silent:
                logger.warning("progress can no longer be shown (%s); the run goes on", error)
            self._silent = True


class Pace:
    """Picks the progress worth a line: another step or phase than the last one, and not before some time has passed."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._last: dict[str, tuple[float, int, str]] = {}
        """Stage -> when its last line was, at which step and phase."""

    def is_due(self, progress: Progress) -> bool:
        """Return whether to say this; if so, it counts as said."""
        now = time.monotonic()
        then, step, phase = self._last.get(progress.stage, (float("-inf"), -1, ""))
        if (progress.step, progress.phase) == (step, phase) or now - then < self.seconds:
            return False
        self._last[progress.stage] = (now, progress.step, progress.phase)
        return True


@dataclass
class LogObserver(RunObserver):
    """One log line an event, and one now and then for progress: for workers, where nobody has a terminal."""

    _pace: Pace = field(default_factory=lambda: Pace(LOG_EVERY_SECONDS))

    def run_started(self, run_id: str, stages: list[str]) -> None:
        logger.info("run %s: %s", run_id, " -> ".join(stages))

    def stage_started(self, stage: str, state: str, why: str) -> None:
        logger.info("stage %s %s: %s", stage, state, why)

    def stage_progress(self, progress: Progress) -> None:
        if self._pace.is_due(progress):
            phase = progress.phase or "step"
            logger.info("stage %s: %s %d of %d", progress.stage, phase, progress.step, progress.total)

    def stage_alarm(self, stage: str, alarm: StageAlarm) -> None:
        logger.warning("stage %s: %s", stage, alarm.text)

    def stage_finished(self, stage: str, state: str, seconds: float) -> None:
        logger.info("stage %s %s after %.1f s", stage, state, seconds)

    def stage_stopping(self, stage: str, grace_seconds: float) -> None:
        logger.warning("stage %s is asked to save and stop; it has %.0f s", stage, grace_seconds)

    def note(self, text: str) -> None:
        logger.warning("%s", text)


_current: RunObserver = LogObserver()


def observer() -> RunObserver:
    """Return who is watching in this process."""
    return _current


@contextlib.contextmanager
def observed_by(watcher: RunObserver) -> Iterator[None]:
    """Send everything to `watcher` for a while. One run a process: not for threads."""
    global _current
    before, _current = _current, GuardedObserver(watcher)
    try:
        yield
    finally:
        _current = before
