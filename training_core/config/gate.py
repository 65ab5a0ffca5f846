"""The gate's rule: which gain over the reference is required, and what must not get worse."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from training_core.config.base import Config

REWARD_MODEL_METRIC = "reward_model_score"
"""A reward model's score is defined only up to a constant: a percentage of it means nothing."""


class PrimaryConfig(Config):
    """The one metric that must improve, chosen before the evaluation."""

    metric: str
    """Name of a metric of the evaluation, e.g. a gold rule's name."""
    scale: Literal["relative", "absolute"] = "relative"
    """`relative`: the gain is (candidate - baseline) / |baseline|. `absolute`: candidate - baseline, in the metric's
    own unit; the only one for `reward_model_score`, whose unit is one standard deviation of the model's scores."""
    min_gain: float = Field(default=0.05, ge=0)
    """Required gain on the chosen scale. Default 0.05: the project's rule of 5 %."""
    higher_is_better: bool = True
    """False for a metric that should fall, such as an error rate."""
    best_value: float | None = None
    """The best value that the metric can take (1 for an accuracy), if there is one. A required gain that would lie
    beyond it is an error, not a failure of the candidate."""

    @model_validator(mode="after")
    def _no_percentage_of_a_reward(self) -> Self:
        if self.metric == REWARD_MODEL_METRIC and self.scale == "relative":
            raise ValueError(
                f"metric {REWARD_MODEL_METRIC!r} has no natural zero, so a relative gain of it means nothing. "
                "Set scale: absolute (the unit is a standard deviation of the reward model's scores), "
                "or choose a gold metric"
            )
        return self


class NonInferiorityGuard(Config):
    """The metric may not be worse than the reference's by more than a margin, with confidence 1 - alpha."""

    kind: Literal["non_inferiority"] = "non_inferiority"
    """Chooses this guard: not worse than the reference by more than a margin."""
    metric: str
    """Name of a metric of the evaluation."""
    margin: float = Field(ge=0)
    """Largest loss that is tolerated, in the metric's unit. Usual values: 0.01 for safety or knowledge rates."""
    higher_is_better: bool = True
    """False for a metric that should stay low."""


class MaximumGuard(Config):
    """The candidate's mean may not exceed a cap."""

    kind: Literal["maximum"] = "maximum"
    """Chooses this guard: a cap on the candidate's mean."""
    metric: str
    """Name of a metric of the evaluation."""
    maximum: float
    """Largest mean that is tolerated, in the metric's unit."""


class RatioRangeGuard(Config):
    """The candidate's mean divided by the reference's must lie in a range."""

    kind: Literal["ratio_range"] = "ratio_range"
    """Chooses this guard: a range for candidate divided by reference."""
    metric: str
    """Name of a metric of the evaluation whose mean is positive, such as `length_tokens`."""
    minimum: float = Field(default=0.8, ge=0)
    """Smallest ratio. Default 0.8, for answer lengths."""
    maximum: float = Field(default=1.25, gt=0)
    """Largest ratio. Default 1.25, for answer lengths."""

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.minimum > self.maximum:
            raise ValueError(f"minimum ({self.minimum}) must not exceed maximum ({self.maximum})")
        return self


class MaximumIncreaseGuard(Config):
    """The candidate's mean may exceed the reference's by at most this much."""

    kind: Literal["maximum_increase"] = "maximum_increase"
    """Chooses this guard: a cap on the increase over the reference."""
    metric: str
    """Name of a metric of the evaluation."""
    maximum_increase: float = Field(ge=0)
    """Largest increase of the mean, in the metric's unit; 0.01 for a rate is one percentage point."""


GuardConfig = Annotated[
    NonInferiorityGuard | MaximumGuard | RatioRangeGuard | MaximumIncreaseGuard, Field(discriminator="kind")
]


def guard_name(guard: GuardConfig) -> str:
    """Return the name under which a guard appears in gate.json, e.g. `length_tokens.ratio_range`."""
    return f"{guard.metric}.{guard.kind}"


def default_guards() -> list[GuardConfig]:
    """Length within 0.8 to 1.25 of the reference, truncation at most one point above it, few repeated 4-grams."""
    return [
        RatioRangeGuard(metric="length_tokens"),
        MaximumIncreaseGuard(metric="truncated", maximum_increase=0.01),
        MaximumGuard(metric="repetition", maximum=0.2),
    ]


class GateConfig(Config):
    """What a candidate must show before it may become champion."""

    primary: PrimaryConfig
    """The metric that must improve over the reference. A choice without default."""
    guards: list[GuardConfig] = Field(default_factory=default_guards)
    """What must hold besides. All of them; an empty list switches them off."""
    champion_margin: float = Field(default=0.0, ge=0)
    """Loss against the current champion that is tolerated on the primary metric, in its unit. Default 0."""
    alpha: float = Field(default=0.05, gt=0, le=0.5)
    """One-sided error level of every confidence bound. Default 0.05."""
    num_resamples: int = Field(default=10_000, ge=1000, le=1_000_000)
    """Bootstrap resamples. Default 10000."""
    min_prompts: int = Field(default=200, ge=2)
    """Fewer evaluated prompts than this are an error. Default 200: below it a chance gain of 5 % is common."""
    min_clusters: int = Field(default=30, ge=2)
    """Fewer groups of related prompts than this are an error. Default 30."""
    min_coverage: float = Field(default=0.995, gt=0, le=1)
    """Share of answers of each model that must have a score. Default 0.995; missing ones count at their worst."""
    power: float = Field(default=0.8, gt=0.5, lt=1)
    """Power for which an inconclusive verdict says how many prompts would be needed. Default 0.8."""

    @model_validator(mode="after")
    def _distinct_guards(self) -> Self:
        names = [guard_name(guard) for guard in self.guards]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"guards named twice: {', '.join(twice)}. Keep one of each metric and kind")
        return self
