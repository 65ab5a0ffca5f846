"""Numbers on feedback: one table with a row per judged answer, one with a single row for all of it. No text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from data_checks.contamination import count_shared_groups
from data_checks.keys import feedback_keys, group_id
from data_checks.metrics import DatasetMetrics, measured, sources, statistics, too_long_rows
from data_checks.rows import FeedbackRow, PairRow, PromptItem
from data_checks.runner import CheckedData
from data_checks.tables import feedback_table

ROW_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("example_id", "group_id", "answer_key")),
        ("source_row", pa.int64()),
        ("prompt_characters", pa.int64()),
        ("answer_characters", pa.int64()),
        ("answer_last_role", pa.string()),
        ("is_judged", pa.int64()),
        *((f"{part}_tokens", pa.int64()) for part in ("prompt", "answer", "total")),
    ]
)


def feedback_row_metrics(data: CheckedData) -> pa.Table:
    """Return lengths, keys and flags of every kept feedback row, measured in the canonical table."""
    return measured(data.feedback, feedback_table, _row_values, ROW_SCHEMA)


def _row_values(row: FeedbackRow, written: dict[str, Any]) -> dict[str, Any]:
    prompt, answer = written["prompt_messages"], written["answer_messages"]
    return {
        "example_id": written["example_id"],
        "group_id": written["group_id"],
        "answer_key": feedback_keys(row)[0],
        "source_row": written["source_row"],
        "prompt_characters": len("".join(m["content"].strip() for m in prompt)),
        "answer_characters": len(answer[-1]["content"].strip()) if answer else 0,
        "answer_last_role": answer[-1]["role"] if answer else None,
        "is_judged": int(written["label"] is not None or written["rating"] is not None),
        "prompt_tokens": row.prompt_tokens,
        "answer_tokens": row.answer_tokens,
        "total_tokens": _total_tokens(row),
    }


def _total_tokens(row: FeedbackRow) -> int | None:
    return None if row.prompt_tokens is None else row.prompt_tokens + (row.answer_tokens or 0)


def feedback_metrics(data: CheckedData) -> DatasetMetrics:
    """Return the numbers that thresholds are set on; fractions are of the feedback rows unless named otherwise."""
    counts, rows = data.count_of("feedback"), data.feedback
    train = _groups([*data.train, *data.train_feedback])
    validation = _groups([*data.validation, *data.validation_feedback])
    evaluation = _groups(data.eval_prompts)
    keys = [feedback_keys(row) for row in rows]
    labels: dict[str, set[bool]] = {}
    for row, (answer, _) in zip(rows, keys, strict=True):
        if row.label is not None:
            labels.setdefault(answer, set()).add(row.label)
    return {
        "feedback_rows": counts.rows,
        "feedback_kept": counts.kept,
        "feedback_quarantined": counts.num_quarantined,
        "feedback_unaccounted": counts.rows - len(rows) - counts.num_quarantined,
        "feedback_quarantined_fraction": counts.quarantined_fraction,
        "num_train_feedback": len(data.train_feedback),
        "num_validation_feedback": len(data.validation_feedback),
        "num_labelled_feedback": sum(row.label is not None for row in rows),
        "num_rated_feedback": sum(row.rating is not None for row in rows),
        "feedback_prompts_on_both_sides": count_shared_groups(train, validation),
        "evaluation_prompts_in_feedback": count_shared_groups(train, evaluation),
        "duplicate_feedback_kept": len(keys) - len({key for _, key in keys}),
        "conflicting_feedback_kept": sum(
            row.label is not None and len(labels[answer]) > 1 for row, (answer, _) in zip(rows, keys, strict=True)
        ),
        "feedback_duplicate_fraction": _fraction(data.num_feedback_duplicates, counts.rows),
        "feedback_conflicting_fraction": _fraction(data.num_feedback_conflicts, counts.rows),
        "feedback_too_long_fraction": _fraction(too_long_rows(counts), counts.rows),
        "feedback_good_share": good_share(rows),
    }


def _groups(rows: Sequence[PairRow | FeedbackRow | PromptItem]) -> set[str]:
    return {group_id(row.prompt) for row in rows}


def good_share(rows: Sequence[FeedbackRow]) -> float | None:
    """Return the share of labelled rows whose answer is good; None without labels."""
    labels = [row.label for row in rows if row.label is not None]
    return sum(labels) / len(labels) if labels else None


def feedback_report(data: CheckedData) -> dict[str, Any]:
    """Return what the report says of feedback beside the numbers that thresholds are set on."""
    rows = data.feedback
    labels = Counter({True: "good", False: "bad", None: "none"}[row.label] for row in rows)
    ratings = [row.rating for row in rows if row.rating is not None]
    return {
        "labels": {name: labels[name] for name in ("good", "bad", "none")},
        "ratings": statistics(ratings) if ratings else {},
        "lengths": feedback_lengths(rows),
        "sources": sources(rows),
    }


def feedback_lengths(rows: Sequence[FeedbackRow]) -> dict[str, dict[str, float]]:
    """Return mean, percentiles and maximum of tokens of the prompt, of the answer, and of both."""
    columns = {
        "prompt_tokens": [row.prompt_tokens or 0 for row in rows],
        "answer_tokens": [row.answer_tokens or 0 for row in rows],
        "total_tokens": [_total_tokens(row) or 0 for row in rows],
    }
    return {name: statistics(values) for name, values in columns.items()} if rows else {}


def _fraction(number: int, rows: int) -> float:
    return number / rows if rows else 0.0
