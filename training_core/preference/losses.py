"""From a config's `loss` to the registered function, or to a user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from training_core.config.preference import CustomPairLoss, PairLossConfig
from training_core.errors import EvaluationError
from training_core.imports import import_function
from training_core.ops.preference_losses import PairLogprobs
from training_core.registries import PREFERENCE_LOSSES

__all__ = ["PREFERENCE_LOSSES", "PairLoss", "build_pair_loss", "reward_knobs"]

PairLoss = Callable[[PairLogprobs], Tensor]
"""Log-probabilities -> losses [pairs]."""


def build_pair_loss(config: PairLossConfig) -> PairLoss:
    """Return the loss that the config names.

    Raises:
        ConfigurationError: a function of one's own cannot be imported.
    """
    if isinstance(config, CustomPairLoss):
        function = functools.partial(import_function(config.import_path, "preference loss"), **config.parameters)
        return functools.partial(_custom_loss, function, config.import_path)
    return functools.partial(PREFERENCE_LOSSES[config.kind], **config.model_dump(exclude={"kind"}))


def reward_knobs(config: PairLossConfig) -> dict[str, Any]:
    """Return the arguments of `implicit_rewards` that belong to the loss."""
    normalised = getattr(config, "length_normalised", False)
    return {"beta": config.beta, "length_normalised": normalised}


def _custom_loss(function: Callable[..., Any], name: str, pair: PairLogprobs) -> Tensor:
    """Call a user's loss and check the shape of what it returns."""
    losses: Any = function(pair)
    if not isinstance(losses, Tensor) or losses.shape != pair.policy_chosen.shape:
        found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise EvaluationError(
            f"preference loss {name} returned {found}; it must be a tensor with one value a pair, "
            f"{tuple(pair.policy_chosen.shape)}"
        )
    return losses
