"""Pairs as whole `Human:` / `Assistant:` transcripts, as in HH-RLHF. They are cut at markers, never at characters."""

from __future__ import annotations

from typing import Any

from data_checks.formats.base import Format, Options, Result, RowError, Sign
from data_checks.formats.markers import is_transcript, opens_answer, prompt_of_transcript, split_transcript
from data_checks.formats.turns import NO_EXTRA, SCORE_NAMES, extra_of, refuse_media, scores_of, source_of, tools_of
from data_checks.rows import PairRow, RawRow, Reason, Turn, Turns, kind_of

ANSWER = "\n\nAssistant:"
QUESTION = "\n\nHuman:"
HH_COLUMNS = frozenset(("chosen", "rejected", "source", "tools", *SCORE_NAMES))
Sides = tuple[Turns, Turns, Turns, Turns]
"""Chosen prompt, chosen answer, rejected prompt, rejected answer."""


def _convert(row: RawRow, options: Options) -> list[Result]:
    value = row.value or {}
    chosen, rejected = value.get("chosen"), value.get("rejected")
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        side = "rejected" if isinstance(chosen, str) else "chosen"
        raise RowError(f"{side} is {kind_of(value.get(side))}, not a transcript text")
    if len(value) == 2:
        return [PairRow(row, options.source, *_cut(chosen, rejected))]
    used = HH_COLUMNS
    if opens_answer(value.get("prompt")):
        used |= {"prompt"}
        sides = _after_prompt(value["prompt"], chosen, rejected)
    else:
        sides = _cut(chosen, rejected)
    margin, chosen_score, rejected_score = scores_of(value)
    pair = PairRow(row, source_of(value, options.source), *sides, margin, chosen_score, rejected_score)
    pair.is_tie = margin == 0 or (chosen_score is not None and chosen_score == rejected_score)
    if value.keys() <= used:
        pair.extra = NO_EXTRA
    else:
        refuse_media(value)
        pair.extra = extra_of(value, used)
    pair.tools = tools_of(value)
    return [pair]


def _cut(chosen: str, rejected: str) -> Sides:
    """Return prompt and last turn of two transcripts."""
    at = chosen.rfind(ANSWER)
    if at > 0 and chosen.find(QUESTION, at) < 0:
        shared = chosen[:at]
        # The usual row: both go on after the same text, which is cut once. Any other is cut side by side.
        if rejected.startswith(shared) and rejected.rfind(ANSWER) == at and rejected.find(QUESTION, at) < 0:
            prompt = split_transcript(shared)
            start = at + len(ANSWER)
            return (
                prompt,
                (Turn("assistant", chosen[start:].removeprefix(" ")),),
                prompt,
                (Turn("assistant", rejected[start:].removeprefix(" ")),),
            )
    first, second = split_transcript(chosen), split_transcript(rejected)
    return first[:-1], first[-1:], second[:-1], second[-1:]


def _after_prompt(prompt: str, chosen: str, rejected: str) -> Sides:
    """Return the sides of a row that has the transcript before the answers in a column of its own."""
    if is_transcript(chosen) and is_transcript(rejected):
        sides = _cut(chosen, rejected)
        if prompt_of_transcript(prompt) not in (sides[0], sides[2]):
            raise RowError("the transcripts do not go on from the prompt", Reason.PROMPT_MISMATCH)
        return sides
    return _cut(prompt + chosen, prompt + rejected)


def _fits(value: dict[str, Any]) -> bool:
    chosen, rejected = value.get("chosen"), value.get("rejected")
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        return False
    return is_transcript(chosen) or is_transcript(rejected) or opens_answer(value.get("prompt"))


def _both_transcripts(value: dict[str, Any]) -> bool:
    return is_transcript(value.get("chosen")) and is_transcript(value.get("rejected"))


HH = Format(
    name="hh",
    kind="pairs",
    summary="chosen and rejected as whole Human/Assistant transcripts; or a prompt that is one, and two answers",
    columns=HH_COLUMNS | {"prompt"},
    fits=_fits,
    convert=_convert,
    needs=("chosen", "rejected"),
    signs=(
        Sign("have two texts that start with a Human or Assistant marker", _both_transcripts),
        Sign("have a prompt", lambda value: "prompt" in value),
    ),
)
