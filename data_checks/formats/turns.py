"""What formats share: columns to turns, numbers and names, and the columns that no field holds."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

import orjson

from data_checks.formats.base import RowError
from data_checks.naming import name_columns
from data_checks.rows import Reason, Turn, Turns, kind_of

ROLE_TABLE = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""What a message's role is called in the wild -> our role."""
NO_EXTRA = "{}"
MEDIA_COLUMNS = ("images", "image", "videos", "audios")
SCORE_COLUMNS = {
    "margin": ("margin",),
    "chosen_score": ("chosen_score", "score_chosen", "chosen-rating", "chosen_rating"),
    "rejected_score": ("rejected_score", "score_rejected", "rejected-rating", "rejected_rating"),
}
"""Field -> the columns that may hold it, the first one that is there counts."""
SCORE_NAMES = frozenset(name for names in SCORE_COLUMNS.values() for name in names)


def as_turns(value: Any, column: str, role: str, carried: Collection[str] = ()) -> Turns:
    """Return the turns of a column that is a text (one turn of `role`) or a list of chat messages.

    Args:
        value: of the column.
        column: its name, for messages.
        role: whose turn a text is.
        carried: keys of a message, beside role and content, that the caller keeps elsewhere.

    Raises:
        RowError: it is neither, or something of a message would be lost.
    """
    if isinstance(value, str):
        return (Turn(role, value),)
    if not isinstance(value, list):
        raise RowError(f"{column} is {kind_of(value)}, not text or a list of messages")
    return tuple([as_turn(message, f"{column}[{index}]", carried) for index, message in enumerate(value)])


def as_turn(message: Any, where: str, carried: Collection[str] = ()) -> Turn:
    """Return one chat message, `{role, content}` or `{from, value}`, as a turn.

    Roles are translated through `ROLE_TABLE`; content may be a text or a list of text parts, which are joined.

    Raises:
        RowError: the role is unknown, or something would be lost: other keys, parts that are no text.
    """
    if not isinstance(message, dict):
        raise RowError(f"{where} is {kind_of(message)}, not a message with role and content")
    role_key, content_key = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
    role, content = message.get(role_key), message.get(content_key)
    if len(message) != 2 or content is None:
        present = {key for key, item in message.items() if item is not None}
        if unknown := present - {role_key, content_key, *carried}:
            raise RowError(f"{where} has {name_columns(unknown)}, which would be lost: only role and content are used")
    ours = ROLE_TABLE.get(role) if isinstance(role, str) else None
    if ours is None:
        what = "an unknown role" if isinstance(role, str) else f"{kind_of(role)} as {role_key}"
        raise RowError(f"{where} has {what}; allowed: {', '.join(ROLE_TABLE)}")
    if isinstance(content, list):
        content = _joined_parts(content, f"{where}.{content_key}")
    if not isinstance(content, str):
        raise RowError(f"{where} has {kind_of(content)} as {content_key}, not text")
    return Turn(ours, content)


def _joined_parts(parts: list[Any], where: str) -> str:
    """Return the text of content that is a list of `{type: text, text}` (or `value`) parts."""
    texts = []
    for index, part in enumerate(parts):
        if not isinstance(part, dict):
            raise RowError(f"{where}[{index}] is {kind_of(part)}, not a part with type and text")
        present = {key: item for key, item in part.items() if item is not None}
        if present.get("type", "text") != "text":
            raise RowError(f"{where}[{index}] is no text: only the text of messages is used, and it would be lost")
        if unknown := set(present) - {"type", "text", "value"}:
            raise RowError(f"{where}[{index}] has {name_columns(unknown)}, which would be lost: only text is used")
        if len(set(present) - {"type"}) != 1:
            raise RowError(f"{where}[{index}] has not one of text and value")
        text = present.get("text", present.get("value"))
        if not isinstance(text, str):
            raise RowError(f"{where}[{index}] has {kind_of(text)} as text")
        texts.append(text)
    return "".join(texts)


def without_prompt(prompt: Any, side: Turns, carried: Collection[str] = ()) -> tuple[Turns, Turns]:
    """Return the prompt and the answer of one side, whose messages may repeat the prompt.

    A side that starts with the assistant is an answer alone. Any other side is a whole conversation and must repeat the
    prompt: all its messages, or, where the prompt is a text, that text as its first or last user turn.

    Args:
        prompt: the prompt's column: a text or messages.
        side: the turns of an answer's column.
        carried: as for `as_turns`.

    Raises:
        RowError: the prompt is no prompt, or the side does not repeat it.
    """
    declared = as_turns(prompt, "prompt", "user", carried)
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


def text_of(value: Mapping[str, Any], column: str) -> str:
    """Return a column that must be a text.

    Raises:
        RowError: it is missing or something else.
    """
    text = value.get(column)
    if not isinstance(text, str):
        raise RowError(f"{column} is {kind_of(text)}, not text")
    return text


