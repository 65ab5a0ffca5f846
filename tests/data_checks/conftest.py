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
from transformers import PreTrainedTokenizerBase

from data_checks.config import CheckDataConfig
from data_checks.entries import InputFiles
from data_checks.runner import CheckedData, check_dataset


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


def files_of(config: CheckDataConfig) -> InputFiles:
    """Return the files where the config names them."""
    prompts = [None if path is None else Path(path) for path in (config.rl_prompts, config.eval_prompts)]
    feedback = [Path(file.path) for file in config.feedback]
    return InputFiles([Path(file.path) for file in config.preferences], *prompts, feedback)


@pytest.fixture
def check(chat_tokenizer: PreTrainedTokenizerBase) -> Callable[..., CheckedData]:
    """Check files with generous limits; keywords are config fields."""

    def run(*paths: Path, format: str = "auto", seed: int = 3, **fields: Any) -> CheckedData:
        preferences = [{"path": str(path), "format": format} for path in paths]
        config = CheckDataConfig.model_validate(
            {"preferences": preferences, "min_pairs": 2, "min_feedback": 2, **fields}
        )
        return check_dataset(files_of(config), config, chat_tokenizer, seed=seed)

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
