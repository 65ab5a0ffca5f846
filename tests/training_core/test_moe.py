"""Watching and replaying routers of mixture-of-experts models, in every layout of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from training_core.errors import ConfigurationError
from training_core.metrics import MetricSums
from training_core.models.checkpoint_names import checkpoint_tensors
from training_core.models.critic import new_critic
from training_core.models.loading import load_causal_lm, save_causal_lm
from training_core.models.lora import merged_parameters
from training_core.models.moe import is_moe, record_routing, replay_routing, routers
from training_core.models.recomputation import recompute_layers
from training_core.models.tiny import Architecture, build_tiny_checkpoint
from training_core.ops.masking import lengths_to_mask
from training_core.ops.moe import load_fractions
from training_core.protocol.digests import file_digest
from training_core.rl.forward import Precision, answer_logprobs, predicting_hidden
from training_core.rl.layouts import Layout
from training_core.rl.routing import StepRouting, add_routing_metrics, load_metrics, router_losses
from training_core.rollout.batch import MicroBatch, TrajectoryBatch, build_micro_batch

Build = Callable[..., Any]
CPU = torch.device("cpu")
FP32 = Precision("none", CPU)
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32}
DECODERS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, **EXPERTS},
    "qwen2_moe": {"num_experts": 4, "norm_topk_prob": False, **EXPERTS},
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True, **EXPERTS},
    "olmoe": {"num_experts": 4, "norm_topk_prob": False, **EXPERTS},
}
ARCHITECTURES: tuple[Architecture, ...] = ("mixtral", "qwen3_moe")
LAYOUTS = ("padded", "shared_prompt", "packed")


def decoder(build: Build, model_type: str) -> PreTrainedModel:
    model: PreTrainedModel = build(model_type, **DECODERS[model_type])
    with torch.no_grad():
        for router in routers(model):
            router.weight.mul_(8.0)  # type: ignore[operator]  # Decided, as trained routers are.
    return model


def batch_of(answers: Sequence[int] = (5, 3, 1, 6)) -> TrajectoryBatch:
    """Two answers each to a prompt of 7 and a prompt of 4 tokens."""
    generator = torch.Generator().manual_seed(0)

    def ids(num_tokens: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 96, (num_tokens,), generator=generator).tolist())

    long, short = ids(7), ids(4)
    mask = lengths_to_mask(torch.tensor(list(answers)), max(answers))
    return TrajectoryBatch([long, long, short, short], [ids(n) for n in answers], mask, torch.zeros(mask.shape))


def split(batch: TrajectoryBatch, layout: str, max_rows: int = 4, rows: Sequence[int] = range(4)) -> list[MicroBatch]:
    return Layout(layout, max_rows, None).split(batch, rows, 0, CPU)


def logprobs(model: PreTrainedModel, micro: MicroBatch) -> Tensor:
    return answer_logprobs(model, micro, 1.0, FP32, with_entropy=False)[0]


@torch.no_grad()
def recorded(model: PreTrainedModel, micros: Sequence[MicroBatch]) -> tuple[StepRouting, list[Tensor]]:
    routing, values = StepRouting(4), []
    for micro in micros:
        with record_routing(model) as record:
            values.append(logprobs(model, micro))
        routing.store(micro, record)
    return routing, values


def nudge(model: PreTrainedModel, size: float) -> None:
    """Change the router weights a little, each time in the same way."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for router in routers(model):
            router.weight.add_(size * torch.randn(router.weight.shape, generator=generator))  # type: ignore


def test_which_models_are_mixtures(tiny_decoder: Build) -> None:
    for model_type in DECODERS:
        assert is_moe(decoder(tiny_decoder, model_type))
        assert len(routers(decoder(tiny_decoder, model_type))) == 2
    dense = tiny_decoder("llama")
    assert not is_moe(dense)
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM has no router"), record_routing(dense):
        pass


