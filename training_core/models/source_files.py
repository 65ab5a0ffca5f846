"""What a checkpoint may be: a folder of whole safetensors files and JSON, no pickles, no code; or a whole GGUF file.

Nothing here imports torch: a plan makes the same checks as the stage, before anything runs.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from training_core.config.paths import dangling_link, lfs_pointer
from training_core.errors import ArtifactError, ConfigurationError
from training_core.models.gguf_file import check_gguf, is_gguf
from training_core.protocol.digests import file_digest

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
INDEX_FILE = "model.safetensors.index.json"
HEADER_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
"""Types that unquantised weights come in."""
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def check_source(path: Path) -> None:
    """Check a local checkpoint as far as that needs no model in memory.

    Raises:
        ConfigurationError: it is neither a folder nor a .gguf file.
        ArtifactError: it is refused or damaged; the message names the file.
    """
    if is_gguf(path):
        check_gguf(path)
        return
    if not path.is_dir():
        hint = f". Did you mean the folder, {path.parent}?" if path.suffix == ".safetensors" else ""
        raise ConfigurationError(
            f"checkpoint.source: {path} is neither a folder nor a .gguf file. Allowed: a Hugging Face folder with "
            f"safetensors, a .gguf file, or hub:owner/name{hint}"
        )
    check_folder(path)
    stored_dtype(path)


def read_template(path: Path) -> str:
    """Return the text of a chat template file.

    Raises:
        ConfigurationError: it is no file, not UTF-8, or blank.
    """
    if not path.is_file():
        raise ConfigurationError(f"checkpoint.chat_template: {path} is no file. Name a file with a Jinja template")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"checkpoint.chat_template: {path} is not UTF-8 text (byte {error.start}). Name a file with a "
            "Jinja template"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"checkpoint.chat_template: {path} cannot be read: {error.strerror}") from None
    if not text.strip():
        raise ConfigurationError(f"checkpoint.chat_template: {path} is blank. Write the template, or drop the field")
    return text


def check_folder(folder: Path) -> None:
    """Check a Hugging Face folder before any library opens it.

    Raises:
        ArtifactError: pickled files, references to code, quantised weights, missing or damaged files.
    """
    refuse_pickles(folder)
    refuse_dangling_links(folder)
    refuse_other_folders(folder)
    config = read_object(folder / "config.json")
    refuse_code(folder / "config.json", config)
    for name in ("tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            refuse_code(folder / name, read_object(folder / name))
    if config.get("quantization_config"):
        raise ArtifactError(
            f"{folder / 'config.json'} has a quantization_config: packed weights cannot be trained. De-quantise the "
            "model and save it as safetensors (a GGUF file may be given as it is)"
        )
    for file in weight_files(folder):
        read_safetensors_header(file)


def refuse_pickles(folder: Path) -> None:
    """Refuse pickled files, beside safetensors too: which weights are meant must not be a guess.

    Raises:
        ArtifactError: names them and says how to convert.
    """
    found = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.suffix in PICKLE_SUFFIXES)
    if not found:
        return
    if any(folder.glob("*.safetensors")):
        advice = "The folder has safetensors too: delete these files, or copy the others to a folder of their own"
    else:
        advice = (
            "Convert them where you trust their origin: load the model with transformers there and call "
            "save_pretrained(FOLDER), which writes model.safetensors"
        )
    raise ArtifactError(
        f"{folder} holds pickled files, which can run any code when loaded: {', '.join(found[:5])}. {advice}"
    )


def refuse_dangling_links(folder: Path) -> None:
    """Refuse links to missing files, of which a copied hub cache consists.

    Raises:
        ArtifactError: names the first one and its target.
    """
    for path in sorted(folder.iterdir()):
        if dangling_link(path) is not None:
            raise ArtifactError(
                f"{path} is a link to {os.readlink(path)}, and that target is missing. Restore the target, or copy "
                "the folder again with its links followed (cp -rL)"
            )


def refuse_other_folders(folder: Path) -> None:
    """Refuse a folder without config.json, and say what it looks like.

    Raises:
        ArtifactError: it is empty, an adapter, or a folder of checkpoints.
    """
    if (folder / "config.json").exists():
        return
    needs = "A checkpoint folder needs config.json, *.safetensors and the tokenizer's files"
    if not any(folder.iterdir()):
        raise ArtifactError(f"{folder} is empty. {needs}")
    if (folder / "adapter_config.json").is_file():
        raise ArtifactError(
            f"{folder} is a LoRA adapter, not a model. Merge it into its base model (peft: merge_and_unload()), save "
            "that with save_pretrained(FOLDER), the tokenizer too, and name that folder"
        )
    below = sorted(path.parent for path in folder.glob("*/config.json"))
    ggufs = sorted(folder.glob("*.gguf"))
    hint = f". Did you mean {' or '.join(map(str, [*below, *ggufs][:3]))}?" if below or ggufs else f". {needs}"
    raise ArtifactError(f"{folder / 'config.json'} is missing{hint}")


def refuse_code(path: Path, config: dict[str, Any]) -> None:
    """Refuse a config that asks for Python code from the checkpoint.

    Raises:
        ArtifactError: it has `auto_map`.
    """
    if "auto_map" in config:
        raise ArtifactError(
            f"{path} has auto_map: it wants Python code from the checkpoint to run, which is refused. Use an "
            "architecture that transformers has itself, and remove auto_map"
        )


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ArtifactError: no such file, or it holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing. A checkpoint folder needs config.json and *.safetensors") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not readable JSON: {error}. Copy or download it again") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{path} must hold a JSON object, found {type(value).__name__}. Copy or download it again")
    return value


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that hold the weights: those of the index, or model.safetensors.

    Raises:
        ArtifactError: there is none, or one that the index names is missing.
    """
    if (folder / INDEX_FILE).is_file():
        shards = read_object(folder / INDEX_FILE).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ArtifactError(f"{folder / INDEX_FILE} has no weight_map. Copy or download it again")
        names = sorted({str(name) for name in shards.values()})
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ArtifactError(
                f"{folder} lacks weight files that its index names: {', '.join(missing[:5])}. Copy them there"
            )
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    others = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise ArtifactError(
        f"{folder} has no model.safetensors and no {INDEX_FILE}; it holds: {others}. Save the model with "
        "save_pretrained(FOLDER), which writes model.safetensors"
    )


