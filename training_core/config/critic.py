"""The critic of PPO: a model of its own that says what an answer will be worth from each token on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from training_core.config.base import Config
from training_core.config.lora import LoraConfig
from training_core.config.optimizer import OptimizerConfig


class CriticConfig(Config):
    """A value model with its own weights and optimizer."""

    initialise_from: Literal["reward_model", "policy"] = "reward_model"
    """`reward_model`: backbone and head of the pipeline's reward model, as Ouyang et al. 2022 (arXiv 2203.02155). Or
    `policy`: the SFT checkpoint's backbone with a head of zeros, for rewards without a model."""
    optimizer: OptimizerConfig
    """AdamW of the critic; its schedule runs over the same updates as the policy's."""
    value_clip: float | None = Field(default=0.2, gt=0.0)
    """A value counts at most this far from what it was before the step, reward units. Null: no bound. Default: 0.2, as
    the PPO of Stiennon et al. 2020 (arXiv 2009.01325)."""
    lora: LoraConfig | None = None
    """Train low-rank adapters (and the head) instead of all the critic's weights. Default: null, all weights."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which only the critic learns. Default: none."""
