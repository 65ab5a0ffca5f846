"""What a trainer is to the loop: one algorithm, with its steps and its state."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from training_core.sentinels.knobs import KnobChanges


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
            TrainingDivergedError: a loss or gradient is NaN or infinite, seen before the optimizer step it would have
                gone into. The state may be that of the middle of a step: the loop ends, or calls `load`.
        """
        ...

    def save(self, directory: Path, step: int) -> None:
        """Write everything that a later step depends on; before the first step too, with `step` 0."""
        ...

    def load(self, directory: Path) -> int:
        """Restore a saved state, whatever happened since, gradients of a step given up included; return its steps."""
        ...


@runtime_checkable
class AdjustableTrainer(Protocol):
    """A trainer that can go on with changed knobs; sentinels may roll it back."""

    @property
    def knobs(self) -> KnobChanges:
        """The changes in force, at first KnobChanges(). Part of the state: `save` writes and `load` restores them."""
        ...

    def change_knobs(self, changes: KnobChanges) -> None:
        """Put `changes` in force, in place of those before, from the next step on."""
        ...
