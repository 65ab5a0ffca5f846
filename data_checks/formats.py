"""Readable rows to pairs and prompts. Conversations are cut at turns, never at characters."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from data_checks.keys import exact_prompt_id
from data_checks.rows import (
    ROLES,
    FeedbackRow,
    Finding,
    PairRow,
    PromptItem,
    RawRow,
    Reason,
    Turn,
    Turns,
    kind_of,
    name_columns,
)

HH_MARKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
HH_ROLES = {"Human": "user", "Assistant": "assistant"}
SCORE_COLUMNS = {
    "margin": ("margin",),
    "chosen_score": ("chosen_score", "score_chosen"),
    "rejected_score": ("rejected_score", "score_rejected"),
}
ANSWER_COLUMNS = ("completion", "response", "answer")
THUMBS = {"up": True, "down": False}
FEEDBACK_COLUMNS = {"prompt", *ANSWER_COLUMNS, "label", "thumb", "rating", "source"}
PAIR_COLUMNS = {"prompt", "chosen", "rejected", "source", *(name for names in SCORE_COLUMNS.values() for name in names)}


class RowError(ValueError):
    """A row is not what its format says; the message becomes the finding's detail."""

    def __init__(self, detail: str, reason: Reason = Reason.WRONG_TYPE) -> None:
        super().__init__(detail)
        self.finding = Finding(reason, detail)


def parse_pair(row: RawRow, format_name: str, source: str) -> PairRow | Finding:
    """Return the pair that a readable row holds, or the finding that says why it holds none.

    Args:
        row: with a value.
        format_name: `pairs` or `hh`.
        source: name of the data where the row has no `source` text.
    """
    value = row.value or {}
    try:
        sides = _hh_sides(value) if format_name == "hh" else _pair_sides(value)
        numbers = {name: _number(value, columns) for name, columns in SCORE_COLUMNS.items()}
        named = _source(value, source)
    except RowError as error:
        return error.finding
    return PairRow(row, named, *sides, numbers["margin"], numbers["chosen_score"], numbers["rejected_score"])


def parse_feedback(row: RawRow, source: str, rating_threshold: float | None) -> FeedbackRow | Finding:
    """Return the judged answer that a readable row holds, or the finding that says why it holds none.

    Args:
        row: with a value.
        source: name of the data where the row has no `source` text.
        rating_threshold: ratings from here on are good, for rows without another judgement; null: not said.
    """
    value = row.value or {}
    try:
        named = [column for column in ANSWER_COLUMNS if column in value]
        if "prompt" not in value or not named:
            missing = "answer (completion, response or answer)" if "prompt" in value else "prompt"
            raise RowError(f"no {missing}; columns: {name_columns(value)}")
        if len(named) > 1:
            raise RowError(f"{' and '.join(named)} are both there: which one was judged is unknown")
        prompt, answer = _without_prompt(value["prompt"], _as_turns(value[named[0]], named[0], "assistant"))
        rating = _number(value, ("rating",))
        label = _label(value)
        if label is None and rating is not None and rating_threshold is not None:
            label = rating >= rating_threshold
        return FeedbackRow(row, _source(value, source), prompt, answer, label, rating)
    except RowError as error:
        return error.finding


def _label(value: dict[str, Any]) -> bool | None:
    label, thumb = value.get("label"), value.get("thumb")
    if label is not None and not isinstance(label, bool):
        raise RowError(f"label is {kind_of(label)}, not true or false")
    if thumb is None:
        return label
    if not isinstance(thumb, str) or thumb not in THUMBS:
        what = "another text" if isinstance(thumb, str) else kind_of(thumb)
        raise RowError(f"thumb is {what}, not up or down")
    if label is not None and label != THUMBS[thumb]:
        raise RowError("label and thumb contradict each other")
    return THUMBS[thumb]


def _source(value: dict[str, Any], default: str) -> str:
    named = value.get("source", default)
    if not isinstance(named, str):
        raise RowError(f"source is {kind_of(named)}, not text")
    return named


def parse_prompt(row: RawRow) -> PromptItem | Finding:
    """Return the prompt that a readable row holds, or the finding that says why it holds none."""
    value = row.value or {}
    try:
        if "prompt" not in value:
            raise RowError(f"no prompt; columns: {name_columns(value)}")
        prompt = _as_turns(value["prompt"], "prompt", "user")
        prompt_id = value.get("prompt_id", exact_prompt_id(prompt))
        if not isinstance(prompt_id, str) or not prompt_id.strip():
            raise RowError(f"prompt_id is {kind_of(prompt_id)}, not a text that names the prompt")
        rest = {key: item for key, item in value.items() if key not in ("prompt", "prompt_id")}
        try:
            extra = json.dumps(rest, sort_keys=True, ensure_ascii=False, allow_nan=False, default=str)
        except (ValueError, TypeError, RecursionError) as error:
            raise RowError(f"the other columns are no JSON: {error}") from None
    except RowError as error:
        return error.finding
    return PromptItem(row, prompt, prompt_id, extra)


