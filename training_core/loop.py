"""The loop around a trainer: resume, steps, metrics, sentinels, checkpoints, pre-emption. All algorithms run in it.

A course of training is a function of the spec alone: stopped or killed anywhere and continued, it gives the same bits.
Roll-backs keep that. What one changes (`KnobChanges`) is part of the trainer's state in every checkpoint and nowhere
else. The state gone back to is saved again with the changes; a run that dies before does the same steps again, meets
the same alarm and rolls back the same way, so no roll-back counts twice. They go back to checkpoints of the schedule
only, since one that a pre-emption left in between would make a difference.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from training_core.checkpoint import CheckpointStore
from training_core.config.sentinels import SentinelsConfig
from training_core.errors import ArtifactError, ConfigurationError, TrainingDivergedError
from training_core.loop_files import SAMPLES_FILE, append_samples, truncate_samples, truncate_steps
from training_core.protocol.context import StageContext
from training_core.sentinels import (
    ALARMS_FILE,
    NON_FINITE,
    Alarm,
    History,
    KnobChanges,
    append_alarms,
    describe,
    next_changes,
    non_finite_metric,
    truncate_alarms,
    unreported,
    watch,
)
from training_core.trainer import AdjustableTrainer, StepAbandonedError, StepRecord, Trainer

__all__ = [
    "SAMPLES_FILE",
    "AdjustableTrainer",
    "LoopReport",
    "LoopSettings",
    "StepAbandonedError",
    "StepRecord",
    "Trainer",
    "append_samples",
    "run_loop",
    "truncate_samples",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopSettings:
    """How long to train, how often to save, and what to watch."""

    num_steps: int
    checkpoint_every_steps: int
    keep_last_checkpoints: int
    phase: str
    """Shown in progress.json."""
    keep_best_checkpoints: int = 0
    """Checkpoints kept for their `best_metric`, besides the last ones."""
    best_metric: str | None = None
    """Metric of the step after which a checkpoint is saved; higher is better."""
    sentinels: SentinelsConfig | None = None
    """None: nothing is watched, and a trainer's TrainingDivergedError ends the stage."""

    def __post_init__(self) -> None:
        if self.keep_best_checkpoints and self.best_metric is None:
            raise ConfigurationError(
                f"keep_best_checkpoints is {self.keep_best_checkpoints}, but best_metric does not say of which metric. "
                "Name one, such as reward/mean, or set keep_best_checkpoints to 0"
            )

    def is_scheduled(self, step: int) -> bool:
        """Return whether a checkpoint is saved after step `step` in any case; that of the start counts."""
        return step % self.checkpoint_every_steps == 0 or step == self.num_steps


@dataclass(frozen=True)
class LoopReport:
    """How a training went."""

    steps: int
    """Steps done, those of earlier processes included."""
    best_step: int | None
    """Step of the kept checkpoint with the best `best_metric`; None where no best one is kept."""
    num_roll_backs: int


def run_loop(context: StageContext, trainer: Trainer, settings: LoopSettings) -> LoopReport:
    """Train to `num_steps`, from the newest valid checkpoint when there is one.

    Raises:
        PreemptedError: SIGTERM arrived; everything up to the last whole step is saved.
        TrainingDivergedError: a sentinel stopped the training, or it would have been rolled back once too often.
        ArtifactError: there are checkpoints, but no valid one; or one of more steps than asked for.
        ConfigurationError: a sentinel may roll back, and this trainer cannot.
    """
    return _Loop(context, trainer, settings).run()


