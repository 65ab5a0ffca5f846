"""What all algorithms that learn from the policy's own answers have in common: everything but estimator and loss."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from training_core.config.advantages import AdvantageConfig
from training_core.config.aggregation import AggregationConfig, TokenMean
from training_core.config.base import Config
from training_core.config.critic import CriticConfig
from training_core.config.kl import KlConfig, KlInLoss, NoKl
from training_core.config.lora import LoraConfig
from training_core.config.moe import MoeConfig
from training_core.config.off_policy import DynamicSamplingConfig, ImportanceConfig, ReplayConfig
from training_core.config.optimizer import OptimizerConfig
from training_core.config.policy_losses import PolicyLossConfig
from training_core.config.sentinels import SentinelsConfig


class OnlineConfig(Config):
    """What all algorithms that learn from the policy's own answers have in common.

    Each adds `name`, `advantage` and `loss`.
    """

    num_steps: int = Field(ge=1)
    """Rollouts to do; each is followed by `num_epochs * num_minibatches` optimizer updates. No default: it is the
    budget."""
    optimizer: OptimizerConfig
    """AdamW's knobs and the learning rate, whose schedule runs over updates."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Prompts of one rollout. Default: 8."""
    group_size: int = Field(default=8, ge=1)
    """Answers sampled for each prompt. Default: 8, TRL's `num_generations`."""
    micro_batch_size: int = Field(default=8, ge=1)
    """Most answers in one forward and backward pass: memory against speed; gradients do not depend on it.
    Default: 8."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Most tokens in one pass, padding included; an answer longer than this goes alone. Gradients do not depend on it.
    Default: no bound but `micro_batch_size`."""
    layout: Literal["auto", "shared_prompt", "packed", "padded"] = "auto"
    """How answers go through the model; same result up to rounding. `shared_prompt`: each prompt once for all its
    answers in a micro-batch. `packed`: answers one after another without padding. `padded`: rows filled up to the
    longest. Default: `auto`, which is shared_prompt where the model's layers allow it, else padded."""
    gradient_checkpointing: bool = False
    """Keep only the layers' inputs and compute the rest again in the backward pass: less memory, a third more work.
    Default: false."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over one rollout. Default: 1 (on-policy), as TRL's `num_iterations`."""
    num_minibatches: int = Field(default=1, ge=1)
    """Updates within a pass; whole groups stay together. At most `prompts_per_step`. Default: 1 (on-policy)."""
    kl: KlConfig = NoKl()
    """Whether and where the distance to the reference counts; `placement` is none, reward or loss. Default: none, as
    DAPO and TRL."""
    aggregation: AggregationConfig = TokenMean()
    """How token losses become one number. Default: token_mean, as DAPO and most trainers now."""
    entropy_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the policy's entropy, which the loss rewards, reward units per nat. Default: none."""
    mask_truncated: bool = False
    """Leave answers cut by the token limit out of the loss (they still count in group statistics). Default: false."""
    importance_correction: ImportanceConfig | None = None
    """Weigh tokens by how much more probable they are to the trainer than they were to the rollout engine. Default:
    none: with the same number format the two differ by rounding, which `sentinels.sampler_mismatch` watches."""
    replay: ReplayConfig | None = None
    """Learn from kept groups of earlier steps too. Default: no."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Sample further prompts in place of groups without a difference in scores. Default: no."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights. Default: null, all weights."""
    experts: MoeConfig | None = None
    """For mixtures of experts: load-balancing loss, expert metrics, routing replay. Default: null, none of them."""
    autocast: Literal["bfloat16", "none"] = "bfloat16"
    """Number format of matrix products in training; master weights, log-probabilities and losses are float32 anyway."""
    checkpoint_every_steps: int = Field(default=10, ge=1)
    """Steps between checkpoints: at most so many are done again after a crash. Default: 10."""
    keep_last_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept; each holds weights and optimizer state, 12 bytes a parameter. Default: 2."""
    keep_best_checkpoints: int = Field(default=0, ge=0)
    """Checkpoints kept for their mean reward, besides the last ones. Default: 0."""
    samples_every_steps: int = Field(default=10, ge=1)
    """Steps between rows of sample answers in samples.jsonl. Default: 10."""
    sentinels: SentinelsConfig = SentinelsConfig()
    """What is watched after each step, and what happens then: warn, stop, or roll back."""

    # Declared again by each algorithm with what it takes.
    advantage: AdvantageConfig
    loss: PolicyLossConfig

    @property
    def max_mismatch_nats(self) -> float:
        """The most that sampler and trainer may differ before anything is learned, nats a token."""
        sentinel = self.sentinels.sampler_mismatch
        return sentinel.limit_nats if sentinel.action == "stop" else math.inf

    @property
    def critic_config(self) -> CriticConfig | None:
        """The critic's knobs; None for algorithms without one."""
        return getattr(self, "critic", None)

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one rollout."""
        return self.num_epochs * self.num_minibatches

    @model_validator(mode="after")
    def _groups_fill_minibatches(self) -> OnlineConfig:
        if self.num_minibatches > self.prompts_per_step:
            raise ValueError(
                f"num_minibatches ({self.num_minibatches}) must be at most prompts_per_step ({self.prompts_per_step}): "
                "groups are not split"
            )
        if self.advantage.needs_groups and self.group_size < 2:
            raise ValueError(
                f"group_size is {self.group_size}, but advantage.kind {self.advantage.kind} compares the answers to a "
                "prompt with each other. Write at least 2"
            )
        if self.dynamic_sampling is not None and self.group_size < 2:
            raise ValueError("dynamic_sampling looks at differences within a group: group_size must be at least 2")
        return self

    @model_validator(mode="after")
    def _gradient_survives_several_updates(self) -> OnlineConfig:
        how_many = (
            f"num_epochs ({self.num_epochs}) times num_minibatches ({self.num_minibatches}) makes "
            f"{self.updates_per_step}"
        )
        if self.updates_per_step > 1 and isinstance(self.kl, KlInLoss) and self.kl.needs_one_update:
            raise ValueError(
                f"kl.estimator {self.kl.estimator} has the gradient of the reverse KL only with one update a rollout, "
                f"and {how_many}. Set kl.estimator: k3_ratio, which corrects for the policy having moved"
            )
        if not self.loss.corrects_for_movement and (self.updates_per_step > 1 or self.replay is not None):
            why = how_many if self.updates_per_step > 1 else "replay brings answers of older weights"
            raise ValueError(
                f"loss.kind {self.loss.kind} is right only while the policy is the one that sampled, and {why}. Choose "
                "a loss with a ratio: clipped_surrogate, or importance_weighted in `name: custom`"
            )
        return self

    @model_validator(mode="after")
    def _one_ratio_needs_one_advantage(self) -> OnlineConfig:
        if self.loss.is_per_answer and self.advantage.is_per_token:
            raise ValueError(
                f"loss.kind {self.loss.kind} has one ratio for an answer, but advantage.kind {self.advantage.kind} "
                "gives each token its own. Take gspo_token or clipped_surrogate"
            )
        return self

    @model_validator(mode="after")
    def _controller_cannot_overshoot(self) -> OnlineConfig:
        controller = getattr(self.kl, "controller", None)
        horizon = getattr(controller, "horizon_answers", None)
        answers = self.prompts_per_step * self.group_size
        if horizon is not None and answers >= 5 * horizon:
            raise ValueError(
                f"kl.controller.horizon_answers is {horizon}, but a step has {answers} answers: the coefficient could "
                f"reach 0 in one step. Write at least {answers // 5 + 1}"
            )
        return self

    @model_validator(mode="after")
    def _critic_where_it_is_read(self) -> OnlineConfig:
        if self.advantage.needs_critic and self.critic_config is None:
            raise ValueError("advantage.kind gae reads a critic's values: give `critic`")
        if self.critic_config is not None and not self.advantage.needs_critic:
            raise ValueError(
                f"critic is given, but advantage.kind {self.advantage.kind} reads no values. Leave it out, or take gae"
            )
        return self