@pytest.mark.parametrize("model_type", DECODERS)
def test_what_is_recorded_is_what_the_model_reports(tiny_decoder: Build, model_type: str) -> None:
    model = decoder(tiny_decoder, model_type)
    ids = torch.tensor([list(range(3, 13)), list(range(20, 30))])
    with record_routing(model) as record:
        model.base_model(input_ids=ids, use_cache=False)
    reported = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
    assert record.num_calls == 1
    assert [logits.shape for logits in record.logits()] == [(20, 4), (20, 4)]
    for logits, choices, theirs in zip(record.logits(), record.choices(), reported, strict=True):
        assert torch.equal(logits, theirs)
        assert logits.requires_grad
        assert torch.equal(choices, theirs.softmax(dim=-1).topk(2).indices)
    model.base_model(input_ids=ids, use_cache=False)
    assert record.num_calls == 1  # The watch ends with the context.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", DECODERS)
def test_replay_is_exact_and_holds_against_a_change(tiny_decoder: Build, model_type: str, layout: str) -> None:
    model, batch = decoder(tiny_decoder, model_type), batch_of()
    micros = split(batch, layout, max_rows=2)
    routing, before = recorded(model, micros)
    for micro, expected in zip(micros, before, strict=True):
        with replay_routing(model, routing.for_replay(micro)):
            assert torch.equal(logprobs(model, micro), expected)
    nudge(model, 0.2)
    sums = MetricSums()
    drift: dict[bool, float] = {False: 0.0, True: 0.0}
    for micro, expected in zip(micros, before, strict=True):
        with record_routing(model) as record:
            free = logprobs(model, micro)
        own = torch.cat(record.choices())
        with record_routing(model) as again, replay_routing(model, routing.for_replay(micro)):
            replayed = logprobs(model, micro)
        add_routing_metrics(sums, micro, again, routing)
        assert torch.equal(again.choices()[0], own[: len(again.choices()[0])])  # What it would have chosen.
        for replays, values in ((False, free), (True, replayed)):
            drift[replays] = max(drift[replays], float((values - expected).abs().max().detach()))
    assert 0.0 < sums.means()["moe/replay_changed_fraction"] < 0.5
    assert drift[True] < drift[False]


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe"])
def test_any_layout_replays_what_another_recorded(tiny_decoder: Build, model_type: str) -> None:
    model, batch = decoder(tiny_decoder, model_type), batch_of()
    expected = {row: logprobs(model, build_micro_batch(batch, [row], 0, CPU))[0].detach() for row in range(4)}
    routing, _ = recorded(model, split(batch, "padded", max_rows=3))
    nudge(model, 0.3)
    alone = {}
    for row in range(4):
        micro = build_micro_batch(batch, [row], 0, CPU)
        with torch.no_grad(), replay_routing(model, routing.for_replay(micro)):
            alone[row] = logprobs(model, micro)[0]
    assert max(float((alone[row] - expected[row]).abs().max()) for row in range(4)) > 1e-3  # It did move.
    for source in LAYOUTS:
        nudge(model, -0.3)
        stored, _ = recorded(model, split(batch, source, max_rows=3))
        assert all(torch.equal(stored.route(row), routing.route(row)) for row in range(4))
        nudge(model, 0.3)
        for target in LAYOUTS:
            for micro in split(batch, target, max_rows=4, rows=[3, 1, 2]):
                with torch.no_grad(), replay_routing(model, stored.for_replay(micro)):
                    found = logprobs(model, micro)
                for index, row in enumerate(micro.rows.tolist()):
                    length = len(batch.answers[row])
                    assert torch.allclose(found[index, :length], alone[row], atol=1e-5), (source, target, row)


