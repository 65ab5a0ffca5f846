"""One process owns everything: float32 master weights, AdamW, clipping, schedule, and their state on disk."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from training_core.config.optimizer import OptimizerConfig
from training_core.engines.schedule import learning_rate_factor
from training_core.errors import ArtifactError, ConfigurationError, TrainingDivergedError
from training_core.protocol.atomic import read_json, write_json

STATE_VERSION = 1
WEIGHTS_FILE = "weights.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")
CHUNK_ELEMENTS = 1 << 14


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a learning rate.

    Args:
        name: prefix of the parameters' names in checkpoints and messages, e.g. "policy".
        parameters: name to float32 parameter; those that need no gradient are left alone.
        learning_rate: full rate of this group.
    """

    name: str
    parameters: dict[str, torch.nn.Parameter]
    learning_rate: float


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    learning_rate: float
    """Rate of the first group in this step."""


def autocast_context(name: str, device: torch.device) -> AbstractContextManager[None]:
    """Return the context that runs matrix products in bfloat16 ("bfloat16") or changes nothing ("none")."""
    return contextlib.nullcontext() if name == "none" else torch.autocast(device.type, dtype=torch.bfloat16)


def group_of(name: str, module: torch.nn.Module, learning_rate: float) -> ParameterGroup:
    """Return all trainable parameters of `module` as one group; tied parameters count once."""
    parameters = {key: value for key, value in module.named_parameters() if value.requires_grad}
    return ParameterGroup(name, parameters, learning_rate)


