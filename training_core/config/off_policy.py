"""Answers that the policy as it is now did not sample: kept ones, other numerics, and groups drawn again."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from training_core.config.base import Config


class TruncatedImportance(Config):
    """Weights tokens by policy / sampler probability, bounded from above (truncated importance sampling)."""

    mode: Literal["truncate"] = "truncate"
    """Chooses this correction: the weight is cut at `high`."""
    level: Literal["token", "sequence"] = "token"
    """Whether each token has its own ratio or all tokens of an answer share the product. Default: token."""
    high: float = Field(default=2.0, gt=1.0)
    """Largest weight. Default: 2, as verl's threshold."""


class MaskedImportance(Config):
    """Leaves out tokens (or answers) whose policy / sampler ratio is outside bounds; the others keep their ratio.

    What is left out still counts in the aggregation's denominator: nothing else gains weight by it.
    """

    mode: Literal["mask"]
    """Chooses this correction: what lies outside the bounds does not count."""
    level: Literal["token", "sequence"] = "token"
    """Whether each token has its own ratio or all tokens of an answer share the product. Default: token."""
    low: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Smallest ratio that counts. Default: 0.5, as IcePop."""
    high: float = Field(default=2.0, gt=1.0)
    """Largest ratio that counts. Default: 2: a token twice as probable here as in the engine is no rounding."""


ImportanceConfig = Annotated[TruncatedImportance | MaskedImportance, Field(discriminator="mode")]


class UniformSampling(Config):
    """Every kept group is as likely as any other, and comes at most once in a step."""

    kind: Literal["uniform"] = "uniform"
    """Chooses this sampling: all alike."""


class PrioritisedSampling(Config):
    """Groups with larger advantages are more likely, and count less for it (Schaul et al. 2016, arXiv 1511.05952).

    Each of a step's draws is from all kept groups: one may come twice. A group's priority is its mean absolute
    advantage when it was last learned from. Of n groups, one drawn with probability p weighs (n p)^-correction. The
    paper's division by the largest weight is left out: replay would count less the more the priorities differ. Where no
    more groups are kept than wanted, all come once and weigh 1.
    """

    kind: Literal["prioritised"]
    """Chooses this sampling: by mean absolute advantage."""
    exponent: float = Field(default=0.6, ge=0.0, le=1.0)
    """A group's probability goes with its priority to this power; 0 makes all alike. Default: the paper's."""
    correction: float = Field(default=1.0, ge=0.0, le=1.0)
    """How much of the bias its weight takes back; 1 all of it: the weighted policy loss, summed over drawn groups, is
    expected to be that of uniform draws. Default: 1, the paper's value at the end of training."""


ReplaySampling = Annotated[UniformSampling | PrioritisedSampling, Field(discriminator="kind")]


class ReplayConfig(Config):
    """Learn from groups of earlier steps too; their ratio is to the policy that sampled them.

    Groups without any advantage (all scores equal, say) are not kept: they teach nothing.
    """

    capacity_groups: int = Field(ge=1)
    """Groups kept; the oldest leave first. No default: it is memory against variety."""
    groups_per_step: int = Field(ge=1)
    """Kept groups that join each step's fresh ones, as far as there are any."""
    max_staleness_steps: int = Field(default=4, ge=1)
    """Groups sampled with weights more steps ago than this are no longer used. Default: 4, as TRL's
    `max_staleness`."""
    sampling: ReplaySampling = UniformSampling()
    """How they are drawn; `kind` is uniform or prioritised."""

    @model_validator(mode="after")
    def _holds_a_step(self) -> ReplayConfig:
        if self.groups_per_step > self.capacity_groups:
            raise ValueError(
                f"groups_per_step ({self.groups_per_step}) must be at most capacity_groups ({self.capacity_groups})"
            )
        return self


class DynamicSamplingConfig(Config):
    """Sample further prompts in place of groups whose answers all have the same score (DAPO, arXiv 2503.14476)."""

    max_rounds: int = Field(default=3, ge=1)
    """Most rollouts a step, the first one included; then the step learns from what there is. Default: 3. (DAPO's own
    code goes on to a cap and then fails.)"""