def test_the_gradient_reaches_the_router_under_replay(tiny_decoder: Build) -> None:
    model, batch = decoder(tiny_decoder, "mixtral"), batch_of()
    (micro,) = split(batch, "padded")
    routing, _ = recorded(model, [micro])

    def gradients(*, replays: bool) -> list[Tensor]:
        model.zero_grad()
        with replay_routing(model, routing.for_replay(micro) if replays else [[torch.full((48, 2), -1)] * 2]):
            logprobs(model, micro).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    replayed = gradients(replays=True)
    assert all(float(router.weight.grad.abs().max()) > 0.0 for router in routers(model))  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(replayed, gradients(replays=False), strict=True))
    model.zero_grad()
    logprobs(model, micro).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(replayed, model.parameters(), strict=True))


def test_replay_goes_with_gradient_checkpointing(tiny_decoder: Build) -> None:
    batch = batch_of()
    (micro,) = split(batch, "padded")
    gradients = []
    for recomputes in (False, True):
        model = decoder(tiny_decoder, "qwen3_moe")
        routing, _ = recorded(model, [micro])
        nudge(model, 0.3)
        if recomputes:
            assert recompute_layers(model) == 2
        with record_routing(model) as record, replay_routing(model, routing.for_replay(micro)):
            values = logprobs(model, micro)
            auxiliary = router_losses(micro, record, torch.ones(2, 4)).sum()
            (values.sum() + auxiliary).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "olmoe"])
