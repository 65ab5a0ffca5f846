"""GGUF files: packed weights become ordinary ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from training_core.errors import ArtifactError
from training_core.models.loading import check_loading_report

GGUF_MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() == ".gguf"


def load_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the de-quantised float32 model of a GGUF file and its tokenizer.

    Raises:
        ArtifactError: no whole GGUF file, or of an architecture or packing that transformers does not read.
    """
    with path.open("rb") as stream:
        if stream.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ArtifactError(f"{path} is no GGUF file: it does not start with {GGUF_MAGIC.decode()}")
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
        raise ArtifactError(
            f"{path} cannot be read as a GGUF causal language model: {error!r}. Copy or download it again; if it is "
            "whole, its architecture or packing is not supported: convert it to a safetensors folder elsewhere"
        ) from error
    model: PreTrainedModel = loaded[0]
    check_loading_report(loaded[1], path)
    if getattr(model.config, "quantization_config", None) is not None:
        raise ArtifactError(f"{path}: transformers left the weights packed; they cannot be trained")
    model.train(False)
    return model, tokenizer
