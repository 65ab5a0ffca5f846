"""Routers of mixture-of-experts models: what they chose in a forward pass, and making them choose it again.

The top-k choice of a router flips when logits that are nearly equal change a little: between the pass that measured the
old policy and the pass that is trained, after an update or with another batch shape. The ratio of the two policies then
compares different experts. Replaying the choices of the recorded pass removes that: the experts are fixed, and the
gradient still reaches the router through the weights that it gives them.

Rollout engines do not hand out their routing here (neither vLLM nor transformers), so what is replayed is the trainer's
own recorded pass ("R2" in the literature), never the engine's.

Routing works token by token and drops none: no capacity limits, so padding takes no expert away from a real token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from training_core.errors import ConfigurationError

EXPERT_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configs call the number of experts of a layer."""

Layers = Sequence[Tensor]
"""One tensor a router, in the order in which the model has them."""
Hook = Callable[[nn.Module, tuple[Tensor, ...], tuple[Tensor, Tensor, Tensor]], tuple[Tensor, Tensor, Tensor] | None]


@dataclass
class RoutingRecord:
    """What the routers did in each call of the decoder, padding included.

    Most forward passes call it once. With prompts shared by their answers it is called for the prompts and then, if an
    answer has more than one token, for the answers.
    """

    layer_logits: list[list[Tensor]] = field(default_factory=list)
    """[router][call]: [positions, E] router logits with their gradient, positions row by row."""
    layer_choices: list[list[Tensor]] = field(default_factory=list)
    """[router][call]: [positions, K] int64 experts that the router chose itself, the best first."""
    is_open: bool = True
    """Whether passes are still written down."""

    @property
    def num_calls(self) -> int:
        return len(self.layer_logits[0])

    def logits(self, call: int = 0) -> list[Tensor]:
        """Return the logits of one call, router by router."""
        return [calls[call] for calls in self.layer_logits]

    def choices(self, call: int = 0) -> list[Tensor]:
        """Return the choices of one call, router by router."""
        return [calls[call] for calls in self.layer_choices]


def always() -> bool:
    return True


def is_moe(model: nn.Module) -> bool:
    """Return whether the language model routes tokens to experts."""
    config = getattr(getattr(model, "backbone", model), "config", None)
    text_config = config.get_text_config() if config is not None else None
    counts = [getattr(text_config, name, None) for name in EXPERT_COUNT_NAMES]
    return any(isinstance(count, int) and count > 1 for count in counts)


