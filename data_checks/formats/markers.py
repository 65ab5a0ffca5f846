"""Whole `Human:` / `Assistant:` transcripts, as HH-RLHF writes conversations, cut at their markers."""

from __future__ import annotations

import re
from typing import Any

from data_checks.formats.base import RowError
from data_checks.rows import Reason, Turn, Turns

HH_MARKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
HH_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_transcript(value: Any) -> bool:
    """Return whether a value is a text that starts with a Human or Assistant marker."""
    return isinstance(value, str) and HH_MARKER.match(value) is not None


def split_transcript(text: str) -> Turns:
    r"""Return the turns of a `\n\nHuman: … \n\nAssistant: …` transcript.

    One space after a marker belongs to the marker; all other characters are kept.

    Raises:
        RowError: the text does not start with a marker.

    >>> split_transcript("\n\nHuman: Hi\n\nAssistant: Hello\nthere")
    (Turn(role='user', content='Hi'), Turn(role='assistant', content='Hello\nthere'))
    """
    if text.startswith("\n\nHuman:"):
        # Cutting at one marker, then at the other, finds the same places as the pattern, several times as fast.
        parts = text[8:].split("\n\nHuman:")
        turns = []
        for part in parts:
            if "\n\nAssistant:" in part:
                question, *answers = part.split("\n\nAssistant:")
                turns.append(Turn("user", question.removeprefix(" ")))
                turns += [Turn("assistant", answer.removeprefix(" ")) for answer in answers]
            else:
                turns.append(Turn("user", part.removeprefix(" ")))
        return tuple(turns)
    markers = list(HH_MARKER.finditer(text))
    if not markers or markers[0].start() != 0:
        raise RowError("the transcript does not start with a Human or Assistant marker")
    ends = [*(marker.start() for marker in markers[1:]), len(text)]
    return tuple(
        Turn(HH_ROLES[marker[1]], text[marker.end() : end].removeprefix(" "))
        for marker, end in zip(markers, ends, strict=True)
    )


def prompt_of_transcript(text: str) -> Turns:
    r"""Return the turns of a prompt; a transcript ends with a marker after which the answer goes, and it is no turn.

    Raises:
        RowError: the transcript ends with an answer that has text.

    >>> prompt_of_transcript("\n\nHuman: Hi\n\nAssistant: ")
    (Turn(role='user', content='Hi'),)
    """
    if not is_transcript(text):
        return (Turn("user", text),)
    turns = split_transcript(text)
    if turns[-1].role != "assistant":
        return turns
    if turns[-1].content.strip():
        raise RowError("the prompt is a transcript that ends with an answer", Reason.LAST_TURN_NOT_USER)
    return turns[:-1]


def opens_answer(value: Any) -> bool:
    """Return whether a value is a transcript that ends where the answer goes."""
    return is_transcript(value) and value.rstrip().endswith("\n\nAssistant:")
