"""Log-probabilities of answer tokens under a causal model, with the output head applied to those tokens only."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training_core.errors import ConfigurationError
from training_core.ops.logprobs import token_logprobs
from training_core.rollout.batch import MicroBatch
from training_core.stages.shared_prompt import SharedPromptBatch, shared_prompt_hidden

MAX_HEAD_DIFFERENCE_NATS = 1e-2
"""Log-probs of the model's own logits may differ by this much in float32: sums in another order."""


@dataclass(frozen=True)
class Precision:
    """How forward passes run: master weights in float32, matrix products in float32 or bfloat16."""

    autocast: str
    """"bfloat16" or "none"."""
    device: torch.device

    def context(self) -> AbstractContextManager[None]:
        if self.autocast == "none":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    @property
    def matmul_dtype(self) -> torch.dtype:
        return torch.float32 if self.autocast == "none" else torch.bfloat16


def answer_logprobs(
    model: PreTrainedModel, micro: MicroBatch, temperature: float, precision: Precision, *, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Return (logprobs, entropy) of the answer tokens, each [B, t] float32 in nats, 0 at masked positions.

    Both are of the distribution at `temperature`. The gradient flows through logprobs. Entropy is NaN at answer tokens
    when it is not asked for.
    """
    with precision.context():
        if isinstance(micro, SharedPromptBatch):
            chosen = shared_prompt_hidden(model, micro)
        else:
            hidden = model.base_model(input_ids=micro.input_ids, use_cache=False).last_hidden_state
            chosen = hidden[micro.predict_rows, micro.predict_positions]
    logprobs, entropy = token_logprobs(
        chosen,
        head_weight(model),
        micro.targets,
        temperature=temperature,
        matmul_dtype=precision.matmul_dtype,
        with_entropy=with_entropy,
    )
    return micro.scatter(logprobs), micro.scatter(entropy)


def head_weight(model: PreTrainedModel) -> Tensor:
    weight: Tensor = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    return weight


@torch.no_grad()
def check_output_head(model: PreTrainedModel, micro: MicroBatch) -> None:
    """Check on one micro-batch, in float32, that the model's logits are its last hidden states times its head.

    Raises:
        ConfigurationError: they are not (a soft cap or a scale on the logits, or a bias): this trainer would optimise
            other probabilities than the model has.
    """
    plain_precision = Precision("none", micro.input_ids.device)
    ours, _ = answer_logprobs(model, micro, 1.0, plain_precision, with_entropy=False)
    logits = model(input_ids=micro.input_ids, use_cache=False).logits[micro.predict_rows, micro.predict_positions]
    plain = torch.log_softmax(logits.float(), dim=-1).gather(1, micro.targets[:, None])[:, 0]
    difference = float((ours - micro.scatter(plain)).abs().max())
    if difference > MAX_HEAD_DIFFERENCE_NATS:
        raise ConfigurationError(
            f"{type(model).__name__} computes its logits otherwise than hidden states times head (log-probs differ by "
            f"{difference:.3f} nats). Try `share_prompt: false`, or use a model without soft cap, scale or bias there"
        )


def narrow_linear_weights(model: PreTrainedModel, precision: Precision) -> PreTrainedModel:
    """Store linear weights of a frozen model in the dtype in which autocast multiplies them; return the model.

    The results are the same to the last bit as with float32 weights under the same autocast, in half the memory.
    Embeddings (and a head tied to them) and norms stay float32: autocast does not touch those.
    """
    model.requires_grad_(False)
    if precision.matmul_dtype == torch.float32:
        return model
    kept = {id(model.get_input_embeddings().weight), id(head_weight(model))}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and id(module.weight) not in kept:
            module.to(precision.matmul_dtype)
    return model
