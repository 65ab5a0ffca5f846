"""Parameters under the names that they have in a checkpoint.

A loaded model may hold its weights in another form than the file: the experts of a layer, one matrix each in the file,
are one tensor in memory. Rollout engines are handed the file's form.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from training_core.errors import ConfigurationError


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return every parameter as in the checkpoint: by its name there, tied ones once.

    The tensors are views of the parameters: no memory, an update of the model shows in them, and what is copied into
    them is in the model.

    Raises:
        ConfigurationError: a parameter's form in the file is not known.
    """
    return {
        name: view
        for parameter_name, parameter in model.named_parameters()
        for name, view in checkpoint_views(model, parameter_name, parameter.detach())
    }


def checkpoint_views(model: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield one parameter in the form of the checkpoint: (name there, view of `tensor`).

    Args:
        model: knows how its checkpoint was converted.
        name: of the parameter in memory, without the parts that an adapter adds to it.
        tensor: its values.

    Raises:
        ConfigurationError: the form is neither the same nor experts stacked in their first dimension.
    """
    # On the meta device: names and shapes, no values and no memory.
    found = revert_weight_conversion(model, {name: torch.empty_like(tensor, device="meta")})
    views = _views(tensor, len(found))
    names = list(found)
    if len(views) != len(names) or any(found[n].shape != v.shape for n, v in zip(names, views, strict=True)):
        shapes = {n: tuple(value.shape) for n, value in found.items()}
        raise ConfigurationError(
            f"{type(model).__name__} keeps {name} {tuple(tensor.shape)} in its checkpoint as {shapes}, a form that "
            "weights cannot be handed over in. Use a model of another architecture"
        )
    yield from zip(names, views, strict=True)


def _views(tensor: Tensor, num_parts: int) -> list[Tensor]:
    """Return `tensor` whole, expert by expert, or all experts' first halves and then all second halves."""
    if num_parts == 1:
        return [tensor]
    if num_parts == tensor.shape[0]:
        return list(tensor)
    if num_parts == 2 * tensor.shape[0] and tensor.ndim == 3:
        half = tensor.shape[1] // 2
        return [*tensor[:, :half], *tensor[:, half:]]
    return []
