"""Rows of the data checks' Parquet files, a few at a time, to the cells of a token table."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from training_core.errors import DataError
from training_core.models.chat import encode_conversation, encode_pair
from training_core.protocol.digests import config_digest, tree_digest

PAIR_COLUMNS = ("example_id", "group_id", "prompt_messages", "chosen_messages", "rejected_messages", "margin")
SCORE_COLUMNS = ("chosen_score", "rejected_score")
"""Null everywhere where a file has no such column."""
FEEDBACK_COLUMNS = ("example_id", "group_id", "prompt_messages", "answer_messages", "label", "rating")


def parquet_batches(
    path: Path, required: Sequence[str], optional: Sequence[str], size: int
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a Parquet file as lists of at most `size` dicts; an absent optional column is left out.

    Raises:
        DataError: the file is unreadable, lacks a column or holds no rows.
    """
    advice = "Run the data checks again to write it"
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if missing := [name for name in required if name not in names]:
                raise DataError(f"{path} has no column {', '.join(missing)}; it has {', '.join(names)}. {advice}")
            if not file.metadata.num_rows:
                raise DataError(
                    f"{path} has no rows, so there is nothing to work on. See the data report for what was dropped"
                )
            columns = [*required, *(name for name in optional if name in names)]
            for batch in file.iter_batches(size, columns=columns):
                yield batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}. {advice}") from error


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of all that decides which ids a conversation becomes: vocabulary, rules, template and EOS.

    The same tokenizer in another folder has the same digest.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            rules: Any = tree_digest(Path(folder))
    else:
        # What a call with padding or truncation leaves behind is set anew by every call.
        rules = {
            key: item for key, item in json.loads(backend.to_str()).items() if key not in ("padding", "truncation")
        }
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "special": tokenizer.special_tokens_map}
    return config_digest({"rules": rules, "chat_template": tokenizer.chat_template, **special})


def pair_cells(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, limit: int) -> dict[str, Any]:
    """Return the cells of one pair in a token table.

    Raises:
        DataError: the pair does not render, is too long, or has the same tokens for both answers.
    """
    what = f"pair {row['example_id']!r}"
    messages = [_messages(row, f"{part}_messages", what) for part in ("prompt", "chosen", "rejected")]
    try:
        chosen, rejected, num_prompt_tokens = encode_pair(tokenizer, *messages)
    except DataError as error:
        raise DataError(f"{what}: {error}") from error
    _check_length(what, max(len(chosen), len(rejected)), limit)
    if chosen == rejected:
        raise DataError(
            f"{what} has the same tokens for both answers, so it prefers nothing. The data checks leave such pairs "
            "out: run them again with this model's tokenizer"
        )
    numbers = {name: row.get(name) for name in ("margin", *SCORE_COLUMNS)}
    ids = {name: row[name] for name in ("example_id", "group_id")}
    return {
        "chosen": np.asarray(chosen, np.int32),
        "rejected": np.asarray(rejected, np.int32),
        "num_prompt_tokens": num_prompt_tokens,
        **numbers,
        **ids,
    }


def feedback_cells(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, limit: int) -> dict[str, Any]:
    """Return the cells of one judged answer in a token table.

    Raises:
        DataError: it does not render or is too long.
    """
    what = f"feedback {row['example_id']!r}"
    messages = [_messages(row, f"{part}_messages", what) for part in ("prompt", "answer")]
    try:
        ids, num_prompt_tokens = encode_conversation(tokenizer, *messages)
    except DataError as error:
        raise DataError(f"{what}: {error}") from error
    _check_length(what, len(ids), limit)
    kept = {name: row[name] for name in ("label", "rating", "example_id", "group_id")}
    return {"ids": np.asarray(ids, np.int32), "num_prompt_tokens": num_prompt_tokens, **kept}


def _check_length(what: str, length: int, limit: int) -> None:
    if length > limit:
        raise DataError(
            f"{what} has {length} tokens, the model's limit is {limit}. The data checks leave such rows out: lower "
            "their length limit and run them again"
        )


def _messages(row: dict[str, Any], column: str, what: str) -> list[dict[str, str]]:
    if row[column] is None:
        raise DataError(f"{what} has no {column}. Run the data checks again to write the file")
    messages: list[dict[str, str]] = row[column]
    return messages
