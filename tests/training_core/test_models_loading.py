"""Load, save, tiny checkpoint, chat rendering."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from training_core.errors import ArtifactError
from training_core.models.loading import load_causal_lm, load_tokenizer, save_causal_lm
from training_core.models.tiny import build_tiny_checkpoint
from training_core.protocol.digests import tree_digest, weights_digest


def test_tiny_checkpoint_is_a_function_of_its_seed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    same, other = build_tiny_checkpoint(tmp_path / "same"), build_tiny_checkpoint(tmp_path / "other", seed=1)
    assert tree_digest(same) == tree_digest(tiny_checkpoint)
    assert weights_digest(other) != weights_digest(tiny_checkpoint)
    assert tree_digest(other, suffix="tokenizer.json") == tree_digest(tiny_checkpoint, suffix="tokenizer.json")


def test_building_a_tiny_checkpoint_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_tiny_checkpoint(tmp_path / "tiny")
    assert torch.equal(torch.rand(3), expected)


def test_tiny_tokenizer_has_distinct_special_tokens(tiny_checkpoint: Path) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) == 512
    text = "Ça va, 日本? 🙂"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize(("sizes", "word"), [({"vocab_size": 100}, "260"), ({"hidden_size": 64}, "multiple of 128")])
def test_tiny_refuses_impossible_sizes(tmp_path: Path, sizes: dict[str, int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        build_tiny_checkpoint(tmp_path / "tiny", **sizes)  # type: ignore[arg-type]


def test_saving_what_was_loaded_gives_the_same_bytes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = load_causal_lm(tiny_checkpoint)
    save_causal_lm(model, tiny_checkpoint, tmp_path / "copy", torch.float32)
    assert tree_digest(tmp_path / "copy") == tree_digest(tiny_checkpoint)


def test_saving_in_bfloat16_halves_the_file_and_leaves_the_model(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = load_causal_lm(tiny_checkpoint)
    save_causal_lm(model, tiny_checkpoint, tmp_path / "half", torch.bfloat16)
    sizes = [(p / "model.safetensors").stat().st_size for p in (tmp_path / "half", tiny_checkpoint)]
    assert sizes[0] < 0.55 * sizes[1]
    assert model.dtype == torch.float32
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    again = load_causal_lm(tmp_path / "half")
    for (name, before), after in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(before.bfloat16().float(), after), name


def test_loading_refuses_weights_that_do_not_fit(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "broken")
    file = tmp_path / "broken" / "model.safetensors"
    state = load_file(file)
    del state["model.norm.weight"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"missing keys: model\.norm\.weight"):
        load_causal_lm(tmp_path / "broken")


def test_loading_from_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no causal language model"):
        load_causal_lm(tmp_path)
    with pytest.raises(ArtifactError, match=r"needs tokenizer\.json"):
        load_tokenizer(tmp_path)
