"""Evaluation prompts are held out: no pair, feedback row or RL prompt may share one."""

from __future__ import annotations

from collections.abc import Iterable

from data_checks.keys import group_id
from data_checks.rows import FeedbackRow, Finding, PairRow, PromptItem, Reason


def mark_held_out(
    rows: Iterable[PairRow | FeedbackRow | PromptItem], evaluation_groups: frozenset[str] | set[str]
) -> None:
    """Add a finding to each row without another one whose prompt is an evaluation prompt.

    Prompts are the same when they differ in case, whitespace, Unicode form or system turns only.
    """
    for row in rows:
        if not row.findings and group_id(row.prompt) in evaluation_groups:
            row.findings.append(Finding(Reason.PROMPT_IN_EVALUATION, "the prompt is one of the evaluation's"))


def count_shared_groups(first: Iterable[str], second: Iterable[str]) -> int:
    """Return how many prompt groups occur on both sides."""
    return len(set(first) & set(second))
