"""The rows that are kept, as rows to write or to look at."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_checks.features import Flag
from data_checks.formats import FORMATS
from data_checks.naming import is_private
from data_checks.result import CheckedData
from data_checks.tables import FATES

BATCH_ROWS = 4096
PRIVATE = int(Flag.SECRET | Flag.EMAIL | Flag.PHONE | Flag.IDENTITY_NUMBER | Flag.IP_ADDRESS)
PARTS = ("prompt", "chosen", "rejected")
TELLING = frozenset(name for layout in FORMATS.values() for name in layout.needs)
"""Columns by which some format is told: in a fixed file they could make it look like another one."""
NUMBERS = ("prompt_characters", "chosen_characters", "rejected_characters", "prompt_tokens", "margin", "rating")


def fixed_lines(data: CheckedData) -> Iterator[bytes]:
    """Yield the kept rows as JSON lines, in the order of the files: text as it was, nothing that was left out."""
    order = {evidence.path: at for at, evidence in enumerate(data.formats)}

    def place(row: dict[str, Any]) -> tuple[int, int]:
        return order[row["source_file"]], row["source_row"]

    for names, convert in (
        (("train_pairs", "validation_pairs"), _pair),
        (("train_feedback", "validation_feedback"), _feedback),
    ):
        paths = [data.tables[name] for name in names if data.num_rows.get(name)]
        for row in heapq.merge(*map(_rows, paths), key=place):
            yield orjson.dumps(convert(row))
    if "rl_prompts" in data.ledgers:
        for row in _rows(data.tables["rl_prompts"]):
            yield orjson.dumps(_prompt(row))
    if data.num_rows.get("stepwise"):
        for row in _rows(data.tables["stepwise"]):
            yield orjson.dumps(_steps(row))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BATCH_ROWS):
            yield from batch.to_pylist()


def _pair(row: dict[str, Any]) -> dict[str, Any]:
    named = {part: row[f"{part}_messages"] for part in PARTS}
    numbers = ("margin", "chosen_score", "rejected_score")
    return _others(row) | named | {name: row[name] for name in numbers if row[name] is not None}


def _feedback(row: dict[str, Any]) -> dict[str, Any]:
    named = {"prompt": row["prompt_messages"], "completion": row["answer_messages"]}
    return _others(row) | named | {name: row[name] for name in ("label", "rating") if row[name] is not None}


def _others(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that say where a row comes from, and those that no format is told by."""
    others = {name: value for name, value in orjson.loads(row["extra"] or "{}").items() if name not in TELLING}
    known = {name: row[name] for name in ("source", "annotator") if row[name] is not None}
    tools = {} if row["tools"] is None else {"tools": orjson.loads(row["tools"])}
    return {**others, **known, **tools}


def _prompt(row: dict[str, Any]) -> dict[str, Any]:
    return {**orjson.loads(row["extra"] or "{}"), "prompt": row["prompt_messages"], "prompt_id": row["prompt_id"]}


def _steps(row: dict[str, Any]) -> dict[str, Any]:
    steps = [message["content"] for message in row["answer_messages"]]
    prompt = row["prompt_messages"]
    return {"prompt": prompt, "completions": steps, "labels": orjson.loads(row["extra"])["labels"]}


def sample_rows(data: CheckedData, number: int, *, with_text: bool) -> list[dict[str, Any]]:
    """Return a few rows of each fate for the page's table: first the kept ones, then what was left out.

    Args:
        data: what was checked.
        number: rows of each fate.
        with_text: also the texts of kept rows without secrets and personal data; the tables must have been written.
    """
    samples: list[dict[str, Any]] = []
    for kind, path in data.features.items():
        samples += _first_of_each_fate(path, kind, number)
    if with_text:
        _add_texts(samples, data)
    return samples


def _first_of_each_fate(path: Path, kind: str, number: int) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {fate: [] for fate in FATES}
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(
            batch_size=BATCH_ROWS, columns=["file", "row", "fate", "reason", *_present(path)]
        ):
            table = pa.Table.from_batches([batch])
            for fate, rows in found.items():
                if len(rows) < number:
                    chosen = table.filter(pc.equal(table["fate"], fate)).slice(0, number - len(rows))
                    rows += [_sample(row, kind) for row in chosen.to_pylist()]
            if all(len(rows) >= number for rows in found.values()):
                break
    return [row for rows in found.values() for row in rows]


def _present(path: Path) -> list[str]:
    names = pq.read_schema(path).names
    return [name for name in (*NUMBERS, *(f"{part}_flags" for part in PARTS)) if name in names]


def _sample(row: dict[str, Any], kind: str) -> dict[str, Any]:
    flags = 0
    for part in PARTS:
        flags |= row[f"{part}_flags"] or 0
    return {
        "where": f"{row['file']}:{row['row']}",
        "fate": row["fate"] if row["reason"] is None else f"{row['fate']}: {row['reason']}",
        "numbers": {name: row[name] for name in NUMBERS if row[name] is not None},
        "texts": None,
        "kind": kind,
        "is_private": bool(flags & PRIVATE),
    }


def _add_texts(samples: list[dict[str, Any]], data: CheckedData) -> None:
    wanted = {sample["where"]: sample for sample in samples if sample["fate"] == "kept" and not sample["is_private"]}
    names = ("train_pairs", "validation_pairs", "train_feedback", "validation_feedback")
    for name in names:
        if not data.num_rows.get(name):
            continue
        for row in _rows(data.tables[name]):
            sample = wanted.get(f"{row['source_file']}:{row['source_row']}")
            if sample is None or sample["texts"] is not None:
                continue
            texts = {part: row.get(f"{part}_text") for part in (*PARTS, "answer")}
            shown = {part: text for part, text in texts.items() if text is not None}
            # A row of several answers becomes several pairs: the one that was measured need not be this one.
            if _fits(sample, shown) and not any(map(is_private, shown.values())):
                sample["texts"] = shown


def _fits(sample: dict[str, Any], texts: dict[str, str]) -> bool:
    """Return whether texts have the lengths that were measured."""
    answers = {"chosen_characters": "answer", "rejected_characters": "rejected", "prompt_characters": "prompt"}
    if "chosen" in texts:
        answers["chosen_characters"] = "chosen"
    numbers = sample["numbers"]
    return all(numbers.get(name) == len(texts[part]) for name, part in answers.items() if part in texts)
