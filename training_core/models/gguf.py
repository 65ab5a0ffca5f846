"""GGUF files: packed weights become ordinary ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from training_core.errors import ArtifactError
from training_core.models.gguf_file import check_gguf
from training_core.models.loading import check_loading_report


def load_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the de-quantised float32 model of a GGUF file and its tokenizer.

    Raises:
        ArtifactError: no whole GGUF file, or of an architecture or packing that transformers does not read.
    """
    header = check_gguf(path)
    place: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **place)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            **place,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except Exception as error:  # The reader raises anything, from IndexError to struct.error.
        # The file is whole, so the cause is what it holds; a library's words for it are seldom a sentence.
        words = str(error).strip().splitlines() or [""]
        raise ArtifactError(
            f"{path} (architecture {header.architecture or 'not named'}) cannot be read as a GGUF causal language "
            f"model: {type(error).__name__}: {words[0][:200]}. The file is whole, so its architecture or metadata are "
            "not supported: name the model's safetensors folder instead, or convert it to one elsewhere"
        ) from error
    model: PreTrainedModel = loaded[0]
    check_loading_report(loaded[1], path)
    if getattr(model.config, "quantization_config", None) is not None:
        raise ArtifactError(
            f"{path}: transformers left the weights packed; they cannot be trained. Name the model's safetensors folder"
        )
    model.train(False)
    return model, tokenizer
