"""Optimizer and learning-rate schedule, the same for every stage that trains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from training_core.config.base import Config


class ConstantSchedule(Config):
    """The learning rate stays as it is after the warm-up."""

    kind: Literal["constant"] = "constant"
    """Chooses this schedule: constant after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the rate rises linearly to its full value; step `warmup_steps` has the full value."""


class LinearSchedule(Config):
    """The learning rate falls linearly from the end of the warm-up on."""

    kind: Literal["linear"] = "linear"
    """Chooses this schedule: a straight line down."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the rate rises linearly to its full value; step `warmup_steps` has the full value."""
    final_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the full rate that the line is heading for; it would be reached one step after the last."""


class CosineSchedule(Config):
    """The learning rate falls along half a cosine from the end of the warm-up on."""

    kind: Literal["cosine"] = "cosine"
    """Chooses this schedule: half a cosine down."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the rate rises linearly to its full value; step `warmup_steps` has the full value."""
    final_fraction: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of the full rate that the curve is heading for; it would be reached one step after the last. Default:
    Hoffmann et al. 2022 (arXiv 2203.15556)."""


ScheduleConfig = Annotated[ConstantSchedule | LinearSchedule | CosineSchedule, Field(discriminator="kind")]


class OptimizerConfig(Config):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) over float32 master weights."""

    learning_rate: float = Field(ge=0.0, le=1.0)
    """Full learning rate. No default: it depends on model and stage. Zero trains nothing (a check of the chain)."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the first moment. Default: Kingma and Ba 2015 (arXiv 1412.6980)."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay of the second moment. Default: Kingma and Ba 2015 (arXiv 1412.6980)."""
    epsilon: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second moment. Default: Kingma and Ba 2015 (arXiv 1412.6980)."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay of matrices; vectors (norms, biases) are not decayed. Default: none, as is usual when
    training from preferences."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients of a larger global L2 norm are scaled down to it. Default: Pascanu et al. 2013 (arXiv 1211.5063)
    propose the clipping, 1.0 is the usual bound for language models."""
    schedule: ScheduleConfig = ConstantSchedule()
    """How the rate changes over the steps; `kind` is constant, linear or cosine."""
