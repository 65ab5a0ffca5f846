"""Load and save causal language models as Hugging Face folders: safetensors only, never code from the folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from training_core.errors import ArtifactError
from training_core.models.lora import plain_tensors
from training_core.protocol.atomic import read_json, write_json
from training_core.protocol.digests import config_digest, file_digest

_disable_progress_bar: Any = transformers_logging.disable_progress_bar
_disable_progress_bar()

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Every file that a tokenizer may consist of; those that exist are copied with a model."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def training_device() -> torch.device:
    """Return the accelerator when this process sees one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint directory.

    Raises:
        ArtifactError: it cannot be loaded from the files in `directory`.
    """
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Every format fails in its own way; all of them mean the same to the user.
        raise ArtifactError(
            f"no tokenizer can be loaded from {directory}: {error}. It needs tokenizer.json (or the files of a known "
            "tokenizer class) and tokenizer_config.json"
        ) from error


def checkpoint_dtype(model_directory: Path) -> torch.dtype:
    """Return the dtype of a checkpoint's weights, so that an untrained policy is saved as the same bytes."""
    config: Any = AutoConfig.from_pretrained(str(model_directory), local_files_only=True)
    return config.dtype if isinstance(config.dtype, torch.dtype) else DTYPES[str(config.dtype or "float32")]


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return an id to fill rows with; no computation depends on which."""
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def tokenizer_digest(directory: Path) -> str:
    """Return the digest of a checkpoint's tokenizer files, the chat template among them: the same for equal ids."""
    return config_digest({n: file_digest(directory / n) for n in TOKENIZER_FILES if (directory / n).is_file()})


def load_causal_lm(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model of a checkpoint directory in evaluation mode (no dropout), with SDPA attention.

    Args:
        directory: config.json and *.safetensors.
        dtype: of the weights in memory; float32 for master weights.

    Raises:
        ArtifactError: files are missing or damaged, or weights are missing, left over or of another shape.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(directory),
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ArtifactError(f"no causal language model can be loaded from {directory}: {error}") from error
    model: PreTrainedModel = loaded[0]
    check_loading_report(loaded[1], directory)
    model.train(False)
    model.config.use_cache = False
    return model


def check_loading_report(report: Mapping[str, Any], directory: Path) -> None:
    """Refuse a load in which a weight was made up, ignored or did not fit.

    Raises:
        ArtifactError: names the first few such weights.
    """
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if found := sorted(map(str, report.get(kind) or ())):
            names = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
            raise ArtifactError(
                f"the weights in {directory} do not fit its config.json: {kind.replace('_', ' ')}: {names}. Use the "
                "config.json that was saved with these weights"
            )


def cast_state_dict(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the model's weights in `dtype` on the CPU, detached; integer buffers keep their type.

    Adapters are merged into the weights that they change: names and shapes are those of the model without them.
    """
    state = {}
    # Tied weights stay one tensor, else they would be written twice.
    cast: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for plain in plain_tensors(model, iter(model.state_dict().items())):
        value = plain.tensor
        key = (value.data_ptr(), value.shape)
        if key not in cast:
            target = dtype if value.is_floating_point() else value.dtype
            cast[key] = plain.merged().detach().to("cpu", target)
        state[plain.name] = cast[key]
    return state


def save_causal_lm(model: PreTrainedModel, source_directory: Path, out_directory: Path, dtype: torch.dtype) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files.

    The bytes depend on the weights, the configs and the tokenizer's files only.

    Args:
        model: its weights are cast to `dtype` for the file; the model itself stays as it is.
        source_directory: where the tokenizer's files are copied from.
        out_directory: made if missing.
        dtype: of the weights in the file.
    """
    out_directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out_directory, state_dict=cast_state_dict(model, dtype), max_shard_size="1000GB")
    name = str(dtype).removeprefix("torch.")
    update_json(out_directory / "config.json", dtype=name, use_cache=True)
    copy_tokenizer_files(source_directory, out_directory)


def update_json(path: Path, **values: Any) -> None:
    write_json(path, dict(sorted({**read_json(path), **values}.items())))


def copy_tokenizer_files(source_directory: Path, out_directory: Path) -> None:
    """Copy the files that make up the tokenizer, their bytes unchanged."""
    out_directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source_directory / name).is_file():
            shutil.copyfile(source_directory / name, out_directory / name)
