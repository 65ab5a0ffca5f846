"""Kept groups of earlier steps: bounded in number and age, drawn uniformly or by advantage, saved with checkpoints."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from training_core.config.off_policy import PrioritisedSampling, ReplayConfig
from training_core.errors import ArtifactError
from training_core.protocol.atomic import read_json, write_json
from training_core.records import Record, StopReason
from training_core.seeding import derive_seed

REPLAY_FILE = "replay.json"
MIN_PRIORITY = 1e-6
"""A group without advantages could else never be drawn, and its weight would be infinite."""


class KeptAnswer(Record):
    """One answer as it was sampled and scored."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the policy that sampled it, nats."""
    stop_reason: StopReason
    score: float | None


class KeptGroup(Record):
    """The answers to one prompt of one step."""

    step: int
    """Sampled in this step, with the weights after the one before."""
    prompt_id: str
    prompt_ids: list[int]
    answers: list[KeptAnswer]
    baseline_score: float | None = None
    priority: float
    """Mean absolute advantage when it was last learned from."""


class _Saved(Record):
    version: Literal[1] = 1
    groups: list[KeptGroup]


@dataclass(frozen=True)
class Drawn:
    """Groups for one step, and what their policy loss counts."""

    groups: list[KeptGroup]
    weights: list[float]


@dataclass
class ReplayBuffer:
    """Groups in the order in which they came; what may be drawn at a step is a function of the step."""

    config: ReplayConfig
    groups: list[KeptGroup] = field(default_factory=list)

    def add(self, groups: Sequence[KeptGroup]) -> None:
        """Keep groups; the oldest leave when there are more than the capacity."""
        self.groups = [*self.groups, *groups][-self.config.capacity_groups :]

    def drop_stale(self, step: int) -> None:
        """Forget what is too old for step `step` and every later one."""
        self.groups = [group for group in self.groups if step - group.step <= self.config.max_staleness_steps]

    def draw(self, step: int, seed: int) -> Drawn:
        """Return groups for step `step`, each at most once, with their weights; fewer when there are fewer.

        Prioritised: group i is drawn with probability p_i = priority_i^exponent / sum, one after another without
        replacement; its weight is (n * p_i)^-correction over the largest such weight (Schaul et al. 2016, section 3.4).
        """
        self.drop_stale(step)
        number = min(self.config.groups_per_step, len(self.groups))
        generator = random.Random(derive_seed(seed, "replay", step))
        sampling = self.config.sampling
        if not isinstance(sampling, PrioritisedSampling):
            chosen = generator.sample(range(len(self.groups)), number)
            return Drawn([self.groups[i] for i in chosen], [1.0] * number)
        rates = [max(group.priority, MIN_PRIORITY) ** sampling.exponent for group in self.groups]
        total, count = sum(rates), len(rates)
        chosen = _without_replacement(rates, number, generator)
        raw = [(count * rates[i] / total) ** -sampling.correction for i in chosen]
        largest = max(raw, default=1.0)
        return Drawn([self.groups[i] for i in chosen], [weight / largest for weight in raw])

    def save(self, directory: Path) -> None:
        write_json(directory / REPLAY_FILE, _Saved(groups=self.groups).model_dump(mode="json"))

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote.

        Raises:
            ArtifactError: it is missing or damaged: training would go on without what it kept.
        """
        try:
            self.groups = list(_Saved.model_validate(read_json(directory / REPLAY_FILE)).groups)
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{directory} holds no readable {REPLAY_FILE}: {error}") from error

    def metrics(self, step: int, drawn: Drawn) -> dict[str, float]:
        ages = [step - group.step for group in drawn.groups]
        values: dict[str, Any] = {"replay/num_kept_groups": len(self.groups), "replay/num_drawn_groups": len(ages)}
        if ages:
            values["replay/staleness_mean_steps"] = sum(ages) / len(ages)
        return values


def _without_replacement(rates: Sequence[float], number: int, generator: random.Random) -> list[int]:
    left = list(range(len(rates)))
    chosen = []
    for _ in range(number):
        (position,) = generator.choices(range(len(left)), weights=[rates[i] for i in left])
        chosen.append(left.pop(position))
    return chosen
