"""A small tokenizer with a chat template, and files of rows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_checking import Loaded, files_of, load_check
from transformers import PreTrainedTokenizerBase

from data_checks.config import CheckDataConfig


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from training_core.models.tiny import build_tiny_tokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    build_tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def chat_tokenizer(tokenizer_directory: Path) -> PreTrainedTokenizerBase:
    from data_checks.tokens import load_tokenizer

    return load_tokenizer(tokenizer_directory)


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write rows (or raw lines, as bytes) to a file whose kind its name says."""

    def write(rows: Sequence[dict[str, Any] | bytes], name: str = "pairs.jsonl") -> Path:
        path = tmp_path / name
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
            return path
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        content = b"".join(line + b"\n" for line in lines)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return write


@pytest.fixture
def check(tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Loaded]:
    """Check files with generous limits; keywords are config fields."""

    def run(*paths: Path, format: str = "auto", seed: int = 3, **fields: Any) -> Loaded:
        preferences = [{"path": str(path), "format": format} for path in paths]
        config = CheckDataConfig.model_validate(
            {"preferences": preferences, "min_pairs": 2, "min_feedback": 2, **fields}
        )
        return load_check(files_of(config), config, tokenizer_directory, tmp_path_factory.mktemp("check"), seed)

    return run


@pytest.fixture(scope="session")
def good_pairs() -> list[dict[str, Any]]:
    """Forty flawless pairs with different prompts, the longer answer chosen in every other one."""
    short, long = "It is fine.", "It is a wonderful and happy thing."
    return [
        {
            "prompt": f"What about number {index}?",
            "chosen": f"{long if index % 2 else short} {index}",
            "rejected": f"{short if index % 2 else long} No {index}",
        }
        for index in range(40)
    ]
