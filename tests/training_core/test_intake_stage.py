"""The stage `sft_intake`: what is taken in, what is refused, and that the result is the same bytes every time."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from training_core.config.intake import IntakeConfig
from training_core.errors import ArtifactError, ConfigurationError, ServerUnreachableError
from training_core.models import hub
from training_core.models.loading import load_causal_lm, load_tokenizer
from training_core.models.source_files import check_source
from training_core.protocol.context import StageContext
from training_core.protocol.digests import path_digest, tree_digest, weights_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageOutcome, StageSpec
from training_core.stages import sft_intake

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def take_in(path: Path, config: IntakeConfig) -> StageOutcome:
    inputs = {n: Artifact(path=p, sha256=path_digest(Path(p))) for n, p in config.local_inputs().items()}
    spec = StageSpec(stage="sft_intake", stage_version=1, config=config.model_dump(mode="json"), inputs=inputs)
    directory = StageDirectory(path)
    directory.prepare(spec)
    return sft_intake.run(StageContext(spec, directory))


@pytest.fixture
def folder(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may spoil."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "source"))


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_good_folder_is_taken_in_as_it_is(folder: Path, tmp_path: Path) -> None:
    summary = take_in(tmp_path / "run", IntakeConfig(source=str(folder))).summary
    model = tmp_path / "run" / "outputs" / "model"
    assert summary["weights_sha256"] == weights_digest(folder) == weights_digest(model)
    assert summary["num_parameters"] == sum(p.numel() for p in load_causal_lm(folder).parameters())
    expected = {
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "eos_token_ids": [2],
        "pad_token_id": 3,
        "adjustments": [],
        "source_kind": "folder",
    }
    assert {key: summary[key] for key in expected} == expected
    assert {entry["name"] for entry in summary["source_files"]} == {p.name for p in folder.iterdir()}


def test_the_tokenizer_output_stands_alone_and_the_bytes_repeat(folder: Path, tmp_path: Path) -> None:
    take_in(tmp_path / "one", IntakeConfig(source=str(folder)))
    moved = Path(shutil.move(folder, tmp_path / "elsewhere"))
    take_in(tmp_path / "two", IntakeConfig(source=str(moved)))
    assert tree_digest(tmp_path / "one" / "outputs") == tree_digest(tmp_path / "two" / "outputs")
    tokenizer = tmp_path / "one" / "outputs" / "tokenizer"
    assert not list(tokenizer.glob("*.safetensors"))
    assert load_tokenizer(tokenizer).chat_template == load_tokenizer(moved).chat_template
    assert load_tokenizer(tokenizer).model_max_length == 512


def test_local_paths_are_inputs() -> None:
    both = IntakeConfig(source="a/b", chat_template="t.jinja")
    assert both.local_inputs() == {"source": "a/b", "chat_template": "t.jinja"}
    assert IntakeConfig(source="a").local_inputs() == {"source": "a"}
    assert IntakeConfig(source="hub:owner/name", revision=COMMIT).local_inputs() == {}


def test_dtype_bfloat16_converts_and_taking_in_twice_changes_nothing(folder: Path, tmp_path: Path) -> None:
    first = take_in(tmp_path / "one", IntakeConfig(source=str(folder), dtype="bfloat16")).summary
    assert first["dtype"] == "bfloat16"
    stored = tmp_path / "one" / "outputs" / "model"
    assert {value.dtype for value in load_file(stored / "model.safetensors").values()} == {torch.bfloat16}
    second = take_in(tmp_path / "two", IntakeConfig(source=str(stored))).summary
    assert second["dtype"] == "bfloat16"
    assert second["weights_sha256"] == first["weights_sha256"]
    third = take_in(tmp_path / "three", IntakeConfig(source=str(stored), dtype="float32")).summary
    assert third["dtype"] == "float32"


def test_sampling_settings_of_the_source_are_left_behind(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "generation_config.json", temperature=0.1, repetition_penalty=1.3)
    take_in(tmp_path / "run", IntakeConfig(source=str(folder)))
    stored = json.loads((tmp_path / "run" / "outputs" / "model" / "generation_config.json").read_text())
    assert stored == {"eos_token_id": 2, "pad_token_id": 3}


def test_pad_that_equals_eos_is_replaced_everywhere(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "tokenizer_config.json", pad_token="<|im_end|>")
    edit_json(folder / "config.json", pad_token_id=2)
    summary = take_in(tmp_path / "run", IntakeConfig(source=str(folder))).summary
    assert summary["pad_token_id"] == 3
    assert len(summary["adjustments"]) == 1
    assert "pad_token" in summary["adjustments"][0]
    model = tmp_path / "run" / "outputs" / "model"
    assert load_tokenizer(model).pad_token_id == 3
    assert load_causal_lm(model).config.pad_token_id == 3
    assert json.loads((model / "generation_config.json").read_text())["pad_token_id"] == 3


def test_the_token_that_ends_answers_becomes_eos(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    edit_json(folder / "generation_config.json", eos_token_id=[0, 2])
    summary = take_in(tmp_path / "run", IntakeConfig(source=str(folder))).summary
    assert summary["eos_token_ids"] == [2, 0]
    assert "eos_token '<|endoftext|>' -> '<|im_end|>'" in summary["adjustments"][0]
    assert load_tokenizer(tmp_path / "run" / "outputs" / "tokenizer").eos_token_id == 2


def test_a_template_file_takes_the_place_of_the_checkpoints(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ArtifactError, match=r"/source: the checkpoint has no chat template"):
        take_in(tmp_path / "none", IntakeConfig(source=str(folder)))
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    take_in(tmp_path / "run", IntakeConfig(source=str(folder), chat_template=str(template)))
    (tmp_path / "bad.jinja").write_text("{{ nothing")
    with pytest.raises(ArtifactError, match=r"with the template of checkpoint\.chat_template: .*does not render"):
        take_in(tmp_path / "bad", IntakeConfig(source=str(folder), chat_template=str(tmp_path / "bad.jinja")))
    assert load_tokenizer(tmp_path / "run" / "outputs" / "tokenizer").chat_template == template.read_text()


def pickled(folder: Path) -> None:
    torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def pickle_beside(folder: Path) -> None:
    torch.save({"x": torch.ones(1)}, folder / "extra.pt")


def cut_data(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def cut_to_nothing(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def overlapping_tensors(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)


def trailing_bytes(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as stream:
        stream.write(b"more")


def remote_code(folder: Path) -> None:
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_x.X"})


def remote_tokenizer_code(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tok.X", None]})


def missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def unknown_architecture(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="parrot")


def not_causal(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["LlamaForSequenceClassification"])


def quantised(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq"})


def nan_weight(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"][3] = float("nan")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def template_drops_answers(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def template_doubles_bos(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", bos_token="<|endoftext|>")
    text = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ bos_token }}" + text)


def template_changes_the_prompt(folder: Path) -> None:
    text = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("{{ messages | length }}" + text)


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def adapter(folder: Path) -> None:
    no_config(folder)
    (folder / "adapter_config.json").write_text("{}")


def folder_of_checkpoints(folder: Path) -> None:
    shutil.copytree(folder, folder / "checkpoint-500")
    no_config(folder)


def dangling_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/abc")


def lfs_pointer(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
    (folder / "model.safetensors").write_text(text)


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


def integer_weights(folder: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.int8)}, folder / "model.safetensors")


NEEDS_A_LIBRARY = (
    *(unknown_architecture, not_causal, nan_weight, no_tokenizer),
    *(template_drops_answers, template_doubles_bos, template_changes_the_prompt),
)
"""What is found only once transformers has read the files."""


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (empty, "is empty. A checkpoint folder needs config.json"),
        (adapter, "is a LoRA adapter, not a model. Merge it"),
        (folder_of_checkpoints, r"config\.json is missing\. Did you mean .*checkpoint-500\?"),
        (dangling_link, r"model\.safetensors is a link to \.\./\.\./blobs/abc, and that target is missing"),
        (lfs_pointer, r"model\.safetensors is Git LFS' stand-in .* `git lfs pull`"),
        (broken_config, "must hold a JSON object, found list"),
        (integer_weights, "stores its weights as I8"),
        (pickled, r"pytorch_model\.bin.*save_pretrained"),
        (pickle_beside, r"extra\.pt.*delete these files"),
        (cut_data, r"model\.safetensors is not a whole safetensors file: its tensors need"),
        (cut_header, "its header should have"),
        (cut_to_nothing, "less than a header length"),
        (overlapping_tensors, "does not fit its shape or place"),
        (trailing_bytes, "the file has"),
        (remote_code, r"config\.json has auto_map"),
        (remote_tokenizer_code, r"tokenizer_config\.json has auto_map"),
        (missing_shard, "lacks weight files that its index names"),
        (no_weights, r"has no model\.safetensors"),
        (no_config, r"config\.json is missing"),
        (unknown_architecture, "'parrot' is no causal language model"),
        (not_causal, "cannot be the SFT checkpoint"),
        (quantised, "packed weights cannot be trained"),
        (nan_weight, r"model\.norm\.weight holds NaN"),
        (no_tokenizer, "no tokenizer can be loaded"),
        (template_drops_answers, "does not render the assistant's words"),
        (template_doubles_bos, "two BOS tokens"),
        (template_changes_the_prompt, "renders the prompt differently"),
    ],
)
def test_refusals(folder: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(folder)
    with pytest.raises(ArtifactError, match=message) as caught:
        take_in(tmp_path / "run", IntakeConfig(source=str(folder)))
    if spoil not in NEEDS_A_LIBRARY:  # A plan says the same, with the same words.
        with pytest.raises(ArtifactError) as early:
            check_source(folder)
        assert str(early.value) == str(caught.value)
    assert not (tmp_path / "run" / "outputs" / "model" / "model.safetensors").exists()


def test_a_tokenizer_larger_than_the_embedding_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from training_core.models.tiny import build_tiny_checkpoint

    small = build_tiny_checkpoint(tmp_path / "small", vocab_size=300)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_checkpoint / name, small / name)
    with pytest.raises(ArtifactError, match="512 tokens, the model's embedding 300 rows"):
        take_in(tmp_path / "run", IntakeConfig(source=str(small)))


def test_sharded_weights_are_taken_in(folder: Path, tmp_path: Path) -> None:
    expected = weights_digest(folder)
    load_causal_lm(folder).save_pretrained(folder, max_shard_size="500KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert take_in(tmp_path / "run", IntakeConfig(source=str(folder))).summary["weights_sha256"] == expected


def test_a_file_that_is_no_checkpoint_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "weights.txt").write_text("no")
    with pytest.raises(ConfigurationError, match=r"neither a folder nor a \.gguf file"):
        take_in(tmp_path / "run", IntakeConfig(source=str(tmp_path / "weights.txt")))


def test_a_hub_source_offline_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="HF_HUB_OFFLINE is set"):
        take_in(tmp_path, IntakeConfig(source="hub:owner/name", revision=COMMIT))


def test_a_hub_source_is_fetched_and_checked(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(folder)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    config = IntakeConfig(source="hub:owner/name", revision=COMMIT)
    assert take_in(tmp_path / "run", config).summary["source_kind"] == "hub"
    assert (asked["repository"], asked["revision"]) == ("owner/name", COMMIT)
    assert "*.bin" not in asked["allow_patterns"]

    def no_network(repository: str, **options: Any) -> str:
        raise OSError("connection refused")

    monkeypatch.setattr(hub, "snapshot_download", no_network)
    with pytest.raises(ServerUnreachableError, match="connection refused"):
        take_in(tmp_path / "later", config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "hub:owner/name"}, "needs revision"),
        ({"source": "hub:owner/name", "revision": "main"}, "40 hex digits"),
        ({"source": "hub:name", "revision": COMMIT}, "owner/name"),
        ({"source": "a/folder", "revision": COMMIT}, "drop it for a path"),
        ({"source": ""}, "at least 1 character"),
        ({"source": "a", "dtype": "float16"}, "dtype"),
    ],
)
def test_impossible_configs_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        IntakeConfig.model_validate(values)
