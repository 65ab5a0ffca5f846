"""The training loop's plug for learning from preferences: a step, and the state on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Literal

import torch

from training_core.config.preference import DpoConfig, KtoConfig
from training_core.data.batching import micro_batches
from training_core.engines.single import SingleProcessEngine
from training_core.errors import ArtifactError
from training_core.metrics import MetricSums
from training_core.preference.objective import (
    ACCURACY,
    LOSS,
    MARGIN,
    NUM_TOKENS,
    ItemsT,
    Objective,
    Split,
    means_with_margin,
    measure,
)
from training_core.protocol.atomic import read_json, write_json
from training_core.protocol.context import StageContext
from training_core.records import Record
from training_core.seeding import batch_indices
from training_core.sentinels import KnobChanges, check_finite_loss
from training_core.trainer import StepAbandonedError, StepRecord

STATE_FILE = "state.json"
VALIDATION_NAMES = {LOSS: "validation/loss", ACCURACY: "validation/accuracy", MARGIN: "validation/margin_mean"}


class PreferenceState(Record):
    """state.json of a checkpoint: everything that is neither weights nor optimizer state.

    The order of the data is a function of seed and step, so no generator state is needed.
    """

    version: Literal[1] = 1
    algorithm: Literal["dpo", "kto"]
    step: int
    """Optimizer steps done."""
    reference_sha256: str
    """Weights digest of the checkpoint that the policy started from, which is the reference too."""
    data_sha256: dict[str, str]
    """Of training and validation items, by split: what they were made from."""
    before: dict[str, float]
    """Validation metrics before the first step."""
    knobs: KnobChanges = KnobChanges()
    """What sentinels changed."""


def count_steps(config: DpoConfig | KtoConfig, num_items: int) -> int:
    """Return the optimizer steps of a training: all epochs, or fewer where `num_steps` says so."""
    of_epochs = -(-num_items * config.num_epochs // config.batch_size)
    return of_epochs if config.num_steps is None else min(of_epochs, config.num_steps)


def add_gradients(
    objective: Objective[ItemsT],
    split: Split[ItemsT],
    items: Sequence[int],
    size: int,
    sums: MetricSums,
    give_up: Callable[[], None],
) -> None:
    """Add the gradient of an optimizer step: the sum of its items' losses divided by their number, however it is cut.

    Args:
        objective: losses of items.
        split: training items.
        items: those of the step.
        size: most items of a forward pass.
        sums: takes the metrics.
        give_up: called before each forward pass; raises when the step is to be abandoned.
    """
    shared = objective.prepare(split, items, size, give_up)
    for indices in micro_batches(items, split.items.lengths, size):
        give_up()
        losses = objective.losses(split, indices, shared, sums)
        torch.autograd.backward([losses.sum() / len(items)])


class PreferenceTrainer(Generic[ItemsT]):
    """Trains from a checkpoint's weights to the last step; may be stopped anywhere and continued in another process.

    training_core/trainer.py has the contract with the loop.

    Args:
        context: of the stage.
        config: the algorithm.
        objective: losses of items.
        train: items to learn from, with the reference's log-probabilities.
        validation: items to measure on.
        engine: owns the policy's parameters.
        reference_sha256: weights digest of the checkpoint that the policy started from.
    """

    before: dict[str, float]
    """Validation metrics before the first step."""

    def __init__(
        self,
        context: StageContext,
        config: DpoConfig | KtoConfig,
        objective: Objective[ItemsT],
        train: Split[ItemsT],
        validation: Split[ItemsT],
        engine: SingleProcessEngine,
        reference_sha256: str,
    ) -> None:
        self.context = context
        self.config = config
        self.objective: Objective[ItemsT] = objective
        self.train: Split[ItemsT] = train
        self.validation: Split[ItemsT] = validation
        self.engine = engine
        self.reference_sha256 = reference_sha256
        self.data_sha256 = {"train": train.items.digest, "validation": validation.items.digest}
        self.knobs = KnobChanges()
        self.full_rates = [float(group["full_learning_rate"]) for group in engine.optimizer.param_groups]
        self.num_items = len(train.items) * config.num_epochs
        self.num_steps = count_steps(config, len(train.items))

    def train_step(self, step: int) -> StepRecord:
        """Do step `step` (from 1).

        Raises:
            StepAbandonedError: asked to stop; no weight has changed.
            TrainingDivergedError: a loss or gradient is not finite; no weight has changed.
        """
        started = time.monotonic()
        sums = MetricSums()
        items, size = self.step_items(step), self.config.micro_batch_size
        add_gradients(self.objective, self.train, items, size, sums, self.give_up_if_stopped)
        values = means_with_margin(sums)
        check_finite_loss(values[LOSS], step)
        report = self.engine.step(step)
        seconds = time.monotonic() - started
        values.update({"policy/grad_norm": report.grad_norm, "train/learning_rate": report.learning_rate})
        every = self.config.validate_every_steps
        if step == self.num_steps or (every and step % every == 0):
            values.update(self.validate())
        return StepRecord(values, {"time/tokens_per_second": values[NUM_TOKENS] / max(seconds, 1e-9)})

    def step_items(self, step: int) -> list[int]:
        """Return the items of step `step` (from 1). The last step of the last epoch has what is left of it."""
        size, seed = self.config.batch_size, self.context.spec.seed
        items = batch_indices(step - 1, size, len(self.train.items), seed, "preference_items")
        return items[: self.num_items - (step - 1) * size]

    def give_up_if_stopped(self) -> None:
        if self.context.stop.requested:
            raise StepAbandonedError

    def validate(self) -> dict[str, float]:
        """Return the validation metrics of the float32 weights as they are."""
        found = measure(self.objective, self.validation, self.config.micro_batch_size)
        return {name: found[key] for key, name in VALIDATION_NAMES.items() if key in found}

    def save(self, directory: Path, step: int) -> None:
        self.engine.save(directory, step)
        state = PreferenceState(
            algorithm=self.config.name,
            step=step,
            reference_sha256=self.reference_sha256,
            data_sha256=self.data_sha256,
            before=self.before,
            knobs=self.knobs,
        )
        write_json(directory / STATE_FILE, state.model_dump(mode="json"))

    def load(self, directory: Path) -> int:
        """Restore a checkpoint; return the steps done.

        Raises:
            ArtifactError: a part is missing, of another version, or of a training on other inputs.
        """
        try:
            state = PreferenceState.model_validate(read_json(directory / STATE_FILE))
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"{directory} holds no readable {STATE_FILE}: {error}. Delete it to go on from the checkpoint before"
            ) from error
        mine = (self.config.name, self.reference_sha256, self.data_sha256)
        if (state.algorithm, state.reference_sha256, state.data_sha256) != mine:
            raise ArtifactError(
                f"{directory} belongs to a training by another algorithm, from another checkpoint or on other data. "
                "Restore the inputs, or delete the stage directory to train again from the start"
            )
        # Of a step that was given up or diverged.
        self.engine.optimizer.zero_grad(set_to_none=True)
        if self.engine.load(directory) != state.step:
            raise ArtifactError(f"{directory}: weights and {STATE_FILE} were saved after different steps")
        self.before = state.before
        self.change_knobs(state.knobs)
        return state.step

    def change_knobs(self, changes: KnobChanges) -> None:
        """Put what a roll-back changes in force: the learning rate; there is no KL term with a coefficient here."""
        self.knobs = changes
        for group, rate in zip(self.engine.optimizer.param_groups, self.full_rates, strict=True):
            group["full_learning_rate"] = rate * changes.learning_rate_factor
