"""The loss of each token: policy loss, KL and entropy terms, importance weights. No model, no aggregation.

Shapes: B rows of a micro-batch, t its longest answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training_core.config.kl import KlInLoss
from training_core.config.online import OnlineConfig
from training_core.ops.importance import importance_weights
from training_core.ops.masking import masked_fill_zero
from training_core.registries import KL_LOSSES
from training_core.rl.plugs import PolicyLoss


@dataclass(frozen=True)
class TokenInputs:
    """What the loss of a micro-batch is made of, all [B, t] unless said otherwise."""

    logprobs: Tensor
    """Of the policy that is trained, with gradient, nats."""
    entropy: Tensor
    """Of the policy's distributions, nats; with gradient when it counts in the loss."""
    old_logprobs: Tensor
    """Of the policy that ratios are relative to, nats."""
    sampler_logprobs: Tensor
    """What the rollout engine said, nats."""
    reference_logprobs: Tensor | None
    advantages: Tensor
    mask: Tensor
    """bool: tokens that count."""
    row_weights: Tensor | None = None
    """[B]: factor of the policy loss; None for 1."""
    is_fresh: Tensor | None = None
    """[B] bool; None when all are."""


@dataclass(frozen=True)
class TokenLosses:
    """Losses by token, 0 where masked."""

    losses: Tensor
    """[B, t], with gradient."""
    is_clipped: Tensor
    """[B, t] bool."""
    importance: Tensor | None
    """[B, t] weights of the importance correction; None without one."""


def token_losses(
    config: OnlineConfig, policy_loss: PolicyLoss, kl_coefficient: float, inputs: TokenInputs
) -> TokenLosses:
    """Return the loss of every token.

    loss = weight * policy_loss + kl_coefficient * kl - entropy_coefficient * entropy, the weight from importance
    correction and replay.
    """
    mask = inputs.mask
    losses, is_clipped = policy_loss(inputs.logprobs, inputs.old_logprobs, inputs.advantages, mask)
    importance = engine_correction(config, inputs)
    if importance is not None:
        losses = losses * importance
    if inputs.row_weights is not None:
        losses = losses * inputs.row_weights[:, None]
    if isinstance(config.kl, KlInLoss):
        assert inputs.reference_logprobs is not None
        log_ratio = masked_fill_zero(inputs.logprobs - inputs.reference_logprobs, mask)
        moved = masked_fill_zero(inputs.logprobs - inputs.old_logprobs, mask)
        losses = losses + kl_coefficient * KL_LOSSES[config.kl.estimator](log_ratio, moved)
    if config.entropy_coefficient > 0.0:
        losses = losses - config.entropy_coefficient * masked_fill_zero(inputs.entropy, mask)
    return TokenLosses(losses, is_clipped, importance)


def engine_correction(config: OnlineConfig, inputs: TokenInputs) -> Tensor | None:
    """Return [B, t] weights for the engine's numerics, or None.

    Replayed answers have weight 1: their ratio is to the sampler already.
    """
    correction = config.importance_correction
    if correction is None:
        return None
    weights = importance_weights(
        inputs.old_logprobs,
        inputs.sampler_logprobs,
        inputs.mask,
        level=correction.level,
        mode=correction.mode,
        low=getattr(correction, "low", None),
        high=correction.high,
    )
    if inputs.is_fresh is None:
        return weights
    return torch.where(inputs.is_fresh[:, None], weights, masked_fill_zero(torch.ones_like(weights), inputs.mask))
