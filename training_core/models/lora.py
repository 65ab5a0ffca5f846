"""Low-rank adapters on a model's decoder, and the full weights that they amount to.

The model keeps its class: `model.base_model(...)` and `model.get_output_embeddings()` work as without adapters. The
reference of a policy with adapters is the same model with the adapters off (`reference_pass`): the intake checkpoint
itself, no second copy. Rollout engines and files get merged weights, under the checkpoint's own names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from training_core.config.lora import LoraConfig
from training_core.errors import ConfigurationError
from training_core.models.checkpoint_names import checkpoint_views
from training_core.seeding import derive_seed

Module = TypeVar("Module", bound=nn.Module)

ADAPTER = "default"
"""peft's name for the only adapter."""
BASE_PART = "base_layer"
ADAPTER_PREFIX = "lora_"


def attach_lora(model: Module, config: LoraConfig, seed: int) -> Module:
    """Give the decoder of `model` adapters, in place, and freeze all else of the language model.

    A is uniform within 1 / sqrt(inputs), as peft's default, and depends on the run's seed and the module's name only;
    B is 0, so the model computes exactly what it did. Adapters are float32 whatever the base weights are.

    Args:
        model: a causal language model, or a module with a decoder called `backbone` (reward model, critic), whose own
            head stays trainable.
        config: size and places.
        seed: the run's seed.

    Returns:
        `model` itself.

    Raises:
        ConfigurationError: a target has no matching linear layer, or is the output head.
        ValueError: the model has adapters already.
    """
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model

    if is_lora(model):
        raise ValueError("this model has adapters already")
    whole, decoder = language_model(model)
    targets = target_names(decoder, config, type(whole).__name__)
    whole.requires_grad_(False)
    peft_config = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        use_rslora=config.rank_stabilised,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(decoder.get_submodule(name), Conv1D) for name in targets),
        lora_dropout=0.0,
        bias="none",
    )
    # peft draws weights of its own, which are then replaced: nobody else's random numbers may shift.
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(peft_config, decoder, ADAPTER)
    for name, layer in adapted_layers(decoder):
        initialise(layer, derive_seed(seed, f"lora/{name}"))
    return model


def language_model(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the language model in `model` (all that is frozen) and its decoder (what is adapted)."""
    backbone: Any = getattr(model, "backbone", None)
    if backbone is not None:
        return backbone, backbone
    decoder: Any = getattr(model, "base_model", model)
    return model, decoder


def target_names(decoder: nn.Module, config: LoraConfig, model_name: str) -> list[str]:
    """Return the full names of the linear layers of `decoder` that get an adapter.

    Raises:
        ConfigurationError: a name matches none; the message lists the names there are.
    """
    linear = [name for name, module in decoder.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    last_parts = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    wanted = last_parts if config.target_modules == "all_linear" else list(config.target_modules)
    if unknown := [name for name in wanted if name not in last_parts]:
        raise ConfigurationError(
            f"lora.target_modules names {', '.join(unknown)}, which is no linear layer of {model_name}'s decoder. "
            f"There are: {', '.join(last_parts)}. The output head and the embeddings take no adapter: training reads "
            "their weights directly, and in many models they are one tensor"
        )
    return [name for name in linear if name.rpartition(".")[2] in wanted]


@torch.no_grad()
def initialise(layer: Any, seed: int) -> None:
    """Draw A from `seed`, on the CPU; set B to 0; both float32 and trainable."""
    matrix_a, matrix_b = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    for matrix in (matrix_a, matrix_b):
        matrix.weight.data = matrix.weight.data.float()
        matrix.weight.requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    rank, num_inputs = matrix_a.weight.shape
    uniform = torch.rand(rank, num_inputs, generator=generator) * 2.0 - 1.0
    matrix_a.weight.copy_(uniform / num_inputs**0.5)
    matrix_b.weight.zero_()


def adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, layer) of every layer that has an adapter; none without adapters."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, BASE_PART)
    ]


def is_lora(model: nn.Module) -> bool:
    """Return whether a layer of `model` has an adapter."""
    return bool(adapted_layers(model))


@contextlib.contextmanager
def reference_pass(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off: within, `model` computes what the checkpoint that it was loaded from does.

    No gradient is recorded within. Gradients of forward passes done before reach the adapters as ever.

    Raises:
        ValueError: the model has no adapters: it would be its own reference after training too.
    """
    layers = [layer for _, layer in adapted_layers(model)]
    if not layers:
        raise ValueError("a model without adapters is no reference for itself")
    for layer in layers:
        layer.enable_adapters(False)
    try:
        with torch.no_grad():
            yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merged_weight(layer: Any) -> Tensor:
    """Return W + scale * B A of an adapted layer as a new float32 tensor; without a change, W to the bit."""
    delta: Tensor = layer.get_delta_weight(ADAPTER)
    weight = layer.get_base_layer().weight.to(delta.dtype)
    # Adding 0.0 would turn -0.0 into 0.0: another digest for the same weights.
    return torch.where(delta == 0.0, weight, weight + delta)


@dataclass(frozen=True)
class PlainTensor:
    """A tensor of a model under the name that it has without adapters."""

    name: str
    tensor: Tensor
    """The base weight."""
    layer: Any = None
    """The adapted layer whose weight it is, or None."""

    def merged(self) -> Tensor:
        return self.tensor if self.layer is None else merged_weight(self.layer)


def plain_tensors(model: nn.Module, named: Iterator[tuple[str, Tensor]]) -> Iterator[PlainTensor]:
    """Yield `named` tensors of `model` as if it had no adapters; those of the adapters are left out.

    Args:
        model: with or without adapters.
        named: of its parameters or its state dict.
    """
    layers = dict(adapted_layers(model))
    if not layers:
        yield from (PlainTensor(name, tensor) for name, tensor in named)
        return
    for name, tensor in named:
        parts = name.split(".")
        if any(part.startswith(ADAPTER_PREFIX) for part in parts):
            continue
        owner, _, kind = name.rpartition(f".{BASE_PART}.")
        plain = ".".join(part for part in parts if part != BASE_PART)
        yield PlainTensor(plain, tensor, layers[owner] if kind == "weight" else None)


class MergedParameters(Sequence[tuple[str, Tensor]]):
    """(name, tensor) of all parameters as in the checkpoint, adapters merged in: what a rollout engine is handed.

    Merged weights are computed when they are asked for, one at a time and anew each time: never a second model. The
    order is that of the model. Make it once; it shows the weights as they are at the time of asking.

    Args:
        model: a causal language model, with or without adapters.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._entries: list[PlainTensor] = []
        for plain in plain_tensors(model, model.named_parameters()):
            for name, view in checkpoint_views(model, plain.name, plain.tensor.detach()):
                self._entries.append(PlainTensor(name, view, plain.layer))

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> tuple[str, Tensor]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[str, Tensor]]: ...

    def __getitem__(self, index: int | slice) -> tuple[str, Tensor] | Sequence[tuple[str, Tensor]]:
        if isinstance(index, slice):
            return [(entry.name, entry.merged()) for entry in self._entries[index]]
        entry = self._entries[index]
        return entry.name, entry.merged()

    @property
    def names(self) -> list[str]:
        """Names alone, nothing merged."""
        return [entry.name for entry in self._entries]

    @property
    def adapted_names(self) -> list[str]:
        """Names of the tensors that adapters change: at most these differ from the checkpoint."""
        return [entry.name for entry in self._entries if entry.layer is not None]


def merged_parameters(model: PreTrainedModel) -> MergedParameters:
    """Return the full weights of `model` under the checkpoint's names, for `hand_over_weights`."""
    return MergedParameters(model)
