"""The training loop of one reward model: steps, state, and what validation says before the first step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from training_core.config.reward_model import RewardModelConfig
from training_core.data.batching import batches_by_tokens, micro_batches, pad_sequences
from training_core.engines.single import ParameterGroup, SingleProcessEngine, StepReport, group_of
from training_core.errors import ArtifactError
from training_core.loop import StepAbandonedError, StepRecord
from training_core.metrics import MetricSums
from training_core.models.heads import RewardModel
from training_core.protocol.atomic import read_json, write_json
from training_core.protocol.context import StageContext
from training_core.reward_modelling.objectives import Objective
from training_core.seeding import batch_indices, derive_seed

STATE_FILE = "stage.json"


@dataclass(frozen=True)
class MemberState:
    """What a checkpoint knows besides weights and optimizer."""

    member: int
    """Whose weights they are, from 0."""
    before: dict[str, float | None]
    """What validation said of the weights that this member's training started from."""
    finished: list[str]
    """Digests of the weights of the members before it, which are saved already."""


def member_seed(seed: int, member: int) -> int:
    """Return the seed of a member's head and order of data; the first member is the model that one alone would be."""
    return seed if member == 0 else derive_seed(seed, "reward_member", member)


class RewardTrainer:
    """One member's training; it may be stopped anywhere and go on in another process.

    Steps are numbered over all members, `num_steps` each, so that one file of metrics and one row of checkpoints hold
    them all.

    Args:
        context: the stage.
        config: its config.
        model: float32, on its device; new, or with adapters on it.
        objective: the loss over the training items.
        pad_token_id: any id.
        member: number of this member, from 0.
        finished: digests of the weights of the members before it, saved already.
    """

    before: dict[str, float | None]
    """What validation said of the float32 weights that training starts from."""

    def __init__(
        self,
        context: StageContext,
        config: RewardModelConfig,
        model: RewardModel,
        objective: Objective,
        pad_token_id: int,
        member: int = 0,
        finished: Sequence[str] = (),
    ) -> None:
        self.context = context
        self.config = config
        self.model = model
        self.objective = objective
        self.pad_token_id = pad_token_id
        self.member = member
        self.finished = list(finished)
        self.seed = member_seed(context.spec.seed, member)
        self.num_items = len(objective.lengths) * config.num_epochs
        self.num_steps = -(-self.num_items // config.batch_size)
        self.first_step = member * self.num_steps
        """Steps of the members before this one."""
        self.engine = SingleProcessEngine(
            self.parameter_groups(),
            config.optimizer,
            self.num_steps,
            config.autocast,
        )

    def parameter_groups(self) -> list[ParameterGroup]:
        rate = self.config.head_learning_rate
        groups = [
            group_of("backbone", self.model.backbone, self.config.optimizer.learning_rate),
            ParameterGroup("head", dict(self.model.head.named_parameters()), rate),
        ]
        if self.objective.parameters:
            groups.append(ParameterGroup("thresholds", self.objective.parameters, rate))
        return groups

    def load(self, directory: Path) -> int:
        """Restore a checkpoint; return the steps done. The last one of the member before leaves this one as new.

        Raises:
            ArtifactError: a part is missing, damaged or of another model.
        """
        state = read_state(directory)
        if state.member == self.member - 1:
            return self.first_step
        if state.member != self.member:
            raise ArtifactError(f"{directory} is of member {state.member}, not {self.member}: delete it and run again")
        self.before, self.finished = state.before, state.finished
        return self.engine.load(directory)

    def save(self, directory: Path, step: int) -> None:
        self.engine.save(directory, step)
        state = MemberState(self.member, self.before, self.finished)
        write_json(directory / STATE_FILE, asdict(state))

    def step_items(self, own_step: int) -> list[int]:
        """Return the items of this member's step `own_step` (from 1). The last has what is left of the last epoch."""
        size = self.config.batch_size
        items = batch_indices(own_step - 1, size, len(self.objective.lengths), self.seed, "reward_pairs")
        return items[: self.num_items - (own_step - 1) * size]

    def micro_batches(self, items: Sequence[int]) -> list[list[int]]:
        """Return the items of a step in forward passes of similar lengths: by number, or by tokens."""
        lengths, budget = self.objective.lengths, self.config.max_tokens_per_micro_batch
        if budget is None:
            return micro_batches(items, lengths, self.config.micro_batch_size)
        widths = [int(lengths[item]) * self.objective.sequences_per_item for item in items]
        return [[items[index] for index in batch] for batch in batches_by_tokens(widths, budget)]

    def train_step(self, step: int) -> StepRecord:
        """Do step `step` (from 1, over all members).

        Raises:
            StepAbandonedError: asked to stop; no weight has changed.
            TrainingDivergedError: a gradient is not finite; no weight has changed.
        """
        started = time.monotonic()
        items = self.step_items(step - self.first_step)
        sums = MetricSums()
        for batch in self.micro_batches(items):
            if self.context.stop.requested:
                raise StepAbandonedError
            self.backward(batch, len(items), sums)
        report = self.engine.step(step - self.first_step)
        record = make_record(sums, report, time.monotonic() - started)
        if self.config.num_members > 1:
            record.metrics["train/member"] = self.member
        return record

    def backward(self, items: Sequence[int], num_items_in_step: int, sums: MetricSums) -> None:
        """Add one micro-batch's share of the step's gradient, all its sequences in one forward pass."""
        sequences = self.objective.sequences(items)
        input_ids, mask = pad_sequences(sequences, self.pad_token_id)
        with self.engine.autocast():
            scores = self.model(input_ids.to(self.engine.device), mask.to(self.engine.device))
        losses = self.objective.losses(scores, items, sums)
        torch.autograd.backward([losses.sum() / num_items_in_step])
        sums.add("train/num_tokens", sum(map(len, sequences)), 1)


def read_state(directory: Path) -> MemberState:
    """Return the state beside a checkpoint's weights.

    Raises:
        ArtifactError: the file is missing or damaged.
    """
    try:
        state = read_json(directory / STATE_FILE)
        return MemberState(
            member=int(state["member"]),
            before={name: None if value is None else float(value) for name, value in state["before"].items()},
            finished=[str(digest) for digest in state["finished"]],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{directory} holds no readable {STATE_FILE}: {error!r}. Delete it to go on from the checkpoint before"
        ) from error


def make_record(sums: MetricSums, report: StepReport, seconds: float) -> StepRecord:
    """Return what metrics.jsonl and timings.jsonl hold of one step."""
    num_tokens = int(sums.sums["train/num_tokens"].total)
    values = {**sums.means(), "train/num_tokens": num_tokens}
    values.update({"train/grad_norm": report.grad_norm, "train/learning_rate": report.learning_rate})
    return StepRecord(values, {"time/tokens_per_second": num_tokens / max(seconds, 1e-9)})
