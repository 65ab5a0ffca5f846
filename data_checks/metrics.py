"""Numbers on the data: one table with a row per pair, one with a single row for the whole set. No text in either."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from data_checks.config import CheckDataConfig
from data_checks.contamination import count_shared_groups
from data_checks.keys import group_id, pair_keys
from data_checks.rows import FeedbackRow, PairRow, PromptItem, Reason
from data_checks.runner import CheckedData, TableCounts
from data_checks.tables import pair_table

PERCENTILES = (50, 95, 99)
CHUNK_ROWS = 4096
"""Rows that are held as Python values at a time."""

Row = TypeVar("Row")
DatasetMetrics = dict[str, float | int | None]
"""Name -> number; None: not known."""


def row_metrics(data: CheckedData) -> pa.Table:
    """Return lengths, keys and flags of every kept pair.

    Texts are measured in the canonical table that is written, not taken over from the rules that let the rows through.
    """
    return measured(data.pairs, pair_table, _row_values, ROW_SCHEMA)


def measured(
    rows: Sequence[Row],
    write: Callable[[Sequence[Row]], pa.Table],
    measure: Callable[[Row, dict[str, Any]], dict[str, Any]],
    schema: pa.Schema,
) -> pa.Table:
    """Return a table with what `measure` says of each row and of how `write` writes it, a chunk of rows at a time."""
    chunks = [schema.empty_table()]
    for start in range(0, len(rows), CHUNK_ROWS):
        chunk = rows[start : start + CHUNK_ROWS]
        values = [measure(*both) for both in zip(chunk, write(chunk).to_pylist(), strict=True)]
        chunks.append(pa.Table.from_pylist(values, schema=schema))
    return pa.concat_tables(chunks)


def _row_values(row: PairRow, written: dict[str, Any]) -> dict[str, Any]:
    prompt, chosen, rejected = (written[f"{part}_messages"] for part in ("prompt", "chosen", "rejected"))
    chosen_text, rejected_text = ("\n".join(m["content"].strip() for m in side) for side in (chosen, rejected))
    return {
        "example_id": written["example_id"],
        "group_id": written["group_id"],
        "pair_key": pair_keys(row)[0],
        "source_row": written["source_row"],
        "prompt_characters": len("".join(m["content"].strip() for m in prompt)),
        "chosen_characters": len(chosen[-1]["content"].strip()) if chosen else 0,
        "rejected_characters": len(rejected[-1]["content"].strip()) if rejected else 0,
        "chosen_last_role": chosen[-1]["role"] if chosen else None,
        "rejected_last_role": rejected[-1]["role"] if rejected else None,
        "responses_identical": int(chosen_text == rejected_text),
        "prompt_tokens": row.prompt_tokens,
        "chosen_tokens": row.chosen_tokens,
        "rejected_tokens": row.rejected_tokens,
        "total_tokens": _total_tokens(row),
    }


ROW_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("example_id", "group_id", "pair_key")),
        ("source_row", pa.int64()),
        *((f"{part}_characters", pa.int64()) for part in ("prompt", "chosen", "rejected")),
        *((f"{part}_last_role", pa.string()) for part in ("chosen", "rejected")),
        ("responses_identical", pa.int64()),
        *((f"{part}_tokens", pa.int64()) for part in ("prompt", "chosen", "rejected", "total")),
    ]
)


def dataset_metrics(data: CheckedData) -> DatasetMetrics:
    """Return the numbers that thresholds are set on; fractions are of the preference rows unless named otherwise.

    Those on feedback are `feedback_metrics`.
    """
    counts = data.count_of("preferences")
    train_groups = [group_id(row.prompt) for row in data.train]
    validation_groups = [group_id(row.prompt) for row in data.validation]
    eval_groups = [group_id(item.prompt) for item in data.eval_prompts]
    rl_groups = [group_id(item.prompt) for item in data.rl_prompts]
    keys = [pair_keys(row) for row in data.pairs]
    present = {key for key, _ in keys}
    return {
        "rows": counts.rows,
        "rows_kept": counts.kept,
        "rows_quarantined": counts.num_quarantined,
        "rows_unaccounted": counts.rows - len(data.pairs) - counts.num_quarantined,
        "quarantined_fraction": counts.quarantined_fraction,
        "rl_prompts_quarantined_fraction": _rl_prompts_quarantined_fraction(data),
        "eval_prompts_quarantined_fraction": _quarantined_fraction(data, "eval_prompts"),
        "num_train_pairs": len(data.train),
        "num_validation_pairs": len(data.validation),
        "num_rl_prompts": len(data.rl_prompts),
        "num_eval_prompts": len(data.eval_prompts),
        "prompts_on_both_sides": count_shared_groups(train_groups, validation_groups),
        "evaluation_prompts_trained_on": count_shared_groups([*train_groups, *rl_groups], eval_groups),
        "duplicate_rows_kept": len(keys) - len(present),
        "conflicting_rows_kept": sum(exchanged in present and exchanged != key for key, exchanged in keys),
        "duplicate_fraction": _fraction(data.num_duplicates, counts.rows),
        "conflicting_fraction": _fraction(data.num_conflicts, counts.rows),
        "too_long_fraction": _fraction(too_long_rows(counts), counts.rows),
        "chosen_longer_share": chosen_longer_share(data.pairs),
        "score_inverted_fraction": _fraction(sum(map(_is_inverted, data.pairs)), counts.rows),
    }


def too_long_rows(counts: TableCounts) -> int:
    reasons = (Reason.PROMPT_TOO_LONG, Reason.RESPONSE_TOO_LONG, Reason.TOO_LONG)
    return sum(counts.quarantined.get(reason, 0) for reason in reasons)


def _fraction(number: int, rows: int) -> float | None:
    return number / rows if rows else None


def suite_parameters(data: CheckedData, config: CheckDataConfig) -> dict[str, float | int]:
    """Return the thresholds that the expectation suites leave open."""
    limits = data.limits
    return {
        "min_pairs": config.min_pairs,
        "min_feedback": config.min_feedback,
        "max_quarantined_fraction": config.max_quarantined_fraction,
        "max_prompt_tokens": limits.max_prompt_tokens,
        "max_response_tokens": limits.max_response_tokens or limits.max_total_tokens,
        "max_total_tokens": limits.max_total_tokens,
        "max_duplicate_rows_kept": 0 if config.duplicates == "keep_first" else len(data.pairs),
        "max_conflicting_rows_kept": 0 if config.conflicts == "quarantine_all" else len(data.pairs),
        "max_duplicate_feedback_kept": 0 if config.duplicates == "keep_first" else len(data.feedback),
        "max_conflicting_feedback_kept": 0 if config.conflicts == "quarantine_all" else len(data.feedback),
    }


def chosen_longer_share(rows: Sequence[PairRow]) -> float | None:
    """Return the share of pairs whose chosen answer has more tokens, ties counted half; None without pairs."""
    if not rows:
        return None
    signs = [np.sign((row.chosen_tokens or 0) - (row.rejected_tokens or 0)) for row in rows]
    return float(np.mean([(sign + 1) / 2 for sign in signs]))


def length_statistics(rows: Sequence[PairRow]) -> dict[str, dict[str, float]]:
    """Return mean, percentiles and maximum of tokens: of the prompt, of each answer, of the longer side in all."""
    columns = {
        "prompt_tokens": [row.prompt_tokens or 0 for row in rows],
        "chosen_tokens": [row.chosen_tokens or 0 for row in rows],
        "rejected_tokens": [row.rejected_tokens or 0 for row in rows],
        "total_tokens": [_total_tokens(row) or 0 for row in rows],
    }
    return {name: statistics(values) for name, values in columns.items()} if rows else {}


def longest_prompt(items: Sequence[PromptItem]) -> int | None:
    """Return the tokens of the longest prompt, the opening of the answer included; None without prompts."""
    return max((item.prompt_tokens for item in items if item.prompt_tokens is not None), default=None)


def sources(rows: Sequence[PairRow | FeedbackRow]) -> dict[str, int]:
    return dict(sorted(Counter(row.source for row in rows).items()))


def statistics(values: Sequence[float]) -> dict[str, float]:
    percentiles: list[Any] = list(np.percentile(values, PERCENTILES))
    named = {f"p{number}": float(value) for number, value in zip(PERCENTILES, percentiles, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(max(values))}


def _total_tokens(row: PairRow) -> int | None:
    if row.prompt_tokens is None:
        return None
    return row.prompt_tokens + max(row.chosen_tokens or 0, row.rejected_tokens or 0)


def _quarantined_fraction(data: CheckedData, name: str) -> float:
    """Return 0 for prompts that were taken from pairs: there was no row to quarantine."""
    return data.counts[name].quarantined_fraction if name in data.counts else 0.0


def _rl_prompts_quarantined_fraction(data: CheckedData) -> float:
    """Return the share of bad RL prompts.

    Where the evaluation takes the prompts of the validation split, an RL prompt on that side is no defect of the file:
    the split put it there. It is quarantined, but does not count here.
    """
    fraction = _quarantined_fraction(data, "rl_prompts")
    if "rl_prompts" in data.counts and "eval_prompts" not in data.counts:
        counts = data.counts["rl_prompts"]
        fraction -= counts.quarantined.get(Reason.PROMPT_IN_EVALUATION, 0) / counts.rows
    return fraction


def _is_inverted(row: PairRow) -> bool:
    return row.chosen_score is not None and row.rejected_score is not None and row.chosen_score < row.rejected_score
