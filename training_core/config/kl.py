"""The distance between policy and reference: whether it counts, where, and what is meant by it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from training_core.config.base import Config


class NoKl(Config):
    """No term keeps the policy near the reference."""

    placement: Literal["none"] = "none"
    """Chooses this variant: the distance to the reference does not count."""
    measure: bool = False
    """Load the reference all the same and report the KL. Default: false, which saves a forward pass and the memory."""


class FixedCoefficient(Config):
    """The coefficient stays what it is."""

    kind: Literal["fixed"] = "fixed"
    """Chooses this controller: a constant."""


class AdaptiveCoefficient(Config):
    """The coefficient follows the measured KL: up when it is above the target, down when below."""

    kind: Literal["adaptive"]
    """Chooses this controller: proportional, with the error bounded to 0.2 (Ziegler et al. 2019, arXiv 1909.08593,
    section 2.2)."""
    target_nats: float = Field(gt=0.0)
    """KL(policy || reference) of a whole answer to aim for, in nats. Ziegler et al. take 6."""
    horizon_answers: int = Field(default=10_000, ge=1)
    """Answers over which the coefficient follows. Default: 10,000, of the same paper's code."""


ControllerConfig = Annotated[FixedCoefficient | AdaptiveCoefficient, Field(discriminator="kind")]


class KlInReward(Config):
    """The distance as part of the reward, token by token: -coefficient * estimate(log policy - log reference).

    Token-level estimators (`gae`, `reinforce_plus_plus`, `remax`) carry it back as reward-to-go; those of whole answers
    take its sum over the answer, centred like the score and never divided by the scores' spread.
    """

    placement: Literal["reward"]
    """Chooses this variant: the distance counts in each answer's reward."""
    coefficient: float = Field(gt=0.0)
    """Reward units per nat (with `group_normalised`: standard deviations of the group's scores). No default: it depends
    on the reward's scale."""
    objective: Literal["reverse", "penalty"] = "reverse"
    """What is meant. `reverse`: the reverse KL(policy || reference), whose gradient only k1 in the reward gives. With
    `penalty` the estimate itself is a price that answers pay, and nothing is claimed about a divergence."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimate of each token. `reverse` takes k1; the others are for `penalty`."""
    controller: ControllerConfig = FixedCoefficient()
    """Whether the coefficient stays or follows the measured KL; `kind` is fixed or adaptive."""

    @model_validator(mode="after")
    def _gradient_is_the_named_one(self) -> KlInReward:
        if self.objective == "reverse" and self.estimator != "k1":
            raise ValueError(
                f"estimator {self.estimator} in the reward has another gradient than the reverse KL. Use k1, or say "
                "`objective: penalty` if the estimate itself is meant"
            )
        return self


class KlInLoss(Config):
    """KL to the reference as a term of the loss at every token."""

    placement: Literal["loss"]
    """Chooses this variant: the distance counts in the loss of each token."""
    coefficient: float = Field(gt=0.0)
    """Weight of the term, reward units per nat. No default: it depends on the reward's scale."""
    objective: Literal["reverse", "forward", "penalty"] = "reverse"
    """Which divergence goes down: reverse KL(policy || reference), or forward KL(reference || policy). Default:
    reverse, the one in the objective of RLHF (Ouyang et al. 2022, arXiv 2203.02155). `penalty`: the estimate itself is
    differentiated, and nothing is claimed about a divergence."""
    estimator: Literal["k2", "k3", "k3_ratio", "k1_ratio", "k3_straight_through", "abs"] = "k2"
    """Per-token estimate. For `reverse`: `k2` (half the squared log-ratio), `k3_straight_through` (k3 in value, k2 in
    gradient), `k3_ratio` or `k1_ratio` (times the importance ratio). For `forward`: `k3`. For `penalty`: `abs`. Other
    pairs have another gradient than their name says and are refused. Default: k2, whose expected gradient is exactly
    that of the reverse KL of the token's distribution. This holds for k2, k3 and k3_straight_through as long as answers
    come from the policy that is updated, that is with one update a rollout. With more, only the ratio forms stay
    exact: k2 and k3_straight_through are refused, and k3 is off by how far the policy has moved since the rollout."""

    @field_validator("estimator", mode="before")
    @classmethod
    def _refuse_k1(cls, estimator: object) -> object:
        if estimator == "k1":
            raise ValueError(
                "estimator k1 in the loss has an expected gradient of zero, so it would do nothing. Use k2 or "
                "k3_ratio, or `placement: reward`, which is k1"
            )
        return estimator

    @model_validator(mode="after")
    def _gradient_is_the_named_one(self) -> KlInLoss:
        allowed = {
            "reverse": ("k2", "k3_ratio", "k1_ratio", "k3_straight_through"),
            "forward": ("k3",),
            "penalty": ("abs",),
        }[self.objective]
        if self.objective == "reverse" and self.estimator == "k3":
            raise ValueError(
                "estimator k3 in the loss has the gradient of the forward KL(reference || policy). Use k2 or k3_ratio "
                "for the reverse KL, or say `objective: forward`"
            )
        if self.estimator not in allowed:
            raise ValueError(
                f"estimator {self.estimator} does not have the gradient of `objective: {self.objective}`, which takes "
                f"{' or '.join(allowed)}"
            )
        return self

    @property
    def needs_one_update(self) -> bool:
        """Whether the gradient is the named one only while the policy is the one that sampled."""
        return self.estimator in ("k2", "k3_straight_through")


KlConfig = Annotated[NoKl | KlInReward | KlInLoss, Field(discriminator="placement")]
