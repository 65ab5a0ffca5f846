"""Adapters: exact at the start, the checkpoint as reference, merged weights that reach engine and file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from training_core.config.lora import LoraConfig
from training_core.config.optimizer import OptimizerConfig
from training_core.config.rollout import TransformersRolloutConfig
from training_core.engines.single import SingleProcessEngine, group_of
from training_core.errors import ConfigurationError
from training_core.models.critic import new_critic
from training_core.models.heads import load_reward_model, new_reward_model, save_reward_model
from training_core.models.loading import load_causal_lm, save_causal_lm
from training_core.models.lora import (
    adapted_layers,
    attach_lora,
    is_lora,
    merged_parameters,
    merged_weight,
    reference_pass,
)
from training_core.models.tiny import build_tiny_checkpoint
from training_core.protocol.digests import file_digest
from training_core.rollout.base import RolloutRequest, SamplingSettings, hand_over_weights
from training_core.rollout.transformers import TransformersEngine

SEVEN_IN_EACH_OF_TWO_LAYERS = 14
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1, vocab_size=300)


def adapted(checkpoint: Path, seed: int = 3, **changes: Any) -> PreTrainedModel:
    return attach_lora(load_causal_lm(checkpoint), LoraConfig(rank=4, **changes), seed)


def logprobs(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=IDS, use_cache=False).logits, dim=-1)


def train_once(model: torch.nn.Module, loss: Callable[[], torch.Tensor], name: str = "policy") -> SingleProcessEngine:
    config = OptimizerConfig(learning_rate=1e-2)
    engine = SingleProcessEngine([group_of(name, model, 1e-2)], config, num_steps=4)
    for step in (1, 2):  # The first step moves B alone: with B = 0 the gradient of A is 0.
        loss().backward()
        engine.step(step)
    return engine


def policy_loss(model: PreTrainedModel) -> Callable[[], torch.Tensor]:
    return lambda: model(input_ids=IDS, use_cache=False).logits.square().mean()


def test_at_the_start_nothing_has_changed_to_the_bit(checkpoint: Path) -> None:
    plain, model = load_causal_lm(checkpoint), adapted(checkpoint)
    before = logprobs(model)
    assert torch.equal(before, logprobs(plain))
    with reference_pass(model):
        assert torch.equal(logprobs(model), before)
    merged, expected = dict(merged_parameters(model)), dict(plain.named_parameters())
    assert list(merged) == list(expected)
    assert all(torch.equal(merged[name].view(torch.int32), expected[name].view(torch.int32)) for name in expected)


def test_merging_keeps_the_sign_of_zero(checkpoint: Path) -> None:
    model = adapted(checkpoint)
    layer = adapted_layers(model)[0][1]
    with torch.no_grad():
        layer.get_base_layer().weight[0, :3] = -0.0
    assert torch.signbit(merged_weight(layer)[0, :3]).all()


def test_only_adapters_are_trained(checkpoint: Path) -> None:
    model = adapted(checkpoint)
    group = group_of("policy", model, 1e-3)
    assert len(group.parameters) == 2 * SEVEN_IN_EACH_OF_TWO_LAYERS
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in group.parameters.items())
    before = {name: value.clone() for name, value in load_causal_lm(checkpoint).named_parameters()}
    train_once(model, policy_loss(model))
    after = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if "lora_" not in name}
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not torch.equal(logprobs(model), logprobs(load_causal_lm(checkpoint)))


def test_the_start_depends_on_the_seed_alone(checkpoint: Path) -> None:
    def weights(seed: int, **changes: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed + 100)
        state = torch.get_rng_state()
        model = adapted(checkpoint, seed, **changes)
        assert torch.equal(torch.get_rng_state(), state)
        return {name: layer.lora_A["default"].weight.detach() for name, layer in adapted_layers(model)}

    first, again, other = weights(3), weights(3), weights(4)
    fewer = weights(3, target_modules=["q_proj"])
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert len(fewer) == 2
    assert all(torch.equal(first[name], fewer[name]) for name in fewer)
    assert all(float(a.abs().max()) <= a.shape[1] ** -0.5 for a in first.values())
    assert len({tuple(a[0, :3].tolist()) for a in first.values()}) == SEVEN_IN_EACH_OF_TWO_LAYERS


def test_the_reference_stays_the_checkpoint_within_a_training_pass(checkpoint: Path) -> None:
    plain, model = load_causal_lm(checkpoint), adapted(checkpoint)
    train_once(model, policy_loss(model))
    gradients = []
    for with_reference in (False, True):
        loss = policy_loss(model)()
        if with_reference:
            with reference_pass(model):
                assert torch.equal(logprobs(model), logprobs(plain))
                assert not torch.is_grad_enabled()
        loss.backward()
        gradients.append([p.grad.clone() for p in group_of("policy", model, 1.0).parameters.values()])
        model.zero_grad()
    assert len(gradients[0]) == 2 * SEVEN_IN_EACH_OF_TWO_LAYERS
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_reference_comes_back_after_an_error(checkpoint: Path) -> None:
    model = adapted(checkpoint)
    train_once(model, policy_loss(model))
    trained = logprobs(model)
    with pytest.raises(RuntimeError, match="stop"), reference_pass(model):
        raise RuntimeError("stop")
    assert torch.equal(logprobs(model), trained)
    with pytest.raises(ValueError, match="no reference"), reference_pass(load_causal_lm(checkpoint)):
        pass


@pytest.mark.parametrize(("rank_stabilised", "scale"), [(False, 8.0), (True, 16.0)])
def test_the_strength_is_as_configured(checkpoint: Path, rank_stabilised: bool, scale: float) -> None:
    model = adapted(checkpoint, alpha=32.0, rank_stabilised=rank_stabilised)
    layer = adapted_layers(model)[0][1]
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(0.01)
    change = merged_weight(layer) - layer.get_base_layer().weight
    expected = scale * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert torch.allclose(change, expected, atol=1e-7)
    assert LoraConfig(rank=4, alpha=32.0, rank_stabilised=rank_stabilised).scale == scale


def test_the_saved_model_is_the_trained_one(checkpoint: Path, tmp_path: Path) -> None:
    model = adapted(checkpoint)
    save_causal_lm(model, checkpoint, tmp_path / "start", torch.float32)
    plain = load_causal_lm(checkpoint)
    save_causal_lm(plain, checkpoint, tmp_path / "plain", torch.float32)
    assert file_digest(tmp_path / "start/model.safetensors") == file_digest(tmp_path / "plain/model.safetensors")
    train_once(model, policy_loss(model))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.5)):
        out = tmp_path / str(dtype)
        save_causal_lm(model, checkpoint, out, dtype)
        assert not list(out.glob("adapter*"))
        loaded = load_causal_lm(out)
        assert not is_lora(loaded)
        assert float((logprobs(loaded) - logprobs(model)).abs().max()) < tolerance
        assert not torch.allclose(logprobs(loaded), logprobs(plain), atol=1e-2)


def test_an_engine_samples_with_the_merged_weights(checkpoint: Path) -> None:
    """Fault 32: a training whose adapters never reach the engine."""
    limits: dict[str, Any] = {"max_prompt_tokens": 4, "max_new_tokens": 6, "eos_token_ids": [2]}
    config = TransformersRolloutConfig(engine="transformers", dtype="float32", max_new_tokens=6)
    engine = TransformersEngine(config, checkpoint, **limits)
    requests = [RolloutRequest(f"p{i}", 0, (5, 6, 7 + i), seed=i) for i in range(4)]
    sampling = SamplingSettings(6)
    start = [(r.token_ids, r.logprobs) for r in engine.generate(requests, sampling)]
    model = adapted(checkpoint)
    tensors = merged_parameters(model)
    first = hand_over_weights(engine, tensors, version=0)
    assert [(r.token_ids, r.logprobs) for r in engine.generate(requests, sampling)] == start
    train_once(model, policy_loss(model))
    second = hand_over_weights(engine, tensors, version=1)
    assert second.num_changed_tensors == len(adapted_layers(model)) == SEVEN_IN_EACH_OF_TWO_LAYERS
    assert second.num_tensors == first.num_tensors == len(tensors)
    assert second.sha256 != first.sha256
    assert [(r.token_ids, r.logprobs) for r in engine.generate(requests, sampling)] != start
    assert float((logprobs(engine.model) - logprobs(model)).abs().max()) < 1e-5


def test_merged_weights_exist_one_at_a_time(checkpoint: Path) -> None:
    model = adapted(checkpoint)
    tensors = merged_parameters(model)
    names = tensors.adapted_names
    assert len(names) == SEVEN_IN_EACH_OF_TWO_LAYERS
    assert set(names) < set(tensors.names)
    assert all(name in dict(load_causal_lm(checkpoint).named_parameters()) for name in tensors.names)
    index = tensors.names.index(names[0])
    assert tensors[index][1].data_ptr() != tensors[index][1].data_ptr()  # Made anew, kept nowhere.
    assert [name for name, _ in tensors[:2]] == tensors.names[:2]
    untouched = next(i for i, name in enumerate(tensors.names) if name not in names)
    assert tensors[untouched][1].data_ptr() == tensors[untouched][1].data_ptr()
    plain = merged_parameters(load_causal_lm(checkpoint))
    assert plain.names == tensors.names
    assert plain.adapted_names == []


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "query"])
def test_other_targets_are_refused_with_those_there_are(checkpoint: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"names {name}.*q_proj, k_proj"):
        adapted(checkpoint, target_modules=["q_proj", name])


def test_a_head_of_its_own_is_left_alone(tiny_decoder: Callable[..., Any]) -> None:
    model = attach_lora(tiny_decoder("llama", tie_word_embeddings=False), LoraConfig(rank=2), 1)
    assert not model.lm_head.weight.requires_grad
    assert not any("lm_head" in name for name, _ in adapted_layers(model))
    assert len(adapted_layers(model)) == SEVEN_IN_EACH_OF_TWO_LAYERS


def test_layers_with_a_transposed_weight_merge_too(tiny_decoder: Callable[..., Any]) -> None:
    model = attach_lora(tiny_decoder("gpt2"), LoraConfig(rank=2, target_modules=["c_attn"]), 1)
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            layer.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(1))
    plain = tiny_decoder("gpt2")
    with torch.no_grad():
        held = dict(plain.named_parameters())
        for name, tensor in merged_parameters(model):
            held[name].copy_(tensor)
    assert float((logprobs(plain) - logprobs(model)).abs().max()) < 1e-5
    assert float((logprobs(tiny_decoder("gpt2")) - logprobs(model)).abs().max()) > 1e-3


def test_training_continues_to_the_same_bits(checkpoint: Path, tmp_path: Path) -> None:
    model = adapted(checkpoint)
    engine = train_once(model, policy_loss(model))
    engine.save(tmp_path, 2)
    other = adapted(checkpoint)
    resumed = SingleProcessEngine([group_of("policy", other, 1e-2)], engine.config, num_steps=4)
    assert resumed.load(tmp_path) == 2
    assert torch.equal(logprobs(other), logprobs(model))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "engine.json", "exp_avg.safetensors", "exp_avg_sq.safetensors", "weights.safetensors",
    ]  # fmt: skip
    assert (tmp_path / "weights.safetensors").stat().st_size < (checkpoint / "model.safetensors").stat().st_size / 4
    for trained, trainer in ((model, engine), (other, resumed)):
        policy_loss(trained)().backward()
        trainer.step(3)
    assert torch.equal(logprobs(other), logprobs(model))


def test_reward_model_with_adapters(checkpoint: Path, tmp_path: Path) -> None:
    model = attach_lora(new_reward_model(checkpoint, seed=1), LoraConfig(rank=4), 3)
    mask = torch.ones_like(IDS, dtype=torch.bool)
    assert model.head.weight.requires_grad
    assert len(group_of("reward", model, 1.0).parameters) == 2 * SEVEN_IN_EACH_OF_TWO_LAYERS + 1
    train_once(model, lambda: (model(IDS, mask) - 3.0).square().mean(), "reward")
    save_reward_model(model, checkpoint, tmp_path, {})
    loaded = load_reward_model(tmp_path)
    with torch.no_grad():
        assert torch.allclose(loaded(IDS, mask), model(IDS, mask), atol=1e-5)
        assert not torch.allclose(loaded(IDS, mask), new_reward_model(checkpoint, seed=1)(IDS, mask), atol=1e-2)


def test_critic_with_adapters(checkpoint: Path) -> None:
    critic = attach_lora(new_critic(checkpoint), LoraConfig(rank=4), 3)
    trainable = group_of("critic", critic, 1.0).parameters
    assert len(trainable) == 2 * SEVEN_IN_EACH_OF_TWO_LAYERS + 2
    hidden = critic.backbone(input_ids=IDS, use_cache=False).last_hidden_state
    assert torch.equal(critic.read(hidden), torch.zeros(IDS.shape))


def test_adapters_twice_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="already"):
        attach_lora(adapted(checkpoint), LoraConfig(), 1)


@pytest.mark.parametrize(
    "change",
    [{"rank": 0}, {"alpha": 0.0}, {"target_modules": []}, {"target_modules": ["a", "a"]}, {"dropout": 0.1}],
)
def test_impossible_settings_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LoraConfig.model_validate(change)
