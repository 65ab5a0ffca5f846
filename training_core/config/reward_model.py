"""Config of the stage `reward_model`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from training_core.config.base import Config
from training_core.config.optimizer import OptimizerConfig


class RewardModelConfig(Config):
    """A Bradley-Terry reward model on the SFT checkpoint's backbone."""

    optimizer: OptimizerConfig
    """AdamW of the backbone and of the head; `learning_rate` is the backbone's."""
    head_learning_rate: float = Field(default=1e-3, ge=0.0, le=1.0)
    """Full learning rate of the scalar head, which starts from noise and needs a larger one than the backbone.
    Default: with 135 M parameters and some hundred pairs, the head learned at 1e-3 and not at the backbone's rate."""
    batch_size: int = Field(default=16, ge=1)
    """Pairs an optimizer step. Default: a size at which a few hundred pairs still make a few dozen steps."""
    micro_batch_size: int = Field(default=4, ge=1)
    """Pairs a forward pass; less needs less memory and changes nothing else but rounding. Default: with 135 M
    parameters and 90 tokens an answer, 4 needs 4 GB in all, 8 a third of a GB more, and takes as long."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over the training pairs. Default: one, since reward models overfit after it (Ouyang et al. 2022, arXiv
    2203.02155, appendix C.2)."""
    autocast: Literal["bfloat16", "none"] = "bfloat16"
    """Matrix products of the training passes in bfloat16 over float32 weights, or all in float32. Master weights are
    float32 either way; what they are saved and used in afterwards is `dtype`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Number format in which the trained backbone is saved and used; the head is float32. Accuracy, margin, mean and
    standard deviation of the scores are measured on what was saved, in this format, and so are rewards in training and
    scores in evaluation: bfloat16 drops much of what a small learning rate changed, and the accuracy shows how much.
    Default: bfloat16, half the memory."""
    max_tokens_per_batch: int = Field(default=4096, ge=1)
    """Tokens of a validation batch, padding included."""
    checkpoint_every_steps: int = Field(default=10, ge=1)
    """Optimizer steps between checkpoints: what a kill costs at most."""
    keep_last_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept; two, so that a damaged newest one leaves one to go back to."""

    @model_validator(mode="after")
    def check_batch(self) -> RewardModelConfig:
        if self.micro_batch_size > self.batch_size:
            raise ValueError(
                f"micro_batch_size ({self.micro_batch_size}) must not be larger than batch_size ({self.batch_size})"
            )
        return self
