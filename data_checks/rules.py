"""What makes a row unusable: rules on one row, and rules on all rows together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from data_checks.config import CheckDataConfig
from data_checks.keys import feedback_keys, pair_keys, turns_key
from data_checks.rows import FeedbackRow, Finding, PairRow, PromptItem, Reason, Turns

NEXT_ROLES = {
    "start": {"system", "user"},
    "system": {"user"},
    "user": {"assistant"},
    "assistant": {"user", "tool"},
    "tool": {"assistant", "tool"},
}


def pair_findings(row: PairRow) -> list[Finding]:
    """Return what is wrong with one pair, tokens aside."""
    findings = answer_findings(row.chosen_prompt, row.chosen, "chosen")
    findings += answer_findings(row.rejected_prompt, row.rejected, "rejected")
    if row.chosen_prompt != row.rejected_prompt:
        findings.append(Finding(Reason.PROMPT_MISMATCH, _difference(row.chosen_prompt, row.rejected_prompt)))
    if detail := prompt_error(row.chosen_prompt):
        findings.append(Finding(Reason.EMPTY_PROMPT, detail))
    if is_identical(row):
        findings.append(Finding(Reason.IDENTICAL_RESPONSES, "chosen and rejected are equal after trimming"))
    return findings


def answer_findings(prompt: Turns, answer: Turns, side: str | None = None) -> list[Finding]:
    """Return what is wrong with one answer and with its place after the prompt."""
    findings = []
    if not answer or answer[-1].role != "assistant":
        last = answer[-1].role if answer else "none"
        findings.append(Finding(Reason.LAST_TURN_NOT_ASSISTANT, f"role of the last turn: {last}", side))
    elif (turn := blank_turn(answer)) is not None:
        findings.append(Finding(Reason.EMPTY_RESPONSE, f"turn {turn} of the answer is blank after trimming", side))
    if detail := role_order_error(prompt + answer) or _user_inside(answer):
        findings.append(Finding(Reason.ROLE_ORDER, detail, side))
    return findings


def feedback_findings(row: FeedbackRow) -> list[Finding]:
    """Return what is wrong with one judged answer, tokens aside."""
    findings = answer_findings(row.prompt, row.answer)
    if detail := prompt_error(row.prompt):
        findings.append(Finding(Reason.EMPTY_PROMPT, detail))
    if row.label is None and row.rating is None:
        findings.append(Finding(Reason.MISSING_JUDGEMENT, "neither label nor thumb nor rating"))
    return findings


def prompt_findings(item: PromptItem) -> list[Finding]:
    """Return what is wrong with one prompt, tokens aside."""
    findings = []
    if detail := prompt_error(item.prompt):
        findings.append(Finding(Reason.EMPTY_PROMPT, detail))
    if item.prompt and item.prompt[-1].role not in ("user", "tool"):
        findings.append(Finding(Reason.LAST_TURN_NOT_USER, f"role of the last turn: {item.prompt[-1].role}"))
    if detail := role_order_error(item.prompt):
        findings.append(Finding(Reason.ROLE_ORDER, detail))
    return findings


def prompt_error(prompt: Turns) -> str | None:
    """Return why a prompt is empty, or None."""
    if not prompt:
        return "no turn comes before the answer"
    turn = blank_turn(prompt)
    return None if turn is None else f"turn {turn} of the prompt is blank after trimming"


def blank_turn(turns: Turns) -> int | None:
    """Return the number (from 1) of the first user or assistant turn without text; others may be blank."""
    for number, turn in enumerate(turns, start=1):
        if turn.role in ("user", "assistant") and not turn.content.strip():
            return number
    return None


def role_order_error(turns: Turns) -> str | None:
    """Return the first place where a role may not follow the one before it, or None."""
    before = "start"
    for number, turn in enumerate(turns, start=1):
        if turn.role not in NEXT_ROLES[before]:
            return f"turn {number} is {turn.role} after {before}"
        before = turn.role
    return None


def _user_inside(answer: Turns) -> str | None:
    """Return where a user speaks before the last turn of an answer: a preference compares answers to one prompt."""
    number = next((number for number, turn in enumerate(answer[:-1], start=1) if turn.role == "user"), None)
    return None if number is None else f"turn {number} of the answer is the user's: it belongs to the prompt"


def is_identical(row: PairRow) -> bool:
    """Return whether both answers are equal after trimming. Two blank answers are blank, not identical."""
    trimmed = [[(turn.role, turn.content.strip()) for turn in side] for side in (row.chosen, row.rejected)]
    return trimmed[0] == trimmed[1] and any(content for _, content in trimmed[0])


def _difference(chosen: Turns, rejected: Turns) -> str:
    if len(chosen) != len(rejected):
        return f"{len(chosen)} turns before the chosen answer, {len(rejected)} before the rejected one"
    number = next(n for n, (a, b) in enumerate(zip(chosen, rejected, strict=True), start=1) if a != b)
    return f"turn {number} differs between the sides"


def mark_duplicates_and_conflicts(rows: Sequence[PairRow], config: CheckDataConfig) -> tuple[int, int]:
    """Add findings for conflicting and repeated pairs, as far as the config does not keep them.

    Args:
        rows: pairs without any other finding, in file order.
        config: its `duplicates` and `conflicts` say what to do.

    Returns:
        Number of rows that repeat an earlier one, and number of rows in a conflict; counted whatever the policy.
    """
    keys = [pair_keys(row) for row in rows]
    present = {key for key, _ in keys}
    num_duplicates = num_conflicts = 0
    seen: dict[str, PairRow] = {}
    for row, (key, exchanged) in zip(rows, keys, strict=True):
        # Answers that differ in case or whitespace only have one key both ways, and contradict nothing.
        if exchanged in present and exchanged != key:
            num_conflicts += 1
            if config.conflicts == "quarantine_all":
                row.findings.append(Finding(Reason.CONFLICTING_PAIR, "another row prefers these answers the other way"))
                continue
        if (first := seen.setdefault(key, row)) is not row:
            num_duplicates += 1
            if config.duplicates == "keep_first":
                detail = f"repeats row {first.origin.number} of {first.origin.file}"
                row.findings.append(Finding(Reason.DUPLICATE_PAIR, detail))
    return num_duplicates, num_conflicts


def mark_feedback_duplicates_and_conflicts(rows: Sequence[FeedbackRow], config: CheckDataConfig) -> tuple[int, int]:
    """Do for feedback what `mark_duplicates_and_conflicts` does for pairs.

    A conflict is one answer to one prompt that is labelled both ways. Ratings that differ contradict nothing: several
    people may have given them.
    """
    keys = [feedback_keys(row) for row in rows]
    labels: dict[str, set[bool]] = {}
    for row, (answer, _) in zip(rows, keys, strict=True):
        if row.label is not None:
            labels.setdefault(answer, set()).add(row.label)
    num_duplicates = num_conflicts = 0
    seen: dict[str, FeedbackRow] = {}
    for row, (answer, key) in zip(rows, keys, strict=True):
        if row.label is not None and len(labels[answer]) > 1:
            num_conflicts += 1
            if config.conflicts == "quarantine_all":
                detail = "another row has the other label for the same answer"
                row.findings.append(Finding(Reason.CONFLICTING_LABELS, detail))
                continue
        if (first := seen.setdefault(key, row)) is not row:
            num_duplicates += 1
            if config.duplicates == "keep_first":
                detail = f"repeats row {first.origin.number} of {first.origin.file}"
                row.findings.append(Finding(Reason.DUPLICATE_FEEDBACK, detail))
    return num_duplicates, num_conflicts


def mark_repeated_prompts(items: Iterable[PromptItem]) -> None:
    """Add a finding to each prompt whose text or id an earlier usable prompt of the same file has."""
    keys: tuple[tuple[str, Callable[[PromptItem], str]], ...] = (
        ("the prompt", lambda item: turns_key(item.prompt)),
        ("the prompt_id", lambda item: item.prompt_id),
    )
    seen: list[dict[str, PromptItem]] = [{}, {}]
    for item in items:
        if item.findings:
            continue
        for (what, key), known in zip(keys, seen, strict=True):
            first = known.get(key(item))
            if first is not None and first.origin is not None:
                detail = f"{what} repeats row {first.origin.number}"
                item.findings.append(Finding(Reason.DUPLICATE_PROMPT, detail))
                break
        else:
            for (_, key), known in zip(keys, seen, strict=True):
                known[key(item)] = item