class SingleProcessEngine:
    """Optimizer and master weights on one process.

    The caller adds gradients with `loss.backward()` over as many micro-batches as it likes, under `autocast()`, and
    then calls `step`. Loss terms must carry the denominator of the whole optimizer step already.

    Args:
        groups: disjoint groups; the first one's rate is the one reported.
        config: AdamW, clipping and schedule. `config.learning_rate` is not used here: each group has its own.
        num_steps: optimizer steps of the whole training, for the schedule.
        autocast: "bfloat16" runs matrix products in bfloat16 over the float32 weights, "none" in float32.

    Raises:
        ConfigurationError: warm-up longer than the training.
        ValueError: no parameter, one in two groups, or one that is not float32.
    """

    def __init__(
        self, groups: Sequence[ParameterGroup], config: OptimizerConfig, num_steps: int, autocast: str = "none"
    ) -> None:
        if config.schedule.warmup_steps > num_steps:
            raise ConfigurationError(
                f"optimizer.schedule.warmup_steps is {config.schedule.warmup_steps}, but there are only {num_steps} "
                "optimizer steps. Lower it or train longer"
            )
        if autocast not in ("none", "bfloat16"):
            raise ValueError(f"autocast must be 'none' or 'bfloat16', got {autocast!r}")
        self.config = config
        self.num_steps = num_steps
        self.autocast_name = autocast
        self.learning_rate_factor = 1.0
        """On every rate of the schedule; a roll-back lowers it. The owner saves it: it is not part of this state."""
        self.parameters = named_parameters_of(groups)
        self.device = next(iter(self.parameters.values())).device
        self.optimizer = torch.optim.AdamW(
            optimizer_groups(groups, config.weight_decay),
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context in which forward passes run."""
        return autocast_context(self.autocast_name, self.device)

    def step(self, step: int) -> StepReport:
        """Clip, update the weights and clear the gradients.

        Args:
            step: number of this optimizer step, from 1.

        Raises:
            TrainingDivergedError: the gradient is not finite; the weights are as before.
        """
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = global_norm(gradients)
        if not math.isfinite(norm):
            raise TrainingDivergedError(
                f"optimizer step {step}: the gradient norm is {norm}; no update was made from it. Lower the "
                f"learning rate, or look for {self._first_non_finite()} and the data of this step"
            )
        if norm > self.config.max_grad_norm:
            torch._foreach_mul_(gradients, self.config.max_grad_norm / norm)
        factor = learning_rate_factor(self.config.schedule, step, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_learning_rate"] * factor * self.learning_rate_factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(grad_norm=norm, learning_rate=self.optimizer.param_groups[0]["lr"])

    def _first_non_finite(self) -> str:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                return f"the cause at parameter {name}"
        return "an overflow in the norm"

    def save(self, directory: Path, step: int) -> None:
        """Write weights, moments and step counts; three files, so that no more than one is copied in memory at once.

        Args:
            directory: exists; inside a checkpoint transaction.
            step: steps of the caller's loop done; kept for it and not used here.
        """
        save_file({name: p.detach() for name, p in self.parameters.items()}, directory / WEIGHTS_FILE)
        states = {name: self.optimizer.state[p] for name, p in self.parameters.items() if self.optimizer.state.get(p)}
        for moment in MOMENTS:
            save_file({name: state[moment] for name, state in states.items()}, directory / f"{moment}.safetensors")
        counts = {name: int(state["step"].item()) for name, state in states.items()}
        write_json(directory / "engine.json", {"version": STATE_VERSION, "step": step, "step_counts": counts})

    def load(self, directory: Path) -> int:
        """Restore what `save` wrote; return the steps that it was given.

        Raises:
            ArtifactError: a file is missing or damaged, or holds other parameters. Nothing is trained from a state
                with parts missing.
        """
        # A step that was given up may have left some, and not finite ones at that.
        self.optimizer.zero_grad(set_to_none=True)
        engine = read_engine_state(directory)
        counts: dict[str, int] = engine["step_counts"]
        copy_tensors(load_tensors(directory / WEIGHTS_FILE), dict(self.parameters), directory / WEIGHTS_FILE)
        self.optimizer.state.clear()
        unknown = set(counts) - set(self.parameters)
        if unknown:
            raise ArtifactError(f"{directory} holds optimizer state of parameters this model lacks: {sorted(unknown)}")
        for name, count in counts.items():
            parameter = self.parameters[name]
            moments = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
            step = torch.tensor(float(count), dtype=torch.float32, device=self.device)
            self.optimizer.state[parameter] = {"step": step, **moments}
        for moment in MOMENTS:
            file = directory / f"{moment}.safetensors"
            targets = {name: self.optimizer.state[self.parameters[name]][moment] for name in counts}
            copy_tensors(load_tensors(file), targets, file)
        return int(engine["step"])


def named_parameters_of(groups: Sequence[ParameterGroup]) -> dict[str, torch.nn.Parameter]:
    """Return all trainable parameters as "group.parameter"; float32 and each once.

    Raises:
        ValueError: there is none, one is not float32, or one is in two groups.
    """
    parameters: dict[str, torch.nn.Parameter] = {}
    seen: dict[int, str] = {}
    for group in groups:
        for key, parameter in group.parameters.items():
            name = f"{group.name}.{key}"
            if not parameter.requires_grad:
                continue
            if parameter.dtype != torch.float32:
                raise ValueError(f"parameter {name} is {parameter.dtype}; master weights must be float32")
            if id(parameter) in seen:
                raise ValueError(f"parameter {name} is already trained as {seen[id(parameter)]}")
            seen[id(parameter)] = name
            parameters[name] = parameter
    if not parameters:
        raise ValueError("there is no trainable parameter")
    return parameters


def optimizer_groups(groups: Sequence[ParameterGroup], weight_decay: float) -> list[dict[str, object]]:
    """Return AdamW's groups: matrices with weight decay and vectors without, for each learning rate."""
    result: list[dict[str, object]] = []
    for group in groups:
        trainable = [p for p in group.parameters.values() if p.requires_grad]
        for members, decay in (
            ([p for p in trainable if p.ndim >= 2], weight_decay),
            ([p for p in trainable if p.ndim < 2], 0.0),
        ):
            if members:
                rate = group.learning_rate
                result.append({"params": members, "lr": rate, "full_learning_rate": rate, "weight_decay": decay})
    return result


def global_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Return the L2 norm over all elements of all tensors; 0 for no tensor.

    Norms of chunks are taken in float32 and summed in float64, so that a large tensor loses no digits. Only where
    float32 overflows is the sum of squares itself taken in float64: it is a hundred times slower.
    """
    chunks = [c for tensor in tensors for c in torch.split(tensor.detach().reshape(-1), CHUNK_ELEMENTS)]
    if not chunks:
        return 0.0
    norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(chunks)).double()).item())
    if math.isfinite(norm):
        return norm
    norms = [torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks]
    return float(torch.linalg.vector_norm(torch.stack(norms)).item())


def read_engine_state(directory: Path) -> dict:  # type: ignore[type-arg]
    try:
        state = read_json(directory / "engine.json")
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{directory} holds no readable engine.json: {error}") from error
    if state.get("version") != STATE_VERSION:
        raise ArtifactError(
            f"{directory} has engine state version {state.get('version')}, this code reads version {STATE_VERSION}. "
            "Delete the stage directory to train again from the start"
        )
    return dict(state)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}. Training does not continue with parts missing") from error


def copy_tensors(source: dict[str, torch.Tensor], targets: dict[str, torch.Tensor], path: Path) -> None:
    """Copy each tensor of `source` into the target of the same name; names and shapes must be the same.

    Raises:
        ArtifactError: they are not.
    """
    if source.keys() != targets.keys():
        differing = ", ".join(sorted(source.keys() ^ targets.keys())[:5])
        raise ArtifactError(f"{path} does not hold the parameters of this model; they differ in: {differing}")
    with torch.no_grad():
        for name, target in targets.items():
            if source[name].shape != target.shape:
                shapes = f"{list(source[name].shape)}, the model's is {list(target.shape)}"
                raise ArtifactError(f"{path}: {name} has shape {shapes}")
            target.copy_(source[name])