def routers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that choose experts, in the order of the layers.

    Raises:
        ConfigurationError: the model has none that can be watched; names its class.
    """
    decoder = model.base_model
    recorders = (getattr(type(decoder), "_can_record_outputs", None) or {}).get("router_logits")
    recorders = recorders if isinstance(recorders, list) else [recorders]
    classes = tuple(
        recorder.target_class
        for recorder in recorders
        if isinstance(recorder, OutputRecorder) and recorder.target_class not in (None, nn.Linear)
    )
    found = [module for module in decoder.modules() if isinstance(module, classes)] if classes else []
    if not found:
        raise unsupported(model, "has no router that says which experts it chose")
    return found


def unsupported(model: nn.Module, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(model).__name__} {reason}: its router losses, expert metrics and routing replay are not available. "
        "Leave them off, or use Mixtral, Qwen2-MoE, Qwen3-MoE or OLMoE"
    )


@contextlib.contextmanager
def record_routing(model: PreTrainedModel, when: Callable[[], bool] = always) -> Iterator[RoutingRecord]:
    """Watch the routers: forward passes of `model` or its decoder within are written down, until the record is closed.

    Within `replay_routing` too: what is written down is what the routers would have chosen. Open this one first.

    Args:
        model: a mixture of experts.
        when: asked at each pass; false leaves it out. `torch.is_grad_enabled`: passes that are trained on.

    Raises:
        ConfigurationError: the model's routers cannot be watched.
    """
    modules = routers(model)
    record = RoutingRecord([[] for _ in modules], [[] for _ in modules])

    def hook_of(layer: int) -> Hook:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
            if not (record.is_open and when()):
                return
            logits, _, choices = checked_output(model, output)
            record.layer_logits[layer].append(logits)
            record.layer_choices[layer].append(choices.detach())

        return hook

    with _hooked(modules, hook_of):
        yield record


@contextlib.contextmanager
def replay_routing(
    model: PreTrainedModel, calls: Sequence[Layers], when: Callable[[], bool] = always
) -> Iterator[None]:
    """Make the routers choose given experts; weights and their gradient are those of the router's own probabilities.

    Log-probs of an unchanged model are the same to the bit as in the recorded pass, for the same batch. With gradient
    checkpointing keep the context open until after the backward pass, which runs the layers again; that works for a
    single call only, so not with prompts shared by their answers.

    Args:
        model: a mixture of experts.
        calls: for each call of the decoder within: [positions, K] integers a router. A row that starts with -1 is left
            to the router: padding, and positions that nothing was recorded for. When only one is given it holds for
            every call.
        when: asked at each pass; false leaves it as it is.

    Raises:
        ConfigurationError: the model's routers do not weigh experts by a softmax over all of them; names the class.
        ValueError: another shape, or more calls than were given.
    """
    modules = routers(model)

    def hook_of(layer: int) -> Hook:
        num_done = 0

        def hook(
            module: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
        ) -> tuple[Tensor, Tensor, Tensor] | None:
            nonlocal num_done
            if not when():
                return None
            logits, weights, own = checked_output(model, output)
            if len(calls) > 1 and num_done >= len(calls):
                raise ValueError(f"routing was recorded for {len(calls)} calls of the decoder, and this is one more")
            wanted = calls[0 if len(calls) == 1 else num_done][layer].to(own.device)
            num_done += 1
            if wanted.shape != own.shape:
                raise ValueError(f"routing was recorded for {list(wanted.shape)}, this pass needs {list(own.shape)}")
            chosen = torch.where(wanted[:, :1] < 0, own, wanted.long())
            return logits, _weigh_as(model, logits, weights, own, chosen), chosen

        return hook

    with _hooked(modules, hook_of):
        yield


@contextlib.contextmanager
def _hooked(modules: Sequence[nn.Module], hook_of: Callable[[int], Hook]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook_of(layer)) for layer, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def checked_output(model: nn.Module, output: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return a router's output as (logits [positions, E], weights [positions, K], choices [positions, K]).

    Raises:
        ConfigurationError: it is something else.
    """
    if isinstance(output, tuple) and len(output) == 3 and all(isinstance(part, Tensor) for part in output):
        logits, weights, choices = output
        is_integer = not choices.is_floating_point()
        if logits.ndim == 2 and weights.shape == choices.shape and len(choices) == len(logits) and is_integer:
            return logits, weights, choices
    raise unsupported(model, "has routers whose output is not (logits, weights, choices)")


def router_weights(logits: Tensor, choices: Tensor, *, normalised: bool) -> Tensor:
    """Return [positions, K]: the softmax over all experts, at the chosen ones, divided by their sum or not."""
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, choices)
    return probabilities / probabilities.sum(dim=-1, keepdim=True) if normalised else probabilities


def _weigh_as(model: nn.Module, logits: Tensor, weights: Tensor, own: Tensor, chosen: Tensor) -> Tensor:
    """Return the weights of `chosen`, computed in the way that gave the router's `own` choice its `weights`."""
    for normalised in (True, False):
        with torch.no_grad():
            same = torch.equal(router_weights(logits, own, normalised=normalised).to(weights.dtype), weights)
        if same:
            return router_weights(logits, chosen, normalised=normalised).to(weights.dtype)
    raise unsupported(model, "weighs its experts otherwise than by a softmax over all of them")
