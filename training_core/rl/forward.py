"""Log-probabilities of answer tokens under a causal model, with the output head applied to those tokens only."""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training_core.engines.single import autocast_context
from training_core.errors import ArtifactError, ConfigurationError
from training_core.ops.logprobs import token_logprobs
from training_core.rl.layouts import PackedBatch, packed_hidden
from training_core.rl.shared_prompt import SharedPromptBatch, shared_prompt_hidden
from training_core.rollout.batch import MicroBatch

MAX_HEAD_DIFFERENCE_NATS = 1e-2
"""Log-probs of the model's own logits may differ by this much in float32: sums in another order."""


@dataclass(frozen=True)
class Precision:
    """How forward passes run: master weights in float32, matrix products in float32 or bfloat16."""

    autocast: str
    """"bfloat16" or "none"."""
    device: torch.device

    def context(self) -> AbstractContextManager[None]:
        return autocast_context(self.autocast, self.device)

    @property
    def matmul_dtype(self) -> torch.dtype | None:
        """Of the output head's product; None for that of the hidden states."""
        return None if self.autocast == "none" else torch.bfloat16


def predicting_hidden(model: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """Return [tokens, width]: the last hidden states that predict the answer tokens, in row-major order of the mask."""
    if isinstance(micro, SharedPromptBatch):
        return shared_prompt_hidden(model, micro)
    if isinstance(micro, PackedBatch):
        return packed_hidden(model, micro)
    hidden: Tensor = model.base_model(input_ids=micro.input_ids, use_cache=False).last_hidden_state
    return hidden[micro.predict_rows, micro.predict_positions]


def answer_logprobs(
    model: PreTrainedModel,
    micro: MicroBatch,
    temperature: float,
    precision: Precision,
    *,
    with_entropy: bool = True,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (logprobs, entropy) of the answer tokens, each [B, t] float32 in nats, 0 at masked positions.

    Both are of the distribution at `temperature`. The gradient flows through logprobs, and through entropy with
    `entropy_gradient`. Entropy is NaN at answer tokens when it is not asked for.
    """
    with precision.context():
        chosen = predicting_hidden(model, micro)
    logprobs, entropy = token_logprobs(
        chosen,
        head_weight(model),
        micro.targets,
        temperature=temperature,
        matmul_dtype=precision.matmul_dtype,
        with_entropy=with_entropy,
        entropy_gradient=entropy_gradient,
    )
    return micro.scatter(logprobs), micro.scatter(entropy)


def head_weight(model: PreTrainedModel) -> Tensor:
    weight: Tensor = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    return weight


@torch.no_grad()
def check_forward_pass(model: PreTrainedModel, micro: MicroBatch) -> None:
    """Check on one micro-batch, in float32, that training's log-probs are those of the model's own logits.

    Raises:
        ArtifactError: they are not finite.
        ConfigurationError: they are not: this trainer would optimise other probabilities than the model has.
    """
    if difference := difference_from_logits(model, micro.plain()):
        raise ConfigurationError(
            f"{difference}, so it cannot be trained. Use a model without soft cap, scale or bias there"
        )
    if isinstance(micro, PackedBatch) and difference_from_logits(model, micro):
        raise ConfigurationError(
            f"{type(model).__name__} does not keep answers apart when they lie in one row. Set algorithm.layout: padded"
        )
    if isinstance(micro, SharedPromptBatch) and difference_from_logits(model, micro):
        raise ConfigurationError(
            f"{type(model).__name__} gives answers other probabilities when they share their prompt's forward pass. "
            "Set algorithm.layout: padded"
        )


@torch.no_grad()
def difference_from_logits(model: PreTrainedModel, micro: MicroBatch) -> str | None:
    """Return in what a model's logits are not its last hidden states times its head, in float32; None if they are.

    Raises:
        ArtifactError: they are not finite.
    """
    name = type(model).__name__
    if model.base_model is model or model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        return f"{name} has no decoder and output head apart from each other"
    ours, _ = answer_logprobs(model, micro, 1.0, Precision("none", micro.input_ids.device), with_entropy=False)
    logits = model(input_ids=micro.input_ids, use_cache=False).logits[micro.predict_rows, micro.predict_positions]
    plain = torch.log_softmax(logits.float(), dim=-1).gather(1, micro.targets[:, None])[:, 0]
    difference = float((ours - micro.scatter(plain)).abs().max())
    if not math.isfinite(difference):
        raise ArtifactError(
            f"{name} gives answer tokens log-probs that are not finite, so there is nothing to train from: its weights "
            "are damaged, or come from a training that diverged"
        )
    if difference <= MAX_HEAD_DIFFERENCE_NATS:
        return None
    return f"{name} computes its logits otherwise than hidden states times head (off by {difference:.3f} nats)"


def frozen_copy(model: PreTrainedModel, precision: Precision) -> PreTrainedModel:
    """Return a copy without gradients, its linear weights in the dtype in which autocast multiplies them.

    The results are the same to the last bit as with float32 weights under the same autocast, in half the memory, and
    the other half is not asked for on the way either. Embeddings (and a head tied to them) and norms stay float32:
    autocast does not touch those.
    """
    kept = {id(model.get_input_embeddings().weight), id(head_weight(model))}
    # What deepcopy finds here it takes as the copy that it would make.
    copies: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            for parameter in module.parameters(recurse=False):
                if id(module.weight) not in kept:
                    narrowed = parameter.detach().to(precision.matmul_dtype or parameter.dtype, copy=True)
                    copies[id(parameter)] = torch.nn.Parameter(narrowed, requires_grad=False)
    return copy.deepcopy(model, copies).requires_grad_(False)
