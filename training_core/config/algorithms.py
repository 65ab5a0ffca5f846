"""Algorithms that train a policy. One variant each, so that none can be given another's knobs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from training_core.config.base import Config
from training_core.config.optimizer import OptimizerConfig
from training_core.config.rewards import RewardConfig, check_part_names, check_rules_fit
from training_core.config.rollout import RolloutConfig


class NoKl(Config):
    """No term keeps the policy near the reference."""

    placement: Literal["none"] = "none"
    """Chooses this variant: the distance to the reference does not count."""
    measure: bool = False
    """Load the reference all the same and report the KL. Default: false, which saves a forward pass and the memory."""


class KlInReward(Config):
    """Reverse KL(policy || reference) as part of an answer's reward.

    The sum over the answer's tokens of log policy - log reference (the k1 estimator), times the coefficient, centred in
    the group, is subtracted after the scores were centred and, with `group_normalised`, divided. It is never divided
    itself: in a group of equal scores only the distance to the reference counts.
    """

    placement: Literal["reward"]
    """Chooses this variant: the distance counts in each answer's reward."""
    coefficient: float = Field(gt=0.0)
    """Advantage per nat: standard deviations of the group's scores with `group_normalised`, reward units with
    `group_centred`. No default: it depends on that scale."""


class KlInLoss(Config):
    """KL to the reference as a term of the loss at every token."""

    placement: Literal["loss"]
    """Chooses this variant: the distance counts in the loss of each token."""
    coefficient: float = Field(gt=0.0)
    """Weight of the term, reward units per nat. No default: it depends on the reward's scale."""
    objective: Literal["reverse", "forward"] = "reverse"
    """Which divergence goes down: reverse KL(policy || reference), or forward KL(reference || policy). Default:
    reverse, the one in the objective of RLHF (Ouyang et al. 2022, arXiv 2203.02155)."""
    estimator: Literal["k2", "k3", "k3_ratio"] = "k2"
    """Per-token estimate. For `reverse`: `k2` (half the squared log-ratio) or `k3_ratio` (k3 times the importance
    ratio). For `forward`: `k3`. Other pairs have another gradient than their name says and are refused. Default: k2,
    whose expected gradient is exactly that of the reverse KL of the token's distribution. This holds for k2 and k3 as
    long as answers come from the policy that is updated, that is with one update a rollout. With more, only k3_ratio
    stays exact: k2 is refused, and k3 is off by how far the policy has moved since the rollout."""

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
        if self.objective == "reverse" and self.estimator == "k3":
            raise ValueError(
                "estimator k3 in the loss has the gradient of the forward KL(reference || policy). Use k2 or k3_ratio "
                "for the reverse KL, or say `objective: forward`"
            )
        if self.objective == "forward" and self.estimator != "k3":
            raise ValueError(
                f"estimator {self.estimator} has the gradient of the reverse KL; the forward objective needs k3"
            )
        return self


KlConfig = Annotated[NoKl | KlInReward | KlInLoss, Field(discriminator="placement")]


class TokenMean(Config):
    """Every token of the optimizer step weighs the same (DAPO, arXiv 2503.14476, equation 12)."""

    kind: Literal["token_mean"] = "token_mean"
    """Chooses this variant: the mean over all tokens."""


class SequenceMeanTokenMean(Config):
    """Every answer weighs the same, and every token within it (GRPO, arXiv 2402.03300, equation 3)."""

    kind: Literal["sequence_mean_token_mean"]
    """Chooses this variant: the mean over answers of the mean over tokens."""


class SequenceMeanTokenSum(Config):
    """The mean over answers of the sum over tokens: the policy gradient of whole answers."""

    kind: Literal["sequence_mean_token_sum"]
    """Chooses this variant: the mean over answers of the sum over tokens."""


class ConstantNormaliser(Config):
    """The sum over tokens, divided by answers times a constant (Dr. GRPO, arXiv 2503.20783)."""

    kind: Literal["constant"]
    """Chooses this variant: the sum over tokens, divided by a constant."""
    num_tokens: int = Field(ge=1)
    """The constant, in tokens; Dr. GRPO uses the token limit."""


AggregationConfig = Annotated[
    TokenMean | SequenceMeanTokenMean | SequenceMeanTokenSum | ConstantNormaliser, Field(discriminator="kind")
]


