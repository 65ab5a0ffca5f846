"""Kept groups of earlier steps: bounded in number and age, drawn uniformly or by advantage, saved with checkpoints."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from training_core.config.off_policy import PrioritisedSampling, ReplayConfig
from training_core.errors import ArtifactError
from training_core.protocol.atomic import read_json, write_json
from training_core.records import Record, StopReason
from training_core.seeding import derive_seed

REPLAY_FILE = "replay.json"


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
    priority: float = Field(gt=0.0, allow_inf_nan=False)
    """Mean absolute advantage, over all tokens of its answers, when it was last learned from."""


class _Saved(Record):
    version: Literal[1] = 1
    groups: list[KeptGroup]


@dataclass(frozen=True)
class Drawn:
    """Groups for one step, and what their policy loss counts."""

    groups: Sequence[KeptGroup] = ()
    weights: Sequence[float] = ()
    places: Sequence[int] = ()
    """Of the groups in the buffer, as it is until the next groups are added."""


@dataclass
class ReplayBuffer:
    """Groups in the order in which they came; what may be drawn at a step is a function of the step.

    Groups without an advantage are not kept: they teach nothing, and no probability fits them.
    """

    config: ReplayConfig
    groups: list[KeptGroup] = field(default_factory=list)

    def add(self, groups: Sequence[KeptGroup]) -> None:
        """Keep groups; the oldest leave when there are more than the capacity."""
        self.groups = [*self.groups, *groups][-self.config.capacity_groups :]

    def drop_stale(self, step: int) -> None:
        """Forget what is too old for step `step` and every later one."""
        self.groups = [group for group in self.groups if step - group.step <= self.config.max_staleness_steps]

    def draw(self, step: int, seed: int) -> Drawn:
        """Return groups for step `step` with their weights.

        Uniform: each at most once, weight 1. Prioritised: drawn as `preferences` says, each draw from all of the n kept
        ones, so that one may come twice. Where no more are kept than wanted there is no choice: all, once, weight 1.
        """
        self.drop_stale(step)
        number = min(self.config.groups_per_step, len(self.groups))
        generator = random.Random(derive_seed(seed, "replay", step))
        sampling, everywhere = self.config.sampling, range(len(self.groups))
        if isinstance(sampling, PrioritisedSampling) and number < len(self.groups):
            probabilities, weights = preferences([group.priority for group in self.groups], sampling)
            places = generator.choices(everywhere, weights=probabilities, k=number)
        else:
            weights = [1.0] * len(self.groups)
            places = generator.sample(everywhere, number)
        return Drawn([self.groups[i] for i in places], [weights[i] for i in places], places)

    def learned(self, drawn: Drawn, priorities: Sequence[float]) -> None:
        """Take over what drawn groups' advantages were in the step that learned from them; before `add`.

        Those whose advantages have all become 0 leave.

        Args:
            drawn: of the latest `draw`.
            priorities: the mean absolute advantage of each, 0 or more.
        """
        latest = dict(zip(drawn.places, priorities, strict=True))
        updated = [
            group.model_copy(update={"priority": latest.get(place, group.priority)})
            for place, group in enumerate(self.groups)
        ]
        self.groups = [group for group in updated if group.priority > 0.0]

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


def preferences(priorities: Sequence[float], sampling: PrioritisedSampling) -> tuple[list[float], list[float]]:
    """Return how likely each of n groups is in a draw with replacement, and what weighs its policy loss.

    p_i = priority_i^exponent / sum_j priority_j^exponent;  w_i = (n * p_i)^-correction.

    The weights are not divided by the largest one (Schaul et al. do): with correction 1 the expected weighted mean over
    draws is then the plain mean over the n groups, whatever the priorities; a divisor would make replay count less the
    more the priorities differ. They need no bound: a seldom drawn group has a large weight on small advantages, and
    w_i * priority_i = priority_i^(1 - exponent * correction) * (mean_j priority_j^exponent)^correction is at most the
    largest priority. (Advantages that depend on more than the group's own scores may have moved since.)

    Source:
        Schaul et al. 2016, arXiv 1511.05952, equation 1 and section 3.4.

    >>> preferences([1.0, 3.0], PrioritisedSampling(kind="prioritised", exponent=1.0, correction=1.0))
    ([0.25, 0.75], [2.0, 0.6666666666666666])
    """
    rates = [priority**sampling.exponent for priority in priorities]
    total = sum(rates)
    probabilities = [rate / total for rate in rates]
    return probabilities, [(len(rates) * p) ** -sampling.correction for p in probabilities]
