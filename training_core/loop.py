"""The loop around a trainer: resume, steps, metrics, checkpoints, pre-emption. Every algorithm runs in this one."""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from training_core.checkpoint import CheckpointStore
from training_core.errors import ArtifactError
from training_core.metrics import read_metrics
from training_core.protocol.atomic import write_text
from training_core.protocol.context import StageContext

logger = logging.getLogger(__name__)

SAMPLES_FILE = "samples.jsonl"


class StepAbandonedError(Exception):
    """A step was given up before it changed anything, because the process was asked to stop."""


@dataclass(frozen=True)
class StepRecord:
    """What one step leaves behind."""

    metrics: dict[str, float]
    """Deterministic values, to metrics.jsonl."""
    timings: dict[str, float]
    """Values measured by a clock, to timings.jsonl."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Rows for samples.jsonl, deterministic too; often none."""


class Trainer(Protocol):
    """One algorithm: it knows how to do a step and how to save and load its state."""

    def train_step(self, step: int) -> StepRecord:
        """Do step `step` (from 1).

        Raises:
            StepAbandonedError: the process was asked to stop and the weights are still those of the step before.
        """
        ...

    def save(self, directory: Path, step: int) -> None: ...

    def load(self, directory: Path) -> int:
        """Restore a saved state; return the steps it has done."""
        ...


@dataclass(frozen=True)
class LoopSettings:
    """How long to train and how often to save."""

    num_steps: int
    checkpoint_every_steps: int
    keep_last_checkpoints: int
    phase: str
    """Shown in progress.json."""


def run_loop(context: StageContext, trainer: Trainer, settings: LoopSettings) -> None:
    """Train to `num_steps`, from the newest valid checkpoint when there is one.

    Raises:
        PreemptedError: SIGTERM arrived; everything up to the last whole step is saved.
        ArtifactError: there are checkpoints, but no valid one.
    """
    store = context.checkpoints(settings.keep_last_checkpoints)
    saved = resume(context, trainer, store)
    context.progress(saved, settings.num_steps, settings.phase)
    with context.stop.deferred():
        for step in range(saved + 1, settings.num_steps + 1):
            try:
                if context.stop.requested:
                    raise StepAbandonedError
                started = time.monotonic()
                record = trainer.train_step(step)
            except StepAbandonedError:
                save_and_stop(context, trainer, store, step - 1, saved)
            seconds = time.monotonic() - started
            # Lines before checkpoint: a crash in between costs a few lines, which the resumed run writes again.
            write_record(context, step, record, seconds)
            if step % settings.checkpoint_every_steps == 0 or step == settings.num_steps:
                store.save(step, functools.partial(trainer.save, step=step))
                saved = step
            context.progress(step, settings.num_steps, settings.phase, **record.metrics, **record.timings)


def resume(context: StageContext, trainer: Trainer, store: CheckpointStore) -> int:
    """Load the newest valid checkpoint and drop what was written after it; return the steps done.

    Raises:
        ArtifactError: there are checkpoints, but none is valid.
    """
    checkpoint = store.latest()
    done = 0
    if checkpoint is not None:
        done = trainer.load(checkpoint.path)
        if done != checkpoint.step:
            raise ArtifactError(f"{checkpoint.path} says that it was saved after step {done}; delete it and run again")
        logger.info("continuing after step %d from %s", done, checkpoint.path)
    context.metrics.truncate_after(done)
    context.timings.truncate_after(done)
    truncate_samples(context.directory.path / SAMPLES_FILE, done)
    return done


def save_and_stop(context: StageContext, trainer: Trainer, store: CheckpointStore, done: int, saved: int) -> NoReturn:
    """Save a checkpoint unless step `done` is saved already, and end the stage as pre-empted."""
    if done > saved:
        store.save(done, functools.partial(trainer.save, step=done))
    context.stop.raise_preempted(f"stopped by SIGTERM after step {done}, which is saved")
    raise AssertionError("raise_preempted returned")


def write_record(context: StageContext, step: int, record: StepRecord, seconds: float) -> None:
    if record.samples:
        append_samples(context.directory.path / SAMPLES_FILE, step, record.samples)
    context.timings.write(step, {**record.timings, "time/step_seconds": seconds})
    context.metrics.write(step, record.metrics)


def append_samples(path: Path, step: int, samples: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps({"step": step, **row}) + "\n" for row in samples)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(lines)
        stream.flush()
        os.fsync(stream.fileno())


def truncate_samples(path: Path, step: int) -> None:
    """Keep only whole rows of steps up to `step`."""
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if row["step"] <= step]
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
