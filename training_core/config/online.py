"""What all algorithms that learn from the policy's own answers have in common: everything but estimator and loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from training_core.config.advantages import AdvantageConfig
from training_core.config.aggregation import AggregationConfig, TokenMean
from training_core.config.base import Config
from training_core.config.critic import CriticConfig
from training_core.config.kl import KlConfig, NoKl
from training_core.config.lora import LoraConfig
from training_core.config.moe import MoeConfig
from training_core.config.off_policy import DynamicSamplingConfig, ImportanceConfig, ReplayConfig
from training_core.config.online_conflicts import first_conflict
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
    """Checkpoints kept for their mean reward, besides the last ones: that of the step before them, whose answers are of
    the weights before its last update. Default: 0."""
    samples_every_steps: int = Field(default=10, ge=1)
    """Steps between rows of sample answers in samples.jsonl. Default: 10."""
    sentinels: SentinelsConfig = SentinelsConfig()
    """What is watched after each step, and what happens then: warn, stop, or roll back."""

    # Declared again by each algorithm with what it takes.
    name: str
    advantage: AdvantageConfig
    loss: PolicyLossConfig

    @property
    def max_answers_per_step(self) -> int:
        """The most answers that a step samples, further prompts of dynamic sampling included."""
        rounds = self.dynamic_sampling.max_rounds if self.dynamic_sampling else 1
        return self.prompts_per_step * self.group_size * rounds

    @property
    def critic_config(self) -> CriticConfig | None:
        """The critic's knobs; None for algorithms without one."""
        return getattr(self, "critic", None)

    @property
    def num_warmup_steps(self) -> int:
        """First steps in which only the critic learns."""
        return 0 if self.critic_config is None else self.critic_config.warmup_steps

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one rollout."""
        return self.num_epochs * self.num_minibatches

    @model_validator(mode="after")
    def _parts_fit_together(self) -> OnlineConfig:
        if problem := first_conflict(self):
            raise ValueError(problem)
        return self
