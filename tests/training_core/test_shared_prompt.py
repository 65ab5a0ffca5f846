"""Which models may share a prompt's forward pass, and that no other one does: sliding windows, recurrent layers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from training_core.config.algorithms import GrpoConfig
from training_core.errors import ConfigurationError
from training_core.models.layers import has_only_full_attention, has_recurrent_layers
from training_core.ops.masking import lengths_to_mask
from training_core.rl import layouts
from training_core.rl.forward import Precision, answer_logprobs, frozen_copy
from training_core.rl.shared_prompt import SharedPromptBatch
from training_core.rl.stage import build_optimizer, build_reference, warn_of_approximations
from training_core.rl.update import PolicyUpdater, Surroundings
from training_core.rollout.batch import TrajectoryBatch

Build = Callable[..., PreTrainedModel]
SLIDING = {"mistral": {"sliding_window": 8}, "gemma2": {"sliding_window": 8}, "gemma3_text": {"sliding_window": 8}}
RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
}


def updater_of(model: PreTrainedModel, **changes: Any) -> PolicyUpdater:
    fields: dict[str, Any] = {"name": "grpo", "num_steps": 1, "optimizer": {"learning_rate": 1e-3}, "autocast": "none"}
    config = GrpoConfig.model_validate({**fields, **changes})
    reference = build_reference(config, model)
    around = Surroundings(temperature=1.0, pad_token_id=0, seed=1, should_stop=lambda: False, max_new_tokens=8)
    return PolicyUpdater(config, model, reference, build_optimizer(config, model), around)


def uneven_batch() -> TrajectoryBatch:
    """Two answers each to a prompt of 24 and a prompt of 10 tokens; the first is longer than any window here."""
    generator = torch.Generator().manual_seed(0)

    def ids(num_tokens: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 96, (num_tokens,), generator=generator).tolist())

    long, short = ids(24), ids(10)
    lengths = [6, 4, 6, 3]
    mask = lengths_to_mask(torch.tensor(lengths), max(lengths))
    return TrajectoryBatch([long, long, short, short], [ids(n) for n in lengths], mask, torch.zeros(mask.shape))


@torch.no_grad()
def worst_difference(updater: PolicyUpdater, batch: TrajectoryBatch) -> float:
    """Return how far log-probs are from those of each answer alone, by the model's own logits."""
    worst = 0.0
    for micro in updater.split(batch, range(len(batch))):
        found = updater.forward(updater.policy, micro)[0]
        for index, row in enumerate(micro.rows.tolist()):
            prompt, answer = batch.prompts[row], batch.answers[row]
            logits = updater.policy(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
            logprobs = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
            expected = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
            worst = max(worst, float((found[index, : len(answer)] - expected).abs().max()))
    return worst


@pytest.mark.parametrize("model_type", [*SLIDING, *RECURRENT])
def test_other_layers_than_full_attention_do_not_share_prompts(tiny_decoder: Build, model_type: str) -> None:
    model = tiny_decoder(model_type, **{**SLIDING, **RECURRENT}[model_type])
    assert not has_only_full_attention(model)
    assert has_recurrent_layers(model) == (model_type in RECURRENT)
    updater = updater_of(model)
    assert worst_difference(updater, uneven_batch()) < 1e-4
    updater.check_model_once(uneven_batch())


def test_a_state_outside_the_cache_is_known_too(tiny_decoder: Build) -> None:
    model = tiny_decoder("recurrent_gemma", attention_window_size=512)
    assert has_recurrent_layers(model)
    assert not has_only_full_attention(model)


@pytest.mark.parametrize(
    ("model_type", "changes"), [("llama", {}), ("qwen2", {}), ("mistral", {"sliding_window": None}), ("gpt2", {})]
)
def test_full_attention_shares_prompts(tiny_decoder: Build, model_type: str, changes: dict[str, Any]) -> None:
    updater = updater_of(tiny_decoder(model_type, **changes))
    batch = uneven_batch()
    assert all(isinstance(micro, SharedPromptBatch) for micro in updater.split(batch, range(4)))
    assert worst_difference(updater, batch) < 1e-5
    updater.check_model_once(batch)


def test_the_first_batch_shows_a_model_that_cannot_share(tiny_decoder: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its config says of its layers: answers to the longest and the shortest prompt are compared."""
    monkeypatch.setattr(layouts, "has_only_full_attention", lambda model: True)
    updater = updater_of(tiny_decoder("mistral", sliding_window=8), micro_batch_size=1)
    with pytest.raises(ConfigurationError, match="layout: padded"):
        updater.check_model_once(uneven_batch())


def test_no_setting_is_said_to_help_with_a_soft_cap(tiny_decoder: Build) -> None:
    model = tiny_decoder("gemma2", sliding_window=8)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(12.0)
    with pytest.raises(ConfigurationError, match="soft cap") as caught:
        updater_of(model).check_model_once(uneven_batch())
    assert "layout" not in str(caught.value)


def test_approximations_are_said_in_the_log(tiny_decoder: Build, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    forward = {"placement": "loss", "coefficient": 0.1, "estimator": "k3", "objective": "forward"}
    warn_of_approximations(updater_of(tiny_decoder("llama"), kl=forward).config)
    updater_of(tiny_decoder("mistral", sliding_window=8))
    assert caplog.messages == []
    updater_of(tiny_decoder("mistral", sliding_window=8), layout="shared_prompt")
    warn_of_approximations(updater_of(tiny_decoder("llama"), kl=forward, num_epochs=2).config)
    assert ["shared_prompt is left off" in message for message in caplog.messages] == [True, False]
    assert "2 updates a rollout" in caplog.messages[1]


@pytest.mark.parametrize("tied", [True, False])
def test_the_reference_is_narrow_and_computes_the_same_bits(tiny_decoder: Build, tied: bool) -> None:
    model = tiny_decoder("llama", tie_word_embeddings=tied)
    precision = Precision("bfloat16", torch.device("cpu"))
    reference = frozen_copy(model, precision)
    dtypes = {name: parameter.dtype for name, parameter in reference.named_parameters()}
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert {dtypes["model.embed_tokens.weight"], dtypes["model.norm.weight"]} == {torch.float32}
    assert (reference.lm_head.weight is reference.model.embed_tokens.weight) == tied
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    updater = updater_of(model)
    (micro,) = updater.split(uneven_batch(), range(4))
    with torch.no_grad():
        plain = answer_logprobs(model, micro, 1.0, precision)[0]
        assert torch.equal(answer_logprobs(reference, micro, 1.0, precision)[0], plain)
        for parameter in model.parameters():
            parameter.mul_(1.5)
        assert torch.equal(answer_logprobs(reference, micro, 1.0, precision)[0], plain)


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_no_weight_is_copied_wider_than_the_reference_keeps_it(
    tiny_decoder: Build, monkeypatch: pytest.MonkeyPatch, autocast: str
) -> None:
    copied: list[tuple[torch.Size, torch.dtype]] = []
    original = torch.nn.Parameter.__deepcopy__

    def spy(parameter: Any, memo: Any) -> Any:
        if id(parameter) not in memo:
            copied.append((parameter.shape, parameter.dtype))
        return original(parameter, memo)

    monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", spy)
    model = tiny_decoder("llama")
    kl = {"placement": "none", "measure": True}
    reference = updater_of(model, kl=kl, autocast=autocast).reference
    assert reference is not None
    linear = {module.weight.shape for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)}
    assert linear
    assert not linear & {shape for shape, _ in copied}
