"""Pairs as LLaMA-Factory lays them out: `instruction` with two texts, or a conversation with two last messages."""

from __future__ import annotations

from typing import Any

from data_checks.formats.base import Format, Options, Result, RowError, Sign
from data_checks.formats.pairs import is_messages
from data_checks.formats.turns import as_turn, as_turns, extra_of, json_text, refuse_media, source_of, text_of, tools_of
from data_checks.rows import PairRow, RawRow, Turn, Turns, kind_of

ALPACA_NEEDS = ("instruction", "chosen", "rejected")
ALPACA_COLUMNS = frozenset((*ALPACA_NEEDS, "input", "system", "history", "source", "tools"))
CONVERSATION = ("conversations", "messages")
SHAREGPT_COLUMNS = frozenset(
    (*CONVERSATION, "chosen", "rejected", "chosen_messages", "rejected_messages", "system", "source", "tools")
)
WEIGHT = "loss_weight"
"""Key of a message that says how much it counts in training: kept beside the pair, and not used."""


def alpaca_prompt(value: dict[str, Any]) -> Turns:
    """Return the conversation before the answer: system, history, then instruction and input on lines of their own.

    Raises:
        RowError: one of them is of another type.
    """
    turns: list[Turn] = system_turns(value)
    history = value.get("history") or []
    if not isinstance(history, list):
        raise RowError(f"history is {kind_of(history)}, not a list of [question, answer]")
    for index, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowError(f"history[{index}] is not a question and an answer, two texts")
        turns += [Turn("user", pair[0]), Turn("assistant", pair[1])]
    asked = text_of(value, "instruction")
    if value.get("input"):
        asked = f"{asked}\n{text_of(value, 'input')}" if asked else text_of(value, "input")
    return (*turns, Turn("user", asked))


def system_turns(value: dict[str, Any]) -> list[Turn]:
    """Return the turn of a `system` column, none where it is missing or empty.

    Raises:
        RowError: it is no text.
    """
    return [Turn("system", text_of(value, "system"))] if value.get("system") else []


def _convert_alpaca(row: RawRow, options: Options) -> list[Result]:
    value = row.value or {}
    prompt = alpaca_prompt(value)
    answers = [(Turn("assistant", text_of(value, side)),) for side in ("chosen", "rejected")]
    return [_pair(row, options, (prompt, answers[0], prompt, answers[1]), extra_of(value, ALPACA_COLUMNS))]


def _pair(row: RawRow, options: Options, sides: tuple[Turns, Turns, Turns, Turns], extra: str) -> PairRow:
    value = row.value or {}
    refuse_media(value)
    return PairRow(row, source_of(value, options.source), *sides, tools=tools_of(value), extra=extra)


def _convert_sharegpt(row: RawRow, options: Options) -> list[Result]:
    value = row.value or {}
    system = tuple(system_turns(value))
    if "chosen_messages" in value or "rejected_messages" in value:
        sides: list[Turns] = []
        for column in ("chosen_messages", "rejected_messages"):
            turns = _conversation(value, column)
            sides += [system + turns[:-1], turns[-1:]]
        used = SHAREGPT_COLUMNS - {*CONVERSATION, "chosen", "rejected"}
    else:
        column = "conversations" if "conversations" in value else "messages"
        prompt = system + _conversation(value, column)
        chosen, rejected = (_answer(value, side) for side in ("chosen", "rejected"))
        sides = [prompt, chosen, prompt, rejected]
        used = SHAREGPT_COLUMNS - {"chosen_messages", "rejected_messages", *CONVERSATION} | {column}
    weights = {f"{name}_{WEIGHT}s": found for name in sorted(used) if (found := _weights(value.get(name)))}
    rest = {name: item for name, item in value.items() if name not in used} | weights
    return [_pair(row, options, (sides[0], sides[1], sides[2], sides[3]), json_text(rest, "the other columns"))]


def _conversation(value: dict[str, Any], column: str) -> Turns:
    if not isinstance(value.get(column), list):
        raise RowError(f"{column} is {kind_of(value.get(column))}, not a list of messages")
    return as_turns(value[column], column, "user", (WEIGHT,))


def _answer(value: dict[str, Any], side: str) -> Turns:
    message = value.get(side)
    if isinstance(message, list):
        return as_turns(message, side, "assistant", (WEIGHT,))
    return (as_turn(message, side, (WEIGHT,)),)


def _weights(messages: Any) -> list[Any]:
    """Return the weights of a list of messages, empty where none has one."""
    listed = messages if isinstance(messages, list) else [messages]
    weights = [message.get(WEIGHT) for message in listed if isinstance(message, dict)]
    return [] if all(weight is None for weight in weights) else weights


def _fits_alpaca(value: dict[str, Any]) -> bool:
    return "prompt" not in value and all(isinstance(value.get(name), str) for name in ALPACA_NEEDS)


def _fits_sharegpt(value: dict[str, Any]) -> bool:
    if is_messages(value.get("chosen_messages")) and is_messages(value.get("rejected_messages")):
        return True
    conversation = value.get("conversations", value.get("messages"))
    return is_messages(conversation) and all(isinstance(value.get(side), dict) for side in ("chosen", "rejected"))


LLAMA_FACTORY_ALPACA = Format(
    name="llama_factory_alpaca",
    kind="pairs",
    summary="instruction, chosen and rejected as texts; input, system and history (of [question, answer]) may be there",
    columns=ALPACA_COLUMNS,
    fits=_fits_alpaca,
    convert=_convert_alpaca,
    needs=ALPACA_NEEDS,
)
LLAMA_FACTORY_SHAREGPT = Format(
    name="llama_factory_sharegpt",
    kind="pairs",
    summary="conversations (messages {from, value}), chosen and rejected as one message each; or chosen_messages and "
    "rejected_messages",
    columns=SHAREGPT_COLUMNS,
    fits=_fits_sharegpt,
    convert=_convert_sharegpt,
    needs=("conversations", "chosen", "rejected"),
    signs=(Sign("have chosen_messages and rejected_messages", lambda value: "chosen_messages" in value),),
)