def test_auxiliary_gradients_do_not_depend_on_split_or_layout(
    tiny_decoder: Build, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float64, through the whole model: the invariance law for the auxiliary term."""
    model, batch = decoder(tiny_decoder, model_type).double(), batch_of()
    model.set_experts_implementation("eager")  # The grouped product has no float64.
    for name in ("float32", "float"):  # Norms and routers ask for it whatever the model's dtype.
        monkeypatch.setattr(torch, name, torch.float64)
    routing = StepRouting(4)
    for micro in split(batch, "padded"):
        with torch.no_grad(), record_routing(model) as record:
            predicting_hidden(model, micro)
        routing.store(micro, record)
    fractions = load_fractions(routing.counts(range(4)), routing.num_chosen)
    num_tokens = int(batch.mask.sum())

    def gradients(micros: Sequence[MicroBatch]) -> Iterator[Tensor]:
        model.zero_grad()
        for micro in micros:
            with record_routing(model) as record:
                predicting_hidden(model, micro)
            loss = router_losses(micro, record, fractions, z_coefficient=0.1).sum() / num_tokens
            loss.backward()
        yield from [p.grad.clone() for p in model.parameters() if p.grad is not None]

    whole = torch.cat([g.flatten() for g in gradients(split(batch, "padded"))])
    for layout in LAYOUTS:
        for max_rows in (1, 3, 4):
            other = torch.cat([g.flatten() for g in gradients(split(batch, layout, max_rows))])
            assert float((other - whole).norm() / whole.norm()) < 1e-12, (layout, max_rows)
    assert float(whole.norm()) > 1e-3


def test_counts_and_metrics_by_hand(tiny_decoder: Build) -> None:
    model, batch = decoder(tiny_decoder, "mixtral"), batch_of()
    counted = torch.zeros(2, 4, dtype=torch.float64)
    entropy = 0.0
    for row in range(4):
        ids = torch.tensor([[*batch.prompts[row], *batch.answers[row]]])
        logits = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
        for layer in range(2):
            for position in range(len(batch.prompts[row]) - 1, ids.shape[1] - 1):
                p = logits[layer][position].double().softmax(dim=0)
                for expert in p.topk(2).indices.tolist():
                    counted[layer, expert] += 1
                entropy -= float((p * p.log()).sum().detach())
    for layout in LAYOUTS:
        micros = split(batch, layout, 2)
        routing, _ = recorded(model, micros)
        assert torch.equal(routing.counts(range(4)), counted)
        assert torch.equal(routing.counts([0, 2]) + routing.counts([3, 1]), counted)
        assert torch.equal(routing.counts([]), torch.zeros(2, 4))
        sums = MetricSums()
        for micro in micros:
            with torch.no_grad(), record_routing(model) as record:
                logprobs(model, micro)
            add_routing_metrics(sums, micro, record)
        assert sums.means() == pytest.approx({"moe/router_entropy_nats": entropy / (2 * 15)}, rel=1e-5)
    assert float(counted.sum()) == 2 * 2 * 15
    assert load_metrics(torch.tensor([[6.0, 2.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])) == pytest.approx(
        {
            "moe/load_max_fraction": 0.75,
            "moe/load_entropy_nats": (math.log(4) - 0.75 * math.log(0.75) - 0.25 * math.log(0.25)) / 2,
            "moe/idle_expert_fraction": 0.25,
        }
    )


def test_replay_of_another_batch_is_refused(tiny_decoder: Build) -> None:
    model, batch = decoder(tiny_decoder, "mixtral"), batch_of()
    (micro,), (other,) = split(batch, "padded", rows=[0, 1]), split(batch, "padded", rows=[3])
    routing, _ = recorded(model, [micro])
    expected = r"recorded for \[24, 2\], this pass needs \[10, 2\]"
    with pytest.raises(ValueError, match=expected), replay_routing(model, routing.for_replay(micro)):
        logprobs(model, other)
    with pytest.raises(ValueError, match="answer 3 was not recorded"):
        routing.for_replay(other)
    (shared,) = split(batch, "shared_prompt", rows=[0, 1])
    with replay_routing(model, routing.for_replay(shared)):
        logprobs(model, shared)
        with pytest.raises(ValueError, match="2 calls of the decoder, and this is one more"):
            logprobs(model, shared)
    logprobs(model, other)  # Nothing is left behind.


@pytest.mark.parametrize(
    ("model_type", "reason"), [("deepseek_v3", "weighs its experts otherwise|whose output"), ("jamba", "no router")]
)
def test_other_routers_are_refused_by_name(tiny_decoder: Build, model_type: str, reason: str) -> None:
    changes: dict[str, Any] = {
        "deepseek_v3": {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
            "moe_intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": 8,
        },
        "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    }[model_type]  # fmt: skip
    model = tiny_decoder(model_type, **changes)
    assert is_moe(model)
    calls = [[torch.zeros(4, 2, dtype=torch.int64)] * 2]
    with pytest.raises(ConfigurationError, match=reason) as caught, replay_routing(model, calls):
        model.base_model(input_ids=torch.tensor([[5, 6, 7, 8]]), use_cache=False)
    assert type(model).__name__ in str(caught.value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_mixtures_are_saved_and_handed_over_as_in_their_checkpoint(
    tmp_path: Path, architecture: Architecture
) -> None:
    source = build_tiny_checkpoint(tmp_path / "tiny", seed=1, vocab_size=300, architecture=architecture)
    model = load_causal_lm(source)
    assert is_moe(model)
    assert is_moe(new_critic(source))
    assert all(float(router.weight.detach().std()) > 1e-3 for router in routers(model))  # type: ignore[operator]
    expected = revert_weight_conversion(model, dict(model.named_parameters()))
    held = checkpoint_tensors(model)
    assert set(held) == set(expected)
    assert all(torch.equal(held[name], expected[name]) for name in held)
    assert sum("experts.3." in name for name in held) == 2 * 3
    handed = merged_parameters(model)
    assert handed.names == list(held)
    assert all(tensor.data_ptr() == held[name].data_ptr() for name, tensor in handed)
    other = load_causal_lm(build_tiny_checkpoint(tmp_path / "other", seed=2, vocab_size=300, architecture=architecture))
    with torch.no_grad():
        for name, view in checkpoint_tensors(other).items():
            view.copy_(held[name])
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    save_causal_lm(other, source, tmp_path / "saved", torch.float32)
    assert file_digest(tmp_path / "saved/model.safetensors") == file_digest(source / "model.safetensors")