def read_safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return tensor name to {dtype, shape, data_offsets}, after checking that the file is whole.

    Raises:
        ArtifactError: the header is cut short or no header, or the tensors do not fill the file exactly.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(HEADER_LENGTH_BYTES)
        if len(start) < HEADER_LENGTH_BYTES:
            raise damaged(path, f"it has {size} bytes, less than a header length")
        if (pointer := lfs_pointer(start + stream.read(64))) is not None:
            raise ArtifactError(f"{path} {pointer}")
        stream.seek(HEADER_LENGTH_BYTES)
        (length,) = struct.unpack("<Q", start)
        if length > min(MAX_HEADER_BYTES, size - HEADER_LENGTH_BYTES):
            raise damaged(path, f"its header should have {length} bytes, the file has {size}")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise damaged(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise damaged(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    check_offsets(path, header, size - HEADER_LENGTH_BYTES - length)
    return header


def check_offsets(path: Path, header: dict[str, dict[str, Any]], data_bytes: int) -> None:
    """Check that tensors lie end to end and fill the data part, each as long as its type and shape say."""
    position = 0
    try:
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            if entry["dtype"] not in DTYPE_BITS:
                known = ", ".join(DTYPE_BITS)
                raise ArtifactError(f"{path}: tensor {name} has type {entry['dtype']}; allowed: {known}")
            bits = DTYPE_BITS[entry["dtype"]]
            for dimension in entry["shape"]:
                bits *= dimension
            if begin != position or (end - begin) * 8 != bits:
                raise damaged(
                    path, f"tensor {name} lies at bytes {begin}..{end}, which does not fit its shape or place"
                )
            position = end
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"its header is malformed ({error!r})") from error
    if position != data_bytes:
        raise damaged(path, f"its tensors need {position} bytes of data, the file has {data_bytes}")


def damaged(path: Path, what: str) -> ArtifactError:
    return ArtifactError(f"{path} is not a whole safetensors file: {what}. Copy or download it again")


def stored_dtype(folder: Path) -> str:
    """Return the type that most of the weights' elements are stored in, e.g. "bfloat16"."""
    counts: dict[str, int] = {}
    for file in weight_files(folder):
        for entry in read_safetensors_header(file).values():
            begin, end = entry["data_offsets"]
            counts[entry["dtype"]] = counts.get(entry["dtype"], 0) + (end - begin) * 8 // DTYPE_BITS[entry["dtype"]]
    name = max(sorted(counts), key=lambda dtype: counts[dtype], default="")
    if name not in DTYPE_NAMES:
        raise ArtifactError(f"{folder} stores its weights as {name or 'nothing'}; allowed: {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[name]


def describe_files(source: Path) -> list[dict[str, Any]]:
    """Return name, sha256 and size of the source's files (links followed), sorted by name."""
    files = [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.is_file())
    base = source.parent if source.is_file() else source
    return [
        {"name": file.relative_to(base).as_posix(), "sha256": file_digest(file), "bytes": file.stat().st_size}
        for file in files
    ]