def number_of(item: Any, column: str) -> float:
    """Return a value that must be a finite number.

    Raises:
        RowError: it is missing, something else (true and false are no numbers), NaN or infinite.
    """
    if isinstance(item, bool) or not isinstance(item, int | float):
        raise RowError(f"{column} is {kind_of(item)}, not a number")
    try:
        result = float(item)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise RowError(f"{column} is not finite")
    return result


def number(value: Mapping[str, Any], columns: tuple[str, ...]) -> float | None:
    """Return the number in the first of the columns that is there, None without any.

    Raises:
        RowError: see `number_of`.
    """
    for column in columns:
        if column in value:
            return number_of(value[column], column)
    return None


def scores_of(value: Mapping[str, Any]) -> tuple[float | None, float | None, float | None]:
    """Return margin, chosen score and rejected score of a row of `chosen` and `rejected`, None for what it lacks.

    Raises:
        RowError: see `number_of`.
    """
    if SCORE_NAMES.isdisjoint(value):
        return None, None, None
    margin, chosen, rejected = (number(value, columns) for columns in SCORE_COLUMNS.values())
    return margin, chosen, rejected


def integer(value: Mapping[str, Any], column: str, lowest: int, highest: int) -> int:
    """Return a column that must be a whole number in a range.

    A number such as 1.0 is whole: tables with gaps hold their integers so.

    Raises:
        RowError: it is missing, something else (true and false are no numbers), or out of range.
    """
    result = number_of(value.get(column), column)
    if not result.is_integer():
        raise RowError(f"{column} is no whole number")
    if not lowest <= result <= highest:
        raise RowError(f"{column} is out of range; allowed: {lowest} to {highest}")
    return int(result)


def source_of(value: Mapping[str, Any], default: str) -> str:
    """Return the row's `source`, or the name of the data where it names none.

    Raises:
        RowError: it is no text.
    """
    named = value.get("source", default)
    if not isinstance(named, str):
        raise RowError(f"source is {kind_of(named)}, not text")
    return named


def tools_of(value: Mapping[str, Any]) -> str | None:
    """Return the `tools` column as JSON text, None without one or with an empty one.

    Raises:
        RowError: it is a text that is no JSON, or neither a text nor a list.
    """
    tools = value.get("tools")
    if tools is None or tools == "" or tools == []:
        return None
    if isinstance(tools, str):
        try:
            json.loads(tools)
        except (ValueError, RecursionError):
            raise RowError("tools is a text that is no JSON") from None
        return tools
    if not isinstance(tools, list):
        raise RowError(f"tools is {kind_of(tools)}, not JSON text or a list")
    return json_text(tools, "tools")


def refuse_media(value: Mapping[str, Any]) -> None:
    """Refuse rows that show the model more than text.

    Raises:
        RowError: there are images, videos or sounds, which would be lost.
    """
    for column in MEDIA_COLUMNS:
        if value.get(column):
            raise RowError(f"{column} is not empty: only text is used, and it would be lost")


def extra_of(value: Mapping[str, Any], used: Collection[str]) -> str:
    """Return the columns that no field holds, as JSON text with sorted keys.

    Args:
        value: the row.
        used: columns that need not be kept.

    Raises:
        RowError: they are no JSON, or infinite numbers.
    """
    rest = {column: item for column, item in value.items() if column not in used}
    return json_text(rest, "the other columns") if rest else NO_EXTRA


def json_text(value: Any, what: str) -> str:
    """Return a value as compact JSON text with sorted keys. NaN, by which tables write "missing", becomes null.

    Args:
        value: of lists, objects, texts, numbers; what JSON does not know (dates, bytes) is written as text.
        what: its name, for messages.

    Raises:
        RowError: it is no JSON: infinite numbers, lone surrogates, nested too deep.
    """
    try:
        dumped = orjson.dumps(value, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
        # Null may be null, or a number that JSON does not know.
        if b"null" in dumped:
            return _dump(_without_nan(value, what), what)
        return dumped.decode()
    except TypeError:
        return _dump(value, what)


def _dump(value: Any, what: str) -> str:
    try:
        text = json.dumps(
            value, sort_keys=True, ensure_ascii=False, allow_nan=False, default=str, separators=(",", ":")
        )
        text.encode()
    except (ValueError, TypeError, RecursionError):
        # The reason that the library gives may quote a value.
        raise RowError(f"{what} cannot be written as JSON (nested too deep, infinite numbers or broken text)") from None
    return text


def _without_nan(value: Any, what: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        if math.isinf(value):
            raise RowError(f"{what} cannot be written as JSON: a number is infinite")
        return None
    if isinstance(value, dict):
        return {key: _without_nan(item, what) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item, what) for item in value]
    return value
