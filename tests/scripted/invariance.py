"""The gradient of one optimizer step of a tiny float64 policy, whatever its answers' layout and split over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from training_core.config.algorithms import CustomConfig
from training_core.engines.single import StepReport
from training_core.metrics import MetricSums
from training_core.models.critic import ValueModel
from training_core.ops.aggregation import AllSum, keep
from training_core.ops.masking import lengths_to_mask
from training_core.rl import forward
from training_core.rl.critic import CriticUpdater
from training_core.rl.layouts import Layout
from training_core.rl.reference import build_reference
from training_core.rl.signal import ScoredBatch, Signal, build_signal
from training_core.rl.update import PolicyUpdater, Surroundings
from training_core.rollout.batch import MicroBatch, TrajectoryBatch

VOCABULARY = 40
GROUPS, GROUP_SIZE = 3, 3
Gradients = dict[str, torch.Tensor]


SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "mixtral": {
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "max_position_embeddings": 64,
        "sliding_window": None,
    },
}


@contextmanager
def float64_throughout(config: CustomConfig) -> Iterator[None]:
    """Let norms and routers, which round to float32 whatever their model's dtype is, compute in float64 as well.

    GPT-2, the model of all cases without experts, needs no such help.
    """
    if config.experts is None:
        yield
        return
    original: Any = torch.Tensor.float
    single = torch.float32
    torch.float32 = torch.float = torch.float64  # type: ignore[misc]
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.float32 = torch.float = single  # type: ignore[misc]
        torch.Tensor.float = original  # type: ignore[method-assign]


def build_model(seed: int, model_type: str = "gpt2") -> Any:
    """Return a decoder of one or two layers in float64."""
    config = AutoConfig.for_model(model_type, vocab_size=VOCABULARY, **SIZES[model_type])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    model.train(False)
    model.config.use_cache = False
    if model_type == "mixtral":
        model.set_experts_implementation("eager")  # The grouped product has no float64.
    return model


@dataclass
class Catcher:
    """In place of an optimizer: keeps the gradients that an update would step with."""

    model: torch.nn.Module
    caught: list[Gradients] = field(default_factory=list)

    def step(self, step: int) -> StepReport:
        self.caught.append({n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None})
        self.model.zero_grad()
        return StepReport(0.0, 0.0)


def build_config(loss: dict[str, Any], aggregation: dict[str, Any], **changes: Any) -> CustomConfig:
    fields: dict[str, Any] = {
        "name": "custom",
        "num_steps": 1,
        "optimizer": {"learning_rate": 1.0},
        "prompts_per_step": GROUPS,
        "group_size": GROUP_SIZE,
        "autocast": "none",
        "advantage": {"kind": "group_centred"},
        "mask_truncated": True,
        "layout": "padded",
        "loss": loss,
        "aggregation": aggregation,
    }
    return CustomConfig.model_validate({**fields, **changes})


def build_updater(config: CustomConfig, all_sum: AllSum = keep) -> PolicyUpdater:
    policy = build_model(0, "gpt2" if config.experts is None else "mixtral")
    reference = build_reference(config, build_model(1))
    around = Surroundings(
        temperature=0.8, pad_token_id=7, seed=1, should_stop=lambda: False, max_new_tokens=6, all_sum=all_sum
    )
    critic = None
    if config.critic is not None:
        values = ValueModel(build_model(2).base_model).double()
        values.head.weight.data = torch.linspace(-1.0, 1.0, 16, dtype=torch.float64)[None]
        critic = CriticUpdater(config.critic, config, values, Catcher(values), all_sum)  # type: ignore[arg-type]
    updater = PolicyUpdater(config, policy, reference, Catcher(policy), around, critic)  # type: ignore[arg-type]
    updater._is_first = False
    return updater


def build_scored() -> ScoredBatch:
    """Nine uneven answers to three uneven prompts: one without a score, two truncated, ratios off 1, one fresh row in
    three."""
    generator = torch.Generator().manual_seed(5)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())

    number = GROUPS * GROUP_SIZE
    prompts = [prompt for prompt in (ids(3), ids(9), ids(1)) for _ in range(GROUP_SIZE)]
    lengths = [5, 1, 4, 6, 2, 2, 1, 3, 6]
    mask = lengths_to_mask(torch.tensor(lengths), max(lengths))
    logprobs = torch.randn(mask.shape, generator=generator) * 0.4 - 3.5
    rows = torch.arange(number)
    return ScoredBatch(
        batch=TrajectoryBatch(prompts, [ids(n) for n in lengths], mask, torch.where(mask, logprobs, 0.0)),
        scores=torch.randn(number, generator=generator, dtype=torch.float64),
        present=rows != 4,
        is_truncated=(rows == 3) | (rows == 8),
        group_ids=rows // GROUP_SIZE,
        is_replayed=rows % 3 != 0,
        row_weights=0.5 + torch.rand(number, generator=generator, dtype=torch.float64),
    )


def permuted(scored: ScoredBatch, order: Sequence[int]) -> ScoredBatch:
    """Return the same answers in another order."""
    index, batch = torch.tensor(order), scored.batch
    return replace(
        scored,
        batch=TrajectoryBatch(
            [batch.prompts[i] for i in order],
            [batch.answers[i] for i in order],
            batch.mask[index],
            batch.sampler_logprobs[index],
        ),
        **{
            name: getattr(scored, name)[index]
            for name in ("scores", "present", "is_truncated", "group_ids", "is_replayed", "row_weights")
        },
    )


def widened(scored: ScoredBatch, extra: int) -> ScoredBatch:
    """Return the same answers in tensors of more columns than the longest needs, with no number in them."""
    mask = torch.nn.functional.pad(scored.batch.mask, (0, extra), value=False)
    logprobs = torch.nn.functional.pad(scored.batch.sampler_logprobs, (0, extra), value=float("nan"))
    return replace(scored, batch=replace(scored.batch, mask=mask, sampler_logprobs=logprobs))


def spoiled(signal: Signal) -> Signal:
    """Return what the updates learn from with no number wherever a token does not count."""

    def spoil(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.masked_fill(~signal.mask, float("nan"))

    names = ("advantages", "old_logprobs", "reference_logprobs", "returns", "old_values")
    batch = replace(signal.batch, sampler_logprobs=spoil(signal.batch.sampler_logprobs))
    return replace(signal, batch=batch, **{name: spoil(getattr(signal, name)) for name in names})


def build_step_signal(updater: PolicyUpdater, scored: ScoredBatch) -> Signal:
    with float64_throughout(updater.config):
        before = updater.before_updates(scored.batch)
    return build_signal(updater.config, updater.estimate, scored, before, 0.3, updater.dtype)[0]


def gradients_of(updater: PolicyUpdater, signal: Signal, rows: Sequence[int]) -> Gradients:
    """Return the gradients of policy and critic that an update over `rows` adds up."""
    with float64_throughout(updater.config):
        updater.optimizer_update(2, 0, rows, signal, MetricSums())
    found = {f"policy.{n}": g for n, g in (updater.optimizer.caught or [{}])[-1].items()}  # type: ignore[attr-defined]
    if updater.critic is not None:
        micros = updater.split(signal.batch, rows)
        updater.critic.optimizer_update(2, 0, micros, rows, signal, MetricSums())
        caught = updater.critic.optimizer.caught or [{}]  # type: ignore[attr-defined]
        found.update({f"critic.{n}": g for n, g in caught[-1].items()})
    return found


@dataclass(frozen=True)
class WiderLayout(Layout):
    """Rows filled up `extra` columns beyond the longest, the answers' columns too."""

    extra: int = 3

    def split(self, batch: TrajectoryBatch, rows: Sequence[int], pad_token_id: int, device: Any) -> list[MicroBatch]:
        micros = []
        for micro in super().split(batch, rows, pad_token_id, device):
            fill = torch.full((len(micro.rows), self.extra), pad_token_id)
            columns = torch.zeros(len(micro.rows), self.extra, dtype=torch.bool)
            room = max(0, batch.mask.shape[1] - micro.mask.shape[1])
            mask = torch.cat([micro.mask, columns[:, :room]], dim=1)
            micros.append(replace(micro, input_ids=torch.cat([micro.input_ids, fill], dim=1), mask=mask))
        return micros


