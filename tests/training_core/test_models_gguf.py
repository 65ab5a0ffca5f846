"""GGUF files: a tiny one written here, and the real one where it lies in .models/."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType

from training_core.config.intake import IntakeConfig
from training_core.errors import ArtifactError
from training_core.models.chat import encode_conversation
from training_core.models.gguf import load_gguf
from training_core.models.gguf_file import PACKINGS, check_gguf, is_gguf
from training_core.models.loading import load_causal_lm, load_tokenizer
from training_core.protocol.context import StageContext
from training_core.protocol.digests import path_digest, tree_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageOutcome, StageSpec
from training_core.stages import sft_intake

REAL_FILES = sorted((Path(__file__).resolve().parents[2] / ".models").rglob("*.gguf"))


def reorder_for_rope(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return query or key rows in the order that GGUF keeps them in (pairs next to each other)."""
    rows, columns = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_tiny_gguf(checkpoint: Path, path: Path, packing: GGMLQuantizationType) -> Path:
    """Write the tiny checkpoint as llama.cpp would: its metadata, its tensor names, matrices packed."""
    model, tokenizer = load_causal_lm(checkpoint), load_tokenizer(checkpoint)
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    write_vocabulary(writer, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if "q_proj" in name:
            value = reorder_for_rope(value, config.num_attention_heads)
        if "k_proj" in name:
            value = reorder_for_rope(value, config.num_key_value_heads)
        kind = packing if value.ndim == 2 else GGMLQuantizationType.F32
        data = gguf.quants.quantize(value.numpy(), kind)
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None, name
        writer.add_tensor(target, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_vocabulary(writer: gguf.GGUFWriter, tokenizer) -> None:  # type: ignore[no-untyped-def]
    import json

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 4 else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in content["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(tokenizer.chat_template)


def take_in(path: Path, source: Path, **options: str) -> StageOutcome:
    config = IntakeConfig(source=str(source), **options)  # type: ignore[arg-type]
    inputs = {"source": Artifact(path=str(source), sha256=path_digest(source))}
    spec = StageSpec(stage="sft_intake", stage_version=1, config=config.model_dump(mode="json"), inputs=inputs)
    directory = StageDirectory(path)
    directory.prepare(spec)
    return sft_intake.run(StageContext(spec, directory))


@pytest.fixture(scope="module")
def plain(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tiny_checkpoint, tmp_path_factory.mktemp("gguf") / "t.gguf", GGMLQuantizationType.F32)


@pytest.fixture(scope="module")
def packed(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tiny_checkpoint, tmp_path_factory.mktemp("gguf") / "t.gguf", GGMLQuantizationType.Q8_0)


def test_unpacked_weights_come_back_exactly(plain: Path, tiny_checkpoint: Path) -> None:
    model, tokenizer = load_gguf(plain)
    expected = load_causal_lm(tiny_checkpoint)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    ours = load_tokenizer(tiny_checkpoint)
    prompt, answer = [{"role": "user", "content": "Hi 12°"}], [{"role": "assistant", "content": "The sea is warm."}]
    assert encode_conversation(tokenizer, prompt, answer) == encode_conversation(ours, prompt, answer)


def test_packed_weights_are_taken_in_as_bfloat16_safetensors(
    packed: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    summary = take_in(tmp_path / "one", packed).summary
    assert (summary["source_kind"], summary["dtype"], summary["pad_token_id"]) == ("gguf", "bfloat16", 3)
    assert summary["source_files"][0]["name"] == "t.gguf"
    assert any("pad_token" in sentence for sentence in summary["adjustments"])
    stored = load_causal_lm(tmp_path / "one" / "outputs" / "model")
    exact = load_causal_lm(tiny_checkpoint)
    ids = torch.tensor([[1, 50, 60, 70, 2]])
    with torch.no_grad():
        assert torch.allclose(stored(input_ids=ids).logits, exact(input_ids=ids).logits, atol=0.02)
    take_in(tmp_path / "two", packed)
    assert tree_digest(tmp_path / "one" / "outputs") == tree_digest(tmp_path / "two" / "outputs")
    assert "quantization_config" not in (tmp_path / "one" / "outputs" / "model" / "config.json").read_text()


def test_float32_may_be_asked_for(packed: Path, tmp_path: Path) -> None:
    assert take_in(tmp_path, packed, dtype="float32").summary["dtype"] == "float32"


@pytest.mark.parametrize(
    ("keep", "message"),
    [(3, "no GGUF file"), (20, "needs more than the 20 bytes"), (2000, "needs more than the 2000 bytes")],
)
def test_damaged_files_are_refused(packed: Path, tmp_path: Path, keep: int, message: str) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(packed.read_bytes()[:keep])
    assert is_gguf(file)
    with pytest.raises(ArtifactError, match=message):
        take_in(tmp_path / "run", file)


def test_a_file_cut_within_its_tensors_is_refused(packed: Path, tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(packed.read_bytes()[:-5000])
    with pytest.raises(ArtifactError, match=r"its tensors end at byte \d+, the file has \d+ bytes\. Copy or download"):
        take_in(tmp_path / "run", file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty. Copy or download it again"),
        (b"\x10\0\0\0\0\0\0\0{", "it looks like a safetensors file. Name the folder that holds it"),
        (b"PK\x03\x04", "it looks like pickled weights"),
        (b"tjgg", "the format that came before GGUF"),
        (b"<!DOCTYPE html>", "it looks like a web page"),
        (b"version https://git-lfs.github.com/spec/v1", "Fetch it with `git lfs pull`"),
        (b"parrot", "it starts with b'parr', not with GGUF"),
    ],
)
def test_files_of_another_kind_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        check_gguf(file)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)


def change(packed: Path, tmp_path: Path, place: int, value: bytes) -> Path:
    """Return a copy of the file with other bytes at one place."""
    content = bytearray(packed.read_bytes())
    content[place : place + len(value)] = value
    (tmp_path / "changed.gguf").write_bytes(content)
    return tmp_path / "changed.gguf"


@pytest.mark.parametrize(("number", "name"), [(15, "Q8_K"), (99, "number 99")])
def test_a_packing_that_cannot_be_undone_is_named(packed: Path, tmp_path: Path, number: int, name: str) -> None:
    tensor = b"blk.0.attn_q.weight"
    place = packed.read_bytes().index(tensor) + len(tensor) + 4 + 2 * 8  # After the number of dimensions, and two.
    with pytest.raises(ArtifactError, match=rf"{tensor.decode()} is packed as {name}, which cannot be unpacked"):
        check_gguf(change(packed, tmp_path, place, number.to_bytes(4, "little")))


def test_versions_and_nonsense_in_the_header(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="of version 1; allowed: 2, 3"):
        check_gguf(change(packed, tmp_path, 4, b"\x01\0\0\0"))
    kind = packed.read_bytes().index(b"general.architecture") + len(b"general.architecture")
    with pytest.raises(ArtifactError, match=r"its header is malformed at byte \d+ \(a value of type 77\)"):
        check_gguf(change(packed, tmp_path, kind, b"\x4d\0\0\0"))


def write_small(path: Path, architecture: str = "llama", parts: int = 1, tensors: bool = True) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_uint16("split.count", parts)
    if tensors:
        writer.add_tensor("token_embd.weight", torch.zeros(2, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_parts_vocabularies_and_unknown_architectures(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"one part of 3\. Join them with `llama-gguf-split --merge`"):
        check_gguf(write_small(tmp_path / "part.gguf", parts=3))
    with pytest.raises(ArtifactError, match="a vocabulary, not a model"):
        check_gguf(write_small(tmp_path / "vocabulary.gguf", tensors=False))
    unknown = write_small(tmp_path / "parrot.gguf", architecture="parrot")
    assert check_gguf(unknown).architecture == "parrot"
    with pytest.raises(ArtifactError, match=r"architecture parrot\) cannot be read .* its architecture or metadata"):
        load_gguf(unknown)


def test_the_allowed_packings_are_those_that_can_be_undone() -> None:
    possible = set()
    for kind in GGMLQuantizationType:
        plain = {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}.get(kind)
        block = torch.zeros(1, gguf.GGML_QUANT_SIZES[kind][1], dtype=torch.uint8).numpy()
        try:
            gguf.quants.dequantize(block.view(plain) if plain else block, kind)
        except NotImplementedError:
            continue
        possible.add(kind.name)
    assert possible == set(PACKINGS)


@pytest.mark.slow
@pytest.mark.skipif(not REAL_FILES, reason="no .gguf below .models/; `make demo` fetches one")
def test_the_demo_checkpoint_is_taken_in(tmp_path: Path) -> None:
    summary = take_in(tmp_path, REAL_FILES[0]).summary
    assert summary["architecture"] == "LlamaForCausalLM"
    assert summary["num_parameters"] == 134_515_008
    assert summary["pad_token_id"] not in summary["eos_token_ids"]
