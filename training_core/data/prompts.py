"""Prompts for rollouts and evaluation from the Parquet files that the data checks write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training_core.data.rows import read_rows, to_messages
from training_core.errors import DataError
from training_core.records import PromptRow

PROMPT_COLUMNS = ("prompt_id", "group_id", "prompt_messages", "extra")


def read_prompts(path: Path) -> list[PromptRow]:
    """Return the prompts in the file's order.

    `extra` holds the row's further columns (a reference answer, say) for reward rules.

    Raises:
        DataError: the file is unreadable, lacks a column, holds no rows, or repeats a prompt id.
    """
    prompts = [
        PromptRow(
            prompt_id=row["prompt_id"],
            prompt=to_messages(row["prompt_messages"]),
            extra=parse_extra(row["extra"], row["prompt_id"], path),
        )
        for row in read_rows(path, PROMPT_COLUMNS)
    ]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.prompt_id in seen:
            raise DataError(f"{path} has prompt id {prompt.prompt_id!r} more than once; ids must be unique")
        seen.add(prompt.prompt_id)
    return prompts


def parse_extra(text: str | None, prompt_id: str, path: Path) -> dict[str, Any]:
    """Return the JSON object in `text`; an empty or null text is an empty object.

    Raises:
        DataError: the text is not a JSON object.
    """
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: column extra of prompt {prompt_id!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: column extra of prompt {prompt_id!r} must be a JSON object, found {text[:80]!r}")
    return value