def split_transcript(text: str) -> Turns:
    r"""Return the turns of a `\n\nHuman: … \n\nAssistant: …` transcript.

    One space after a marker belongs to the marker; all other characters are kept.

    Raises:
        RowError: the text does not start with a marker.

    >>> split_transcript("\n\nHuman: Hi\n\nAssistant: Hello\nthere")
    (Turn(role='user', content='Hi'), Turn(role='assistant', content='Hello\nthere'))
    """
    markers = list(HH_MARKER.finditer(text))
    if not markers or markers[0].start() != 0:
        raise RowError("the transcript does not start with a Human or Assistant marker")
    ends = [*(marker.start() for marker in markers[1:]), len(text)]
    return tuple(
        Turn(HH_ROLES[marker[1]], text[marker.end() : end].removeprefix(" "))
        for marker, end in zip(markers, ends, strict=True)
    )


def _hh_sides(value: dict[str, Any]) -> tuple[Turns, Turns, Turns, Turns]:
    sides: list[Turns] = []
    for side in ("chosen", "rejected"):
        if not isinstance(value.get(side), str):
            raise RowError(f"{side} is {kind_of(value.get(side))}, not a transcript text")
        turns = split_transcript(value[side])
        sides += [turns[:-1], turns[-1:]]
    return sides[0], sides[1], sides[2], sides[3]


def _pair_sides(value: dict[str, Any]) -> tuple[Turns, Turns, Turns, Turns]:
    """Return chosen prompt, chosen answer, rejected prompt, rejected answer."""
    for side in ("chosen", "rejected"):
        if side not in value:
            raise RowError(f"no {side}; columns: {name_columns(value)}")
    chosen, rejected = (_as_turns(value[side], side, "assistant") for side in ("chosen", "rejected"))
    if "prompt" in value:
        chosen_prompt, chosen = _without_prompt(value["prompt"], chosen)
        rejected_prompt, rejected = _without_prompt(value["prompt"], rejected)
        return chosen_prompt, chosen, rejected_prompt, rejected
    for side in ("chosen", "rejected"):
        if isinstance(value[side], str):
            raise RowError(f"no prompt, and {side} is a text: nothing tells where the answer starts")
    return chosen[:-1], chosen[-1:], rejected[:-1], rejected[-1:]


def _without_prompt(prompt: Any, side: Turns) -> tuple[Turns, Turns]:
    """Return the prompt and the answer of one side, whose messages may repeat the prompt.

    A side that starts with the assistant is an answer alone. Any other side is a whole conversation and must repeat the
    prompt: all its messages, or, where the prompt is a text, that text as its first or last user turn.
    """
    declared = _as_turns(prompt, "prompt", "user")
    if not side or side[0].role == "assistant":
        return declared, side
    if isinstance(prompt, str):
        # The text stands for the conversation before the answer, which the messages hold in full.
        return _conversation_of_text(prompt, side)
    if side[: len(declared)] == declared and len(side) > len(declared):
        return declared, side[len(declared) :]
    raise RowError("a side is a whole conversation that does not start with the prompt", Reason.PROMPT_MISMATCH)


def _conversation_of_text(prompt: str, side: Turns) -> tuple[Turns, Turns]:
    users = [turn.content for turn in side[:-1] if turn.role == "user"]
    if not users:
        # A single turn that is not the assistant's: reported by the rule on last turns.
        return (Turn("user", prompt),), side
    if prompt not in (users[0], users[-1]):
        detail = "the prompt's text is neither the first nor the last user turn of a side"
        raise RowError(detail, Reason.PROMPT_MISMATCH)
    return side[:-1], side[-1:]


def _as_turns(value: Any, column: str, role: str) -> Turns:
    """Return the turns of a column that is a text (one turn of `role`) or a list of chat messages."""
    if isinstance(value, str):
        return (Turn(role, value),)
    if not isinstance(value, list):
        raise RowError(f"{column} is {kind_of(value)}, not text or a list of messages")
    return tuple(_as_turn(message, f"{column}[{index}]") for index, message in enumerate(value))


def _as_turn(message: Any, where: str) -> Turn:
    if not isinstance(message, dict):
        raise RowError(f"{where} is {kind_of(message)}, not a message with role and content")
    present = {key: item for key, item in message.items() if item is not None}
    if unknown := set(present) - {"role", "content"}:
        raise RowError(f"{where} has {name_columns(unknown)}, which would be lost: only role and content are used")
    role, content = present.get("role"), present.get("content")
    if role not in ROLES:
        what = "an unknown role" if isinstance(role, str) else f"{kind_of(role)} as role"
        raise RowError(f"{where} has {what}; allowed: {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise RowError(f"{where} has {kind_of(content)} as content, not text")
    return Turn(role, content)


def _number(value: dict[str, Any], columns: tuple[str, ...]) -> float | None:
    for column in columns:
        if column in value:
            number = value[column]
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise RowError(f"{column} is {kind_of(number)}, not a number")
            try:
                result = float(number)
            except OverflowError:
                result = math.inf
            if not math.isfinite(result):
                raise RowError(f"{column} is not finite")
            return result
    return None