@contextmanager
def left_padding() -> Iterator[None]:
    """Within, plain micro-batches go through the model with their padding on the left."""
    original = forward.predicting_hidden

    def left(model: Any, micro: MicroBatch) -> torch.Tensor:
        if type(micro) is not MicroBatch:
            return original(model, micro)
        ends = torch.zeros(len(micro.rows), dtype=torch.long)
        ends = ends.scatter_reduce(0, micro.predict_rows, micro.predict_positions + 2, reduce="amax")
        width = micro.input_ids.shape[1] + 2
        shift = width - ends
        ids = torch.full((len(micro.rows), width), 11)
        seen = torch.zeros(len(micro.rows), width, dtype=torch.bool)
        for row, length in enumerate(ends.tolist()):
            ids[row, width - length :] = micro.input_ids[row, :length]
            seen[row, width - length :] = True
        positions = (torch.arange(width)[None] - shift[:, None]).clamp(min=0)
        hidden = model.base_model(
            input_ids=ids, attention_mask=seen, position_ids=positions, use_cache=False
        ).last_hidden_state
        return hidden[micro.predict_rows, micro.predict_positions + shift[micro.predict_rows]]

    from training_core.rl import critic

    forward.predicting_hidden = critic.predicting_hidden = left  # type: ignore[assignment]
    try:
        yield
    finally:
        forward.predicting_hidden = critic.predicting_hidden = original
