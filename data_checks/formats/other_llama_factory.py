"""LLaMA-Factory's rows for KTO: conversations, and instructions with an output, each with a label."""

from __future__ import annotations

from typing import Any

from data_checks.formats.base import Format, Options, Result, RowError, Sign
from data_checks.formats.llama_factory import WEIGHT, alpaca_prompt, system_turns
from data_checks.formats.other_feedback import ANSWER_COLUMNS
from data_checks.formats.turns import MEDIA_COLUMNS, as_turns, extra_of, refuse_media, source_of, text_of, tools_of
from data_checks.naming import name_columns
from data_checks.rows import FeedbackRow, RawRow, Turn, kind_of

CONVERSATIONS = ("messages", "conversations")
TAGS = ("kto_tag", "label")
NOT_BESIDE = frozenset({"chosen", "rejected", "chosen_messages", "rejected_messages", *ANSWER_COLUMNS})


def fits_kto(value: dict[str, Any]) -> bool:
    named = [column for column in CONVERSATIONS if isinstance(value.get(column), list)]
    if len(named) != 1 or not NOT_BESIDE.isdisjoint(value):
        return False
    messages = value[named[0]]
    if not all(isinstance(message, dict) and ("role" in message or "from" in message) for message in messages):
        return False
    return any(isinstance(value.get(tag), bool) for tag in TAGS)


def kto_rows(row: RawRow, options: Options) -> list[Result]:
    """Return the judged last answer of a conversation.

    Raises:
        RowError: it holds none.
    """
    value = row.value or {}
    named = [column for column in CONVERSATIONS if column in value]
    if len(named) != 1:
        raise RowError(f"not one of messages and conversations; columns: {name_columns(value)}")
    refuse_media(value)
    messages, tags = value[named[0]], _tags(value)
    if not isinstance(messages, list):
        raise RowError(f"{named[0]} is {kind_of(messages)}, not a list of messages")
    turns = as_turns(messages, named[0], "user", (WEIGHT,))
    used = {named[0], *tags, "source", "tools", *MEDIA_COLUMNS}
    if "system" in value and not (turns and turns[0].role == "system"):
        turns = (*system_turns(value), *turns)
        used.add("system")
    weights = [message.get(WEIGHT) for message in messages if isinstance(message, dict)]
    others = value | {f"{named[0]}_{WEIGHT}s": weights} if any(weight is not None for weight in weights) else value
    extra = extra_of(others, used)
    source, tools = source_of(value, options.source), tools_of(value)
    return [FeedbackRow(row, source, turns[:-1], turns[-1:], judgement(value, tags), tools=tools, extra=extra)]


def _tags(value: dict[str, Any]) -> list[str]:
    """Return the columns that judge: a `label` that is not true or false means something else beside a `kto_tag`."""
    if "kto_tag" in value and not isinstance(value.get("label"), bool):
        return ["kto_tag"]
    return [tag for tag in TAGS if tag in value]


def judgement(value: dict[str, Any], tags: list[str]) -> bool | None:
    """Return what the columns of `tags` say, None without any.

    Raises:
        RowError: one is not true or false, or they contradict each other.
    """
    for tag in tags:
        if not isinstance(value[tag], bool):
            raise RowError(f"{tag} is {kind_of(value[tag])}, not true or false")
    labels = {value[tag] for tag in tags}
    if len(labels) > 1:
        raise RowError(f"{' and '.join(tags)} contradict each other")
    return labels.pop() if labels else None


def fits_alpaca_kto(value: dict[str, Any]) -> bool:
    texts = isinstance(value.get("instruction"), str) and isinstance(value.get("output"), str)
    return texts and isinstance(value.get("kto_tag"), bool) and "chosen" not in value and "rejected" not in value


def alpaca_kto_rows(row: RawRow, options: Options) -> list[Result]:
    """Return the judged output of an instruction.

    Raises:
        RowError: it holds none.
    """
    value = row.value or {}
    refuse_media(value)
    prompt = alpaca_prompt(value)
    answer = Turn("assistant", text_of(value, "output"))
    tag = judgement(value, ["kto_tag"] if "kto_tag" in value else [])
    used = {"instruction", "input", "output", "kto_tag", "system", "history", "source", "tools", *MEDIA_COLUMNS}
    extra, tools = extra_of(value, used), tools_of(value)
    return [FeedbackRow(row, source_of(value, options.source), prompt, (answer,), tag, tools=tools, extra=extra)]


LLAMA_FACTORY_KTO = Format(
    name="llama_factory_kto",
    kind="feedback",
    summary="messages or conversations ({role, content} or {from, value}, the last one the judged answer), and kto_tag "
    "or label (true or false); system and tools may be there",
    columns=frozenset({*CONVERSATIONS, *TAGS, "system", "tools", "source", *MEDIA_COLUMNS}),
    fits=fits_kto,
    convert=kto_rows,
    refines=frozenset({"prompts"}),
    label_kind="unpaired",
    signs=(
        Sign("have messages or conversations", lambda value: any(column in value for column in CONVERSATIONS)),
        Sign("have kto_tag or label", lambda value: any(tag in value for tag in TAGS)),
    ),
)

LLAMA_FACTORY_ALPACA_KTO = Format(
    name="llama_factory_alpaca_kto",
    kind="feedback",
    summary="instruction, output and kto_tag (true or false); input, system and history may be there",
    columns=frozenset(
        {"instruction", "input", "output", "kto_tag", "system", "history", "tools", "source", *MEDIA_COLUMNS}
    ),
    fits=fits_alpaca_kto,
    convert=alpaca_kto_rows,
    label_kind="unpaired",
    needs=("instruction", "output", "kto_tag"),
)
