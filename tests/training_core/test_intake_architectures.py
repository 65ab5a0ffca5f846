"""The stage `sft_intake` on other architectures than Llama: what later stages cannot use is refused here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from training_core.config.intake import IntakeConfig
from training_core.errors import ArtifactError
from training_core.models.tiny import build_tiny_tokenizer
from training_core.protocol.context import StageContext
from training_core.protocol.digests import path_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageSpec
from training_core.stages import sft_intake

Save = Callable[[PreTrainedModel], Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Write a model and the tiny tokenizer to a folder; return the folder."""

    def write(model: PreTrainedModel) -> Path:
        folder = tmp_path / "source"
        model.save_pretrained(folder)
        build_tiny_tokenizer().save_pretrained(folder)
        return folder

    return write


@pytest.fixture
def sizes() -> dict[str, Any]:
    tokenizer = build_tiny_tokenizer()
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def take_in(path: Path, source: Path) -> dict[str, Any]:
    config = IntakeConfig(source=str(source))
    inputs = {"source": Artifact(path=str(source), sha256=path_digest(source))}
    spec = StageSpec(stage="sft_intake", stage_version=1, config=config.model_dump(mode="json"), inputs=inputs)
    directory = StageDirectory(path)
    directory.prepare(spec)
    return sft_intake.run(StageContext(spec, directory)).summary


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("gemma2", {}), ("granite", {"logits_scaling": 8.0, "tie_word_embeddings": False})],
)
def test_logits_that_are_not_hidden_states_times_head_are_refused(
    tiny_decoder: Callable[..., Any],
    save: Save,
    sizes: dict[str, Any],
    tmp_path: Path,
    model_type: str,
    changes: dict[str, Any],
) -> None:
    model = tiny_decoder(model_type, **sizes, **changes)
    with torch.no_grad():  # Logits of a usual size, where a soft cap and a scale tell.
        model.get_output_embeddings().weight.mul_(12.0)
    with pytest.raises(ArtifactError, match=r"off by .* without a soft cap, scale or bias") as caught:
        take_in(tmp_path / "run", save(model))
    assert "such as llama, mistral or qwen2" in str(caught.value)


def test_a_decoder_that_is_not_apart_from_its_head_is_refused(
    tiny_decoder: Callable[..., Any], save: Save, sizes: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_decoder("llama4_text", **sizes, num_local_experts=2, intermediate_size_mlp=96)
    with pytest.raises(ArtifactError, match="no decoder and output head apart from each other"):
        take_in(tmp_path / "run", save(model))


def test_a_model_that_wraps_a_language_model_is_refused_before_it_is_loaded(
    save: Save, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {**sizes, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "head_dim": 16, "model_type": "gemma3_text"}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3", text_config=text, vision_config=vision))
    folder = save(model)
    monkeypatch.setattr(sft_intake, "load_causal_lm", None)
    with pytest.raises(ArtifactError, match="gemma3 has no vocab_size and no max_position_embeddings of its own"):
        take_in(tmp_path / "run", folder)


def test_sizes_may_have_the_names_of_the_architecture(
    tiny_decoder: Callable[..., Any], save: Save, sizes: dict[str, Any], tmp_path: Path
) -> None:
    folder = save(tiny_decoder("gpt2", **sizes, n_positions=256))
    content = json.loads((folder / "config.json").read_text())
    content.pop("max_position_embeddings", None)
    (folder / "config.json").write_text(json.dumps(content))
    summary = take_in(tmp_path / "run", folder)
    assert (summary["architecture"], summary["max_position_embeddings"]) == ("GPT2LMHeadModel", 256)
    assert summary["vocab_size"] == sizes["vocab_size"]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("mistral", {"sliding_window": 8}), ("lfm2", {"layer_types": ["conv", "full_attention"]})],
)
def test_sliding_windows_and_recurrent_layers_are_taken_in(
    tiny_decoder: Callable[..., Any],
    save: Save,
    sizes: dict[str, Any],
    tmp_path: Path,
    model_type: str,
    changes: dict[str, Any],
) -> None:
    model = tiny_decoder(model_type, **sizes, **changes)
    assert take_in(tmp_path / "run", save(model))["architecture"] == type(model).__name__
