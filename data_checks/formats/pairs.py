"""Pairs of `chosen` and `rejected`: texts or messages, the prompt in a column of its own or in front of each side."""

from __future__ import annotations

from typing import Any

from data_checks.formats.base import Format, Options, Result, RowError, Sign
from data_checks.formats.markers import opens_answer
from data_checks.formats.turns import (
    NO_EXTRA,
    SCORE_NAMES,
    as_turns,
    extra_of,
    refuse_media,
    scores_of,
    source_of,
    tools_of,
    without_prompt,
)
from data_checks.naming import name_columns
from data_checks.rows import PairRow, RawRow, Turn, Turns

PAIR_COLUMNS = frozenset(("prompt", "chosen", "rejected", "source", "tools", *SCORE_NAMES))
BINARIZED_COLUMNS = PAIR_COLUMNS | {"messages"}


def _convert_pair(row: RawRow, options: Options) -> list[Result]:
    value = row.value or {}
    if len(value) == 3:
        # Most files hold three plain texts.
        prompt, chosen, rejected = value.get("prompt"), value.get("chosen"), value.get("rejected")
        if type(prompt) is type(chosen) is type(rejected) is str:
            asked = (Turn("user", prompt),)
            answers = (Turn("assistant", chosen),), (Turn("assistant", rejected),)
            return [PairRow(row, options.source, asked, answers[0], asked, answers[1])]
    return [_pair(row, value, options, PAIR_COLUMNS)]


def _convert_binarized(row: RawRow, options: Options) -> list[Result]:
    # `messages` repeats the chosen side for supervised training.
    return [_pair(row, row.value or {}, options, PAIR_COLUMNS, repeated="messages")]


def _pair(
    row: RawRow, value: dict[str, Any], options: Options, used: frozenset[str], repeated: str | None = None
) -> PairRow:
    sides = _sides(value)
    if repeated is not None and repeated in value and value[repeated] == value["chosen"]:
        used |= {repeated}
    margin, chosen_score, rejected_score = scores_of(value)
    pair = PairRow(row, source_of(value, options.source), *sides, margin, chosen_score, rejected_score)
    pair.is_tie = margin == 0 or (chosen_score is not None and chosen_score == rejected_score)
    if isinstance(value.get("annotator"), str):
        pair.annotator = value["annotator"]
        used |= {"annotator"}
    if value.keys() <= used:
        pair.extra = NO_EXTRA
    else:
        refuse_media(value)
        pair.extra = extra_of(value, used)
    pair.tools = tools_of(value)
    return pair


def _sides(value: dict[str, Any]) -> tuple[Turns, Turns, Turns, Turns]:
    """Return chosen prompt, chosen answer, rejected prompt, rejected answer."""
    for side in ("chosen", "rejected"):
        if side not in value:
            raise RowError(f"no {side}; columns: {name_columns(value)}")
    chosen, rejected = (as_turns(value[side], side, "assistant") for side in ("chosen", "rejected"))
    if "prompt" in value:
        chosen_prompt, chosen = without_prompt(value["prompt"], chosen)
        rejected_prompt, rejected = without_prompt(value["prompt"], rejected)
        return chosen_prompt, chosen, rejected_prompt, rejected
    for side in ("chosen", "rejected"):
        if isinstance(value[side], str):
            raise RowError(f"no prompt, and {side} is a text: nothing tells where the answer starts")
    return chosen[:-1], chosen[-1:], rejected[:-1], rejected[-1:]


def is_messages(value: Any) -> bool:
    """Return whether a value is a list of chat messages, as far as types tell."""
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def _fits_pairs(value: dict[str, Any]) -> bool:
    sides = value.get("chosen"), value.get("rejected")
    if "prompt" not in value:
        return all(is_messages(side) for side in sides)
    prompt = value["prompt"]
    return all(isinstance(column, str) or is_messages(column) for column in (*sides, prompt)) and not (
        # The prompt is a transcript: its markers are turns, not text.
        opens_answer(prompt) and all(isinstance(side, str) for side in sides)
    )


def _fits_binarized(value: dict[str, Any]) -> bool:
    return (
        isinstance(value.get("prompt"), str)
        and is_messages(value.get("chosen"))
        and is_messages(value.get("rejected"))
        and "score_chosen" in value
        and "score_rejected" in value
        and ("messages" in value or "prompt_id" in value)
    )


PAIRS = Format(
    name="pairs",
    kind="pairs",
    summary="prompt, chosen, rejected: texts or messages; or chosen and rejected as whole lists of messages",
    columns=PAIR_COLUMNS | {"annotator"},
    fits=_fits_pairs,
    convert=_convert_pair,
    needs=("chosen", "rejected"),
    signs=(
        Sign("have a prompt", lambda value: "prompt" in value),
        Sign(
            "hold lists of messages on both sides",
            lambda value: isinstance(value.get("chosen"), list) and isinstance(value.get("rejected"), list),
        ),
    ),
)
ULTRAFEEDBACK_BINARIZED = Format(
    name="ultrafeedback_binarized",
    kind="pairs",
    summary="prompt as text, chosen and rejected as messages that repeat it, messages, score_chosen, score_rejected",
    columns=BINARIZED_COLUMNS | {"annotator"},
    fits=_fits_binarized,
    convert=_convert_binarized,
    refines=frozenset(("pairs",)),
    needs=("prompt", "chosen", "rejected", "score_chosen", "score_rejected"),
)
