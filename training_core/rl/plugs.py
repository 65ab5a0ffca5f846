"""The two plugs of the loop: from a config's `advantage` and `loss` to the registered function, or to a user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from training_core.config.advantages import AdvantageConfig, CustomAdvantage
from training_core.config.policy_losses import CustomLoss, PolicyLossConfig
from training_core.errors import EvaluationError
from training_core.imports import check_parameters, import_function
from training_core.ops.advantages import Advantages, EstimatorInputs
from training_core.ops.advantages_common import scored
from training_core.ops.masking import masked_fill_zero
from training_core.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

Estimator = Callable[[EstimatorInputs], Advantages]
PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logprobs, old_logprobs, advantages, mask) -> (loss, is_clipped), all [answers, time]."""


def build_estimator(config: AdvantageConfig) -> Estimator:
    """Return the estimator that the config names.

    Raises:
        ConfigurationError: a function of one's own cannot be imported.
    """
    if isinstance(config, CustomAdvantage):
        function = _user_function(config, "algorithm.advantage")
        return functools.partial(_custom_advantages, function, config.import_path)
    return functools.partial(ADVANTAGE_ESTIMATORS[config.kind], **config.knobs())


def build_policy_loss(config: PolicyLossConfig) -> PolicyLoss:
    """Return the loss that the config names.

    Raises:
        ConfigurationError: a function of one's own cannot be imported.
    """
    if isinstance(config, CustomLoss):
        function = _user_function(config, "algorithm.loss")
        return functools.partial(_custom_loss, function, config.import_path)
    return functools.partial(POLICY_LOSSES[config.kind], **config.knobs())


def _custom_advantages(function: Callable[..., Any], name: str, inputs: EstimatorInputs) -> Advantages:
    """Call a user's estimator and check what it returns: [N] is spread over each answer's tokens."""
    answers = scored(inputs)
    found = _called("advantage", name, function, inputs)
    values = found.advantages if isinstance(found, Advantages) else _as_tensor("advantage", name, found)
    values = values.detach().double()
    if values.shape == inputs.scores.shape:
        values = values[:, None].expand(inputs.mask.shape)
    if values.shape != inputs.mask.shape:
        raise EvaluationError(
            f"advantage {name} returned shape {tuple(values.shape)}; it must be one value an answer "
            f"{tuple(inputs.scores.shape)} or one a token {tuple(inputs.mask.shape)}"
        )
    values = masked_fill_zero(values, answers.mask)
    if not bool(torch.isfinite(values).all()):
        raise EvaluationError(f"advantage {name} returned a value that is not finite for a token that counts")
    result = replace(found, advantages=values) if isinstance(found, Advantages) else answers.result(values)
    if inputs.values is not None and result.returns is None:
        raise EvaluationError(f"advantage {name} reads the critic's values: return an Advantages with `returns` for it")
    return result


def _custom_loss(
    function: Callable[..., Any], name: str, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Call a user's loss with 0 at masked positions, and check the shape of what it returns."""
    clean = [masked_fill_zero(values, mask) for values in (logprobs, old.detach(), advantages.detach())]
    found = _called("loss", name, function, *clean, mask)
    losses, is_clipped = found if isinstance(found, tuple) and len(found) == 2 else (found, torch.zeros_like(mask))
    if not isinstance(losses, Tensor) or not isinstance(is_clipped, Tensor):
        raise EvaluationError(
            f"loss {name} returned a {type(losses).__name__}; it must be a tensor {tuple(mask.shape)}, or a pair of "
            "that and a bool tensor that marks clipped tokens"
        )
    if losses.shape != mask.shape or is_clipped.shape != mask.shape:
        raise EvaluationError(
            f"loss {name} returned shape {tuple(losses.shape)}; it must be one value a token, {tuple(mask.shape)}"
        )
    losses = masked_fill_zero(losses, mask)
    if not bool(torch.isfinite(losses.detach()).all()):
        raise EvaluationError(f"loss {name} returned a value that is not finite for a token that counts")
    return losses, is_clipped & mask


def _user_function(config: CustomAdvantage | CustomLoss, what: str) -> Callable[..., Any]:
    function = import_function(config.import_path, what)
    check_parameters(function, config.parameters, what, config.import_path)
    return functools.partial(function, **config.parameters)


def _called(what: str, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user's function.

    Raises:
        EvaluationError: it raised.
    """
    try:
        return function(*arguments)
    except Exception as error:  # A user's function may fail in any way.
        raise EvaluationError(f"{what} {name} raised {error!r}. Run it by itself on such arguments") from error


def _as_tensor(what: str, name: str, found: Any) -> Tensor:
    try:
        return torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise EvaluationError(
            f"{what} {name} returned a {type(found).__name__}, which is no tensor: {error}"
        ) from error