class GrpoConfig(Config):
    """Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300)."""

    name: Literal["grpo"]
    """Chooses this algorithm: group relative policy optimisation."""
    num_steps: int = Field(ge=1)
    """Rollouts to do; each is followed by `num_epochs * num_minibatches` optimizer updates. No default: it is the
    budget."""
    optimizer: OptimizerConfig
    """AdamW's knobs and the learning rate, whose schedule runs over updates."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Prompts of one rollout. Default: 8."""
    group_size: int = Field(default=8, ge=2)
    """Answers sampled for each prompt; they are compared with each other. Default: 8, TRL's `num_generations`."""
    micro_batch_size: int = Field(default=8, ge=1)
    """Answers in one forward and backward pass: memory against speed; gradients do not depend on it. Default: 8."""
    share_prompt: bool = True
    """Send each prompt through the model once for all its answers in a micro-batch. Same result up to rounding, less
    work. Left off, with a warning, for a model that has other layers than full attention (a sliding window, say).
    Default: true."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over one rollout. Default: 1 (on-policy), as TRL's `num_iterations`."""
    num_minibatches: int = Field(default=1, ge=1)
    """Updates within a pass; whole groups stay together. At most `prompts_per_step`. Default: 1 (on-policy)."""
    advantage: Literal["group_normalised", "group_centred"] = "group_normalised"
    """Score minus the group's mean, divided by the group's standard deviation or not. Default: divided
    (arXiv 2402.03300); Dr. GRPO (arXiv 2503.20783) does not."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The ratio of new to old probability counts down to 1 - clip_low. Default: Schulman et al. 2017
    (arXiv 1707.06347)."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """The ratio counts up to 1 + clip_high. Default: as clip_low; DAPO (arXiv 2503.14476) takes 0.28."""
    kl: KlConfig = NoKl()
    """Whether and where the distance to the reference counts; `placement` is none, reward or loss. Default: none, as
    DAPO and TRL."""
    aggregation: AggregationConfig = TokenMean()
    """How token losses become one number. Default: token_mean, as DAPO and most trainers now."""
    mask_truncated: bool = False
    """Leave answers cut by the token limit out of the loss (they still count in group statistics). Default: false."""
    autocast: Literal["bfloat16", "none"] = "bfloat16"
    """Number format of matrix products in training; master weights, log-probabilities and losses are float32 anyway."""
    checkpoint_every_steps: int = Field(default=10, ge=1)
    """Steps between checkpoints: at most so many are done again after a crash. Default: 10."""
    keep_last_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept; each holds weights and optimizer state, 12 bytes a parameter. Default: 2."""
    samples_every_steps: int = Field(default=10, ge=1)
    """Steps between rows of sample answers in samples.jsonl. Default: 10."""
    max_sampler_trainer_kl_nats: float = Field(default=0.1, gt=0.0)
    """Training stops when sampler and trainer disagree by more than this, in nats a token: the engine would be sampling
    with other weights. Default: 0.1, a hundred times what bfloat16 costs."""

    @model_validator(mode="after")
    def _groups_fill_minibatches(self) -> GrpoConfig:
        if self.num_minibatches > self.prompts_per_step:
            raise ValueError(
                f"num_minibatches ({self.num_minibatches}) must be at most prompts_per_step ({self.prompts_per_step}): "
                "groups are not split"
            )
        return self

    @model_validator(mode="after")
    def _kl_gradient_survives_several_updates(self) -> GrpoConfig:
        if self.updates_per_step > 1 and isinstance(self.kl, KlInLoss) and self.kl.estimator == "k2":
            raise ValueError(
                f"kl.estimator k2 has the gradient of the reverse KL only with one update a rollout, and num_epochs "
                f"({self.num_epochs}) times num_minibatches ({self.num_minibatches}) makes {self.updates_per_step}. "
                "Set kl.estimator: k3_ratio, which corrects for the policy having moved"
            )
        return self

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one rollout."""
        return self.num_epochs * self.num_minibatches


AlgorithmConfig = Annotated[GrpoConfig, Field(discriminator="name")]


class GrpoStageConfig(Config):
    """The resolved config in the spec of stage `grpo`."""

    algorithm: GrpoConfig
    """The algorithm and its knobs."""
    rollout: RolloutConfig
    """Engine and sampling."""
    rewards: list[RewardConfig]
    """Parts of the reward."""

    @field_validator("rewards")
    @classmethod
    def _names(cls, rewards: list[RewardConfig]) -> list[RewardConfig]:
        return check_part_names(rewards)

    @model_validator(mode="after")
    def _rules_fit(self) -> GrpoStageConfig:
        check_rules_fit(self.rewards, self.rollout.max_new_tokens)
        return self
