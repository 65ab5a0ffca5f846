"""What makes one row unusable, tokens aside. What needs all rows together is in `decide`."""

from __future__ import annotations

from data_checks.rows import FeedbackRow, Finding, PairRow, PromptItem, Reason, StepwiseRow, Turns

NEXT_ROLES = {
    "start": {"system", "user"},
    "system": {"user"},
    "user": {"assistant"},
    "assistant": {"user", "tool"},
    "tool": {"assistant", "tool"},
}


def pair_findings(row: PairRow) -> list[Finding]:
    """Return what is wrong with one pair, tokens aside."""
    if _is_plain(row):
        return []
    findings = answer_findings(row.chosen_prompt, row.chosen, "chosen")
    findings += answer_findings(row.rejected_prompt, row.rejected, "rejected")
    # Where a side does not end with an answer, there are no two answers to compare, nor what came before them.
    has_answers = not any(finding.reason is Reason.LAST_TURN_NOT_ASSISTANT for finding in findings)
    if has_answers and row.chosen_prompt != row.rejected_prompt:
        findings.append(Finding(Reason.PROMPT_MISMATCH, _difference(row.chosen_prompt, row.rejected_prompt)))
    if detail := prompt_error(row.chosen_prompt):
        findings.append(Finding(Reason.EMPTY_PROMPT, detail))
    if has_answers and is_identical(row):
        findings.append(Finding(Reason.IDENTICAL_RESPONSES, "chosen and rejected are equal after trimming"))
    return findings


def _is_plain(row: PairRow) -> bool:
    """Return whether a pair is one question with two different answers: most are, and need no closer look."""
    if not len(row.chosen_prompt) == len(row.chosen) == len(row.rejected) == 1:
        return False
    if row.chosen_prompt != row.rejected_prompt:
        return False
    (asker, question), (first, chosen), (second, rejected) = row.chosen_prompt[0], row.chosen[0], row.rejected[0]
    if asker != "user" or first != "assistant" or second != "assistant":
        return False
    return chosen.strip() != rejected.strip() and not any(map(is_blank, (question, chosen, rejected)))


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


def stepwise_findings(row: StepwiseRow) -> list[Finding]:
    """Return what is wrong with an answer in steps, tokens aside."""
    findings = []
    if (turn := blank_turn(row.answer)) is not None or not row.answer:
        what = f"step {turn} is blank after trimming" if row.answer else "the answer has no steps"
        findings.append(Finding(Reason.EMPTY_RESPONSE, what))
    if detail := role_order_error(row.prompt):
        findings.append(Finding(Reason.ROLE_ORDER, detail))
    if detail := prompt_error(row.prompt):
        findings.append(Finding(Reason.EMPTY_PROMPT, detail))
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
        if turn.role in ("user", "assistant") and is_blank(turn.content):
            return number
    return None


UNSEEN = "".join(map(chr, (0xAD, 0x180E, *range(0x200B, 0x2010), *range(0x2060, 0x2065), 0xFEFF)))
"""Characters without width: a text of nothing else is blank."""


def is_blank(text: str) -> bool:
    """Return whether a reader would see nothing.

    >>> [is_blank(text) for text in ("", " \\u200b\\n", "a\\u200b")]
    [True, True, False]
    """
    if not text.strip():
        return True
    return not text.isascii() and not any(not c.isspace() and c not in UNSEEN for c in text)


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
