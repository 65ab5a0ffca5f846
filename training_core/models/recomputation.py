"""Gradient checkpointing: activations inside a layer are computed twice instead of kept."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from training_core.errors import ConfigurationError


def recompute_layers(model: nn.Module) -> int:
    """Make each decoder layer of `model` keep its inputs only and run again in the backward pass; return how many.

    Values and gradients are the same to the bit: a layer runs the same operations on the same numbers, and models here
    have no dropout (evaluation mode), which is why transformers' own switch, bound to training mode, is not used.
    Without gradients nothing changes. Source: Chen et al. 2016, arXiv 1604.06174.

    Raises:
        ConfigurationError: no layer of this architecture is known to be a layer.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigurationError(
            f"{type(model).__name__} has no layers that can be computed again. Set gradient_checkpointing: false"
        )
    for layer in layers:
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )
    return len(layers)
