"""The experts' part of an update, put together: the router loss evens out the load, replay holds the routing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedModel

from training_core.config.lora import LoraConfig
from training_core.config.moe import MoeConfig
from training_core.config.optimizer import OptimizerConfig
from training_core.engines.single import SingleProcessEngine, group_of
from training_core.errors import ConfigurationError
from training_core.metrics import MetricSums
from training_core.models.lora import adapted_layers, attach_lora, reference_pass
from training_core.models.moe import routers
from training_core.models.recomputation import recompute_layers
from training_core.ops.masking import lengths_to_mask
from training_core.rl.experts import ExpertTerm
from training_core.rl.forward import Precision, answer_logprobs
from training_core.rl.layouts import Layout
from training_core.rollout.batch import MicroBatch, TrajectoryBatch

Build = Callable[..., Any]
CPU = torch.device("cpu")
NUM_ANSWERS = 6
LAYOUTS = ("padded", "shared_prompt", "packed")


def mixture(build: Build) -> PreTrainedModel:
    model: PreTrainedModel = build(
        "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True
    )
    with torch.no_grad():
        for router in routers(model):
            router.weight.mul_(8.0)  # type: ignore[operator]
    return model


def batch_of() -> TrajectoryBatch:
    generator = torch.Generator().manual_seed(0)

    def ids(num_tokens: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 96, (num_tokens,), generator=generator).tolist())

    prompts, answers = [ids(7), ids(4), ids(9)], [5, 3, 1, 6, 8, 8]
    mask = lengths_to_mask(torch.tensor(answers), max(answers))
    return TrajectoryBatch([p for p in prompts for _ in range(2)], [ids(n) for n in answers], mask, mask.float() * 0)


def split(layout: str, max_rows: int, rows: Sequence[int] = range(NUM_ANSWERS)) -> list[MicroBatch]:
    return Layout(layout, max_rows, None).split(batch_of(), rows, 0, CPU)


def logprobs(model: PreTrainedModel, micro: MicroBatch, autocast: str = "none") -> Tensor:
    return answer_logprobs(model, micro, 1.0, Precision(autocast, CPU), with_entropy=False)[0]


def record(term: ExpertTerm, micros: Sequence[MicroBatch], autocast: str = "none") -> list[Tensor]:
    term.begin_step(NUM_ANSWERS)
    found = []
    for micro in micros:
        with torch.no_grad(), term.recording(micro):
            found.append(logprobs(term.policy, micro, autocast))
    return found


def gradient(term: ExpertTerm, micros: Sequence[MicroBatch], rows: Sequence[int], sums: MetricSums) -> Tensor:
    """Return the gradient of the router loss of an update; nothing but it."""
    term.policy.zero_grad()
    term.begin_update(rows)
    for micro in micros:
        with term.training(micro) as routing:
            logprobs(term.policy, micro)
            loss = term.loss(micro, routing, sums)
            assert loss is not None
            num_calls = routing.num_calls
            loss.backward()
            assert routing.num_calls == num_calls  # Layers that run again are not a new pass.
    return torch.cat([p.grad.flatten() for p in term.policy.parameters() if p.grad is not None])


def test_the_load_evens_out(tiny_decoder: Build) -> None:
    model, micros = mixture(tiny_decoder), split("padded", 3)
    term = ExpertTerm(MoeConfig(auxiliary_coefficient=1.0), model)
    engine = SingleProcessEngine([group_of("policy", model, 1e-2)], OptimizerConfig(learning_rate=1e-2), 30)
    history = []
    for step in range(1, 31):
        record(term, micros)
        history.append(term.step_metrics(NUM_ANSWERS))
        gradient(term, micros, range(NUM_ANSWERS), MetricSums())
        engine.step(step)
    first, last = history[0], history[-1]
    assert last["moe/load_entropy_nats"] > first["moe/load_entropy_nats"] + 0.02
    assert last["moe/load_max_fraction"] < first["moe/load_max_fraction"] - 0.02
    assert last["moe/load_entropy_nats"] <= math.log(4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_add_up_to_the_updates_loss(tiny_decoder: Build, layout: str) -> None:
    model, rows = mixture(tiny_decoder), [1, 2, 4, 5]
    term = ExpertTerm(MoeConfig(auxiliary_coefficient=0.01, z_coefficient=0.1), model)
    record(term, split("padded", 6))
    whole, sums = gradient(term, split("padded", 6, rows), rows, whole_sums := MetricSums()), MetricSums()
    parts = gradient(term, split(layout, 2, rows), rows, sums)
    assert float((parts - whole).norm() / whole.norm()) < 1e-5
    assert sums.means() == pytest.approx(whole_sums.means(), rel=1e-5)
    assert sums.sums["moe/auxiliary_loss"].count == 3 + 1 + 8 + 8
    # The rows of the update alone decide.
    other = gradient(term, split("padded", 6), range(NUM_ANSWERS), MetricSums())
    assert float((other - whole).norm() / whole.norm()) > 1e-2


def test_two_ranks_make_the_update_of_one(tiny_decoder: Build) -> None:
    model = mixture(tiny_decoder)
    config = MoeConfig(auxiliary_coefficient=0.01)
    alone = ExpertTerm(config, model)
    record(alone, split("padded", 6))
    whole = gradient(alone, split("padded", 6), range(NUM_ANSWERS), MetricSums())
    parts = []
    for mine, others in (([0, 1], [2, 3, 4, 5]), ([2, 3, 4, 5], [0, 1])):
        counts = alone._routing.counts(others)
        term = ExpertTerm(config, model, all_sum=lambda tensor, counts=counts: tensor + counts)
        record(term, split("padded", 6, mine))
        parts.append(gradient(term, split("padded", 6, mine), mine, MetricSums()))
    assert float((parts[0] + parts[1] - whole).norm() / whole.norm()) < 1e-5


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replay_makes_the_first_update_on_policy_to_the_bit(tiny_decoder: Build, layout: str, autocast: str) -> None:
    model, micros, sums = mixture(tiny_decoder), split(layout, 3), MetricSums()
    term = ExpertTerm(MoeConfig(auxiliary_coefficient=0.0, replay=True), model)
    before = record(term, micros, autocast)
    term.begin_update(range(NUM_ANSWERS))
    for micro, expected in zip(micros, before, strict=True):
        with term.training(micro) as routing:
            assert torch.equal(logprobs(model, micro, autocast), expected)
            assert term.loss(micro, routing, sums) is None
    assert sums.means()["moe/replay_changed_fraction"] == 0.0
    with torch.no_grad():
        for router in routers(model):
            router.weight.neg_()  # type: ignore[operator]
    sums = MetricSums()
    with term.training(micros[0]) as routing:
        logprobs(model, micros[0], autocast)
        term.loss(micros[0], routing, sums)
    assert sums.means()["moe/replay_changed_fraction"] > 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reference_without_adapters_routes_for_itself(tiny_decoder: Build, layout: str) -> None:
    model, (micro,) = attach_lora(mixture(tiny_decoder), LoraConfig(rank=2), 1), split(layout, 6)
    with torch.no_grad():
        start = logprobs(model, micro)
        for _, layer in adapted_layers(model):
            layer.lora_B["default"].weight.fill_(0.05)
    term = ExpertTerm(MoeConfig(auxiliary_coefficient=0.01, replay=True), model)
    record(term, [micro])
    term.begin_update(range(NUM_ANSWERS))
    gradients = []
    for with_reference in (False, True):
        model.zero_grad()
        with term.training(micro) as routing:
            values = logprobs(model, micro)
            if with_reference:
                with reference_pass(model):
                    assert torch.equal(logprobs(model, micro), start)
            assert routing.num_calls == (2 if layout == "shared_prompt" else 1)
            loss = term.loss(micro, routing, MetricSums())
            assert loss is not None
            (values.sum() + loss).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("replay", [True, False])
def test_layers_that_run_again_change_nothing(tiny_decoder: Build, replay: bool) -> None:
    gradients = []
    for recomputes in (False, True):
        model = mixture(tiny_decoder)
        term = ExpertTerm(MoeConfig(auxiliary_coefficient=0.01, replay=replay), model)
        record(term, split("padded", 6))
        with torch.no_grad():
            for router in routers(model):
                router.weight.mul_(-1.0)  # type: ignore[operator]
        if recomputes:
            recompute_layers(model)
        gradients.append(gradient(term, split("padded", 2), range(NUM_ANSWERS), MetricSums()))
    assert torch.equal(*gradients)


def test_nothing_is_left_on_the_policy(tiny_decoder: Build) -> None:
    model, (micro,) = mixture(tiny_decoder), split("padded", 6)
    term = ExpertTerm(MoeConfig(replay=True), model)
    free = record(term, [micro])[0]
    with contextlib.suppress(RuntimeError), term.training(micro):
        raise RuntimeError
    with torch.no_grad():
        assert torch.equal(logprobs(model, micro), free)
    assert not any(router._forward_hooks for router in routers(model))


def test_a_dense_policy_has_no_experts(tiny_decoder: Build) -> None:
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM has no router"):
        ExpertTerm(MoeConfig(), tiny_decoder("llama"))


def test_settings() -> None:
    assert MoeConfig().needs_pass_before
    assert MoeConfig(auxiliary_coefficient=0.0, replay=True).needs_pass_before
    assert not MoeConfig(auxiliary_coefficient=0.0).needs_pass_before
    with pytest.raises(ValidationError, match="multiple of auxiliary_coefficient"):
        MoeConfig(auxiliary_coefficient=0.0, z_coefficient=0.1)