class _Loop:
    """`done` steps are done; the newest checkpoint has `saved` steps."""

    def __init__(self, context: StageContext, trainer: Trainer, settings: LoopSettings) -> None:
        self.context = context
        self.trainer = trainer
        self.settings = settings
        self.sentinels = settings.sentinels
        self.adjustable = trainer if isinstance(trainer, AdjustableTrainer) else None
        self.may_roll_back = self.sentinels is not None and self.sentinels.may_roll_back
        if self.may_roll_back and self.adjustable is None:
            raise ConfigurationError(
                f"a sentinel's action is roll_back, but {type(trainer).__name__} has no knobs that could be changed. "
                "Set the action to stop"
            )
        self.store: CheckpointStore = context.checkpoints(settings.keep_last_checkpoints)
        self.store.keep_best = settings.keep_best_checkpoints
        self.alarms_path = context.directory.path / ALARMS_FILE
        self.history = History(0, 1)
        self.done = self.saved = 0
        self.alarmed: set[str] = set()
        """Sentinels that raised an alarm at the last step: each is in the log once, until it has been silent."""
        self.said_unreported = False

    @property
    def knobs(self) -> KnobChanges:
        return KnobChanges() if self.adjustable is None else self.adjustable.knobs

    def run(self) -> LoopReport:
        self.resume()
        self.progress()
        with self.context.stop.deferred():
            if self.may_roll_back and self.store.is_empty():
                self.save()
            while self.done < self.settings.num_steps:
                self.advance(self.done + 1)
        best = self.store.best() if self.settings.keep_best_checkpoints else None
        return LoopReport(self.done, best.step if best else None, self.knobs.num_roll_backs)

    def resume(self) -> None:
        """Load the newest valid checkpoint and drop what was written after it.

        Raises:
            ArtifactError: there are checkpoints, but none is valid; or one of more steps than asked for.
        """
        checkpoint = self.store.latest()
        if checkpoint is not None:
            self.load(checkpoint.path, checkpoint.step)
            logger.info("continuing after step %d from %s", checkpoint.step, checkpoint.path)
        self.done = self.saved = checkpoint.step if checkpoint else 0
        if self.done > self.settings.num_steps:
            raise ArtifactError(
                f"{self.store.path} holds a checkpoint of {self.done} steps, but only {self.settings.num_steps} are "
                f"asked for. Delete {self.context.directory.path} to train from the start"
            )
        truncate_alarms(self.alarms_path, self.done, self.knobs.num_roll_backs)
        self.forget_later_steps()

    def load(self, path: Path, step: int) -> None:
        if (done := self.trainer.load(path)) != step:
            raise ArtifactError(f"{path} says that it was saved after step {done}; delete it and run again")

    def forget_later_steps(self) -> None:
        rows = truncate_steps(self.context, self.done)
        if self.sentinels is not None:
            self.history = History.for_sentinels(self.sentinels, rows)

    def advance(self, step: int) -> None:
        """Do step `step` and what follows from it: the next one's number is `done + 1`."""
        started = time.monotonic()
        try:
            if self.context.stop.requested:
                raise StepAbandonedError
            record = self.trainer.train_step(step)
        except StepAbandonedError:
            self.save_and_stop()
        except TrainingDivergedError as error:
            self.on_divergence(step, error)
            return
        seconds = time.monotonic() - started
        alarms = self.watch(step, record)
        if not any(alarm.name == NON_FINITE for alarm in alarms):
            # Lines before checkpoint: a crash in between costs a few lines, which the resumed run writes again.
            self.write_record(step, record, seconds)
        if not self.act(step, alarms):
            return
        self.done = step
        if self.settings.is_scheduled(step):
            self.save(self.score(record))
        self.progress(**record.metrics, **record.timings)

    def watch(self, step: int, record: StepRecord) -> list[Alarm]:
        if self.sentinels is None:
            return []
        broken = non_finite_metric(record.metrics, self.sentinels.non_finite.action, step)
        if broken is not None:
            return [broken]
        if not self.said_unreported:
            self.said_unreported = True
            for name, metrics in unreported(self.sentinels, record.metrics).items():
                logger.info("sentinel %s is silent until %s is reported", name, metrics)
        self.history.append({"step": step, **record.metrics})
        return watch(self.sentinels, self.history.rows(), step, since_step=self.knobs.since_step)

    def on_divergence(self, step: int, error: TrainingDivergedError) -> None:
        """Deal with what the trainer raised instead of updating."""
        if self.sentinels is None:
            raise error
        alarm = Alarm(NON_FINITE, self.sentinels.non_finite.action, step, str(error), None, None)
        self.act(step, [alarm], error)

    def act(self, step: int, alarms: Sequence[Alarm], error: TrainingDivergedError | None = None) -> bool:
        """Do what the alarms of step `step` ask for; return whether the step counts.

        Args:
            error: what the trainer raised, if that is the alarm; raised again instead of an error of the loop's own.

        Raises:
            TrainingDivergedError: to stop was asked for, or there were too many roll-backs.
        """
        self.log_new(alarms)
        actions = {alarm.action for alarm in alarms}
        if "stop" in actions:
            append_alarms(self.alarms_path, alarms, self.knobs.num_roll_backs)
            raise error or self.diverged(alarms, "stop", "Training stopped there")
        if "roll_back" in actions:
            self.roll_back(step, alarms)
            return False
        if alarms:
            append_alarms(self.alarms_path, alarms, self.knobs.num_roll_backs)
        return True

    def log_new(self, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            if alarm.name not in self.alarmed:
                logger.warning("step %d, sentinel %s (%s): %s", alarm.step, alarm.name, alarm.action, alarm.message)
        self.alarmed = {alarm.name for alarm in alarms}

    def diverged(self, alarms: Sequence[Alarm], action: str, what_happened: str) -> TrainingDivergedError:
        causes = [alarm for alarm in alarms if alarm.action == action]
        names = ", ".join(sorted({f"sentinels.{alarm.name}" for alarm in causes}))
        return TrainingDivergedError(
            f"{describe(causes)}. {what_happened}; checkpoints up to step {self.saved} are kept in {self.store.path}. "
            f"See {self.alarms_path} and metrics.jsonl beside it; {names} has the limit and the action"
        )

    def roll_back(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Go back to the newest valid checkpoint of the schedule and change the trainer's knobs.

        Raises:
            TrainingDivergedError: this would be one time too many.
            ArtifactError: there are checkpoints of the schedule, but none is valid.
        """
        assert self.sentinels is not None
        assert self.adjustable is not None
        config, before = self.sentinels.roll_back, self.knobs.num_roll_backs
        if before >= config.max_times:
            append_alarms(self.alarms_path, alarms, before)
            what = f"It was rolled back {before} time(s) already, roll_back.max_times is {config.max_times}"
            raise self.diverged(alarms, "roll_back", what)
        target = self.store.latest(lambda saved: saved < step and self.settings.is_scheduled(saved))
        if target is None:
            raise ArtifactError(
                f"{self.store.path} no longer holds a checkpoint that training could be rolled back to. Run the same "
                "command again to continue from what is there"
            )
        self.load(target.path, target.step)
        self.adjustable.change_knobs(next_changes(config, before, target.step))
        self.done = target.step
        self.store.remove_after(target.step)
        self.forget_later_steps()
        truncate_alarms(self.alarms_path, target.step, before)
        append_alarms(self.alarms_path, alarms, before, rolled_back_to=target.step)
        # Files before checkpoint: after a crash in between, all this follows again from the state without the changes.
        self.save(target.score)
        logger.warning("rolled back to step %d; from here on %s", target.step, self.knobs)
        self.progress()

    def score(self, record: StepRecord) -> float | None:
        """Return how good the checkpoint after a step is; None when none is kept for being the best."""
        name = self.settings.best_metric
        if name is None or not self.settings.keep_best_checkpoints:
            return None
        if name not in record.metrics:
            reported = ", ".join(sorted(record.metrics))
            logger.warning("step %d reports no %s, so it cannot be the best; it has %s", self.done, name, reported)
        return record.metrics.get(name)

    def save(self, score: float | None = None) -> None:
        """Save a checkpoint of `done` steps. One that is not of the schedule gets no score: it need not be there."""
        pinned = set()
        if self.may_roll_back and not self.settings.is_scheduled(self.done):
            pinned = {self.done - self.done % self.settings.checkpoint_every_steps}
        self.store.save(self.done, functools.partial(self.trainer.save, step=self.done), score, pinned)
        self.saved = self.done

    def save_and_stop(self) -> NoReturn:
        """Save a checkpoint unless the last step is saved already, and end the stage as pre-empted."""
        if self.done > self.saved:
            self.save()
        self.context.stop.raise_preempted(f"stopped by SIGTERM after step {self.done}, which is saved")
        raise AssertionError("raise_preempted returned")

    def write_record(self, step: int, record: StepRecord, seconds: float) -> None:
        if record.samples:
            append_samples(self.context.directory.path / SAMPLES_FILE, step, record.samples)
        self.context.timings.write(step, {**record.timings, "time/step_seconds": seconds})
        self.context.metrics.write(step, record.metrics)

    def progress(self, **values: float) -> None:
        self.context.progress(self.done, self.settings.num_steps, self.settings.phase, **values)
