"""Made-up final features: tables of numbers as the runner leaves them, for tests and benchmarks of the metric stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_checks.checks.metrics_sql import PREFIXES
from data_checks.result import CheckedData, Defects, Ledger
from data_checks.table_files import FINAL_FEATURES
from data_checks.tokens import Limits

KINDS = {"preferences": "pair", "feedback": "unpaired", "rl_prompts": "rl_prompt", "eval_prompts": "rl_prompt"}
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LIMITS = Limits(512, None, 1024, "config")


def keys(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return 64-bit keys of whole numbers, spread over the whole range."""
    mixed = numbers.astype(np.uint64) * GOLDEN
    mixed ^= mixed >> np.uint64(29)
    return (mixed * GOLDEN).view(np.int64)


def good_columns(num_rows: int, table: str = "preferences", sources: int = 2) -> dict[str, Any]:
    """Return the columns of flawless rows: every prompt once, the longer answer chosen in half of the pairs."""
    index = np.arange(num_rows)
    ones, nothing = np.ones(num_rows, np.int32), [None] * num_rows
    has_answer, is_pair = table not in ("rl_prompts", "eval_prompts"), table == "preferences"
    prompts = index + 10**12 * list(PREFIXES).index(table)  # no kind has the prompts of another
    longer = index // 4 % 2 == 0  # in every source alike
    columns: dict[str, Any] = {
        "example": index,
        "file": ["rows.jsonl"] * num_rows,
        "row": index + 1,
        "source": [f"source_{number}" for number in index % sources],
        "kind": [KINDS.get(table, "stepwise")] * num_rows,
        "usable": [True] * num_rows,
        **{name: keys(prompts) for name in ("group_key", "group_key_2", "prompt_key", "cluster_key")},
        "chosen_key": keys(index + 10**9) if has_answer else nothing,
        "rejected_key": keys(index + 2 * 10**9) if is_pair else nothing,
        "prompt_id_key": nothing if has_answer else keys(index),
        "content_hash": keys(index + 3 * 10**9),
        "content_hash_2": keys(index + 4 * 10**9),
        "num_turns": ones,
        "prompt_characters": 40 + index % 20,
        "prompt_tokens": 10 + index % 5,
        "chosen_characters": np.where(longer, 60, 50) if has_answer else nothing,
        "chosen_tokens": np.where(longer, 16, 12) if has_answer else nothing,
        "rejected_characters": np.where(longer, 50, 60) if is_pair else nothing,
        "rejected_tokens": np.where(longer, 12, 16) if is_pair else nothing,
        "chosen_position": 1 + index // 2 % 2 if is_pair else nothing,
        "is_tie": [False] * num_rows if is_pair else nothing,
        "label": [bool(value) for value in index // 2 % 2] if table == "feedback" else nothing,
        "prompt_flags": 0 * ones,
        "chosen_flags": 0 * ones,
        "rejected_flags": 0 * ones,
        "fate": ["kept"] * num_rows,
        "split": [["train", "validation"][int(value)] for value in index % 10 == 0] if has_answer else nothing,
    }
    counts = {"words", "newlines", "bullets", "headers", "code_blocks", "bold", "emoji", "digits"}
    for side, there in (("chosen", has_answer), ("rejected", is_pair)):
        columns |= {f"{side}_{count}": ones if there else nothing for count in sorted(counts)}
    return columns


def write_features(path: Path, columns: Mapping[str, Any]) -> Path:
    """Write columns as a final features file; those that are not named are null."""
    num_rows = len(columns["example"])
    arrays = [
        pa.nulls(num_rows, field.type)
        if field.name not in columns
        else pa.array(columns[field.name], from_pandas=True).cast(field.type)
        for field in FINAL_FEATURES
    ]
    pq.write_table(pa.Table.from_arrays(arrays, schema=FINAL_FEATURES), path, row_group_size=65_536)
    return path


def random_columns(num_rows: int, seed: int, table: str = "preferences") -> dict[str, Any]:
    """Return rows with every defect that features show, drawn at random."""
    draw = np.random.default_rng(seed)
    columns = good_columns(num_rows, table, sources=20)
    group = draw.integers(0, max(num_rows * 9 // 10, 1), num_rows)
    columns |= {name: keys(group) for name in ("group_key", "prompt_key")} | {"cluster_key": keys(group - group % 3)}
    fate = np.array(["kept", "quarantined", "dropped"])[draw.choice(3, num_rows, p=[0.98, 0.015, 0.005])]
    columns["fate"] = fate
    columns["reason"] = [("secret" if value == "quarantined" else None) for value in fate]
    for name in ("prompt", "chosen", "rejected"):
        if columns[f"{name}_characters"][0] is not None:
            columns[f"{name}_characters"] = draw.integers(0, 5000, num_rows) // draw.integers(1, 50, num_rows)
            columns[f"{name}_tokens"] = columns[f"{name}_characters"] // 4
            columns[f"{name}_flags"] = np.where(draw.random(num_rows) < 0.02, 1 << draw.integers(0, 11, num_rows), 0)
    if table in ("preferences", "feedback"):
        columns["split"] = [
            None if kept != "kept" else "validation" if held_out else "train"
            for kept, held_out in zip(fate, group % 10 == 0, strict=True)
        ]
    if table == "preferences":
        few = draw.integers(0, 4, (2, num_rows))
        columns |= {"chosen_key": keys(few[0]), "rejected_key": keys(few[1])}
        columns |= {"margin": draw.normal(1, 1, num_rows), "is_tie": draw.random(num_rows) < 0.01}
        columns |= {"chosen_score": draw.random(num_rows) * 4 + 1, "rejected_score": draw.random(num_rows) * 4}
        columns["annotator"] = [f"worker_{number}" for number in draw.integers(0, 50, num_rows)]
        columns["chosen_position"] = draw.integers(1, 3, num_rows)
    if table == "feedback":
        columns |= {"rating": np.round(draw.random(num_rows) * 5), "chosen_key": keys(draw.integers(0, 3, num_rows))}
    return columns


def checked(
    features: Mapping[str, Path],
    *,
    limits: Limits | None = LIMITS,
    defects: Mapping[str, Mapping[str, int]] | None = None,
    formats: list[Any] | None = None,
    whole: Mapping[str, Any] | None = None,
    skipped: Mapping[str, str] | None = None,
) -> CheckedData:
    """Return what the runner would say of these features.

    Args:
        features: kind of input -> file.
        limits: of tokens; None: no tokenizer was given.
        defects: kind -> reason -> examples in which it was found.
        formats: evidence of the files' formats.
        whole: numbers that need all rows, instead of zeros.
        skipped: number -> why it is not there.
    """
    ledgers: dict[str, Ledger] = {}
    num_rows: dict[str, int] = {"rl_prompts": 5, "eval_prompts": 5}
    for table, path in features.items():
        columns = pq.read_table(path, columns=["fate", "split"]).to_pydict()
        fates = {name: columns["fate"].count(name) for name in ("kept", "quarantined", "dropped")}
        found = {name: Defects(rows=number) for name, number in (defects or {}).get(table, {}).items()}
        quarantined = {"secret": fates["quarantined"]} if fates["quarantined"] else {}
        dropped = {"tie": fates["dropped"]} if fates["dropped"] else {}
        total = sum(fates.values())
        ledgers[table] = Ledger(total, total, fates["kept"], quarantined, dropped, found)
        suffix = {"preferences": "pairs", "feedback": "feedback"}.get(table)
        if suffix:
            sides = [
                side if fate == "kept" else None for side, fate in zip(columns["split"], columns["fate"], strict=True)
            ]
            num_rows |= {f"{side}_{suffix}": sides.count(side) for side in ("train", "validation")}
        else:
            num_rows[table] = fates["kept"]
    counts = ("num_duplicates", "num_conflicts", "num_cycle_rows", "num_feedback_duplicates", "num_feedback_conflicts")
    zeros = {**dict.fromkeys(counts, 0), "near_duplicate_prompts_fraction": 0.0}
    reasons = {"unusable_prompts_fraction": "no pass rates"} | dict(skipped or {})
    return CheckedData(
        tables={},
        features=dict(features),
        ledgers=ledgers,
        num_rows=num_rows,
        formats=formats or [],
        limits=limits,
        fingerprint="0" * 64,
        whole=zeros | dict(whole or {}),
        skipped=reasons,
    )
