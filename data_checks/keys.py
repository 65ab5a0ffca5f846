"""Keys for comparing texts. Only keys are normalised; the text that is trained on never is."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence

import orjson
import xxhash

from data_checks.rows import FeedbackRow, PairRow, PromptItem, StepwiseRow, Turn, Turns

OTHER_SPACES = "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f"
"""ASCII whitespace as `str.split` knows it, beside the space."""
ONE_ANSWER = 1
"""Seed of the keys of single assistant turns."""
KEY_LENGTH = 32
"""Hex digits of a key: 128 bits."""


def normalise_text(text: str) -> str:
    """Return the text to compare by: NFC, case folded, runs of whitespace joined, ends trimmed.

    >>> normalise_text("  Stra\\u00dfe\\n 1") == normalise_text("STRASSE 1")
    True
    """
    if text.isascii():  # Case folding and NFC leave ASCII alone but for its capitals.
        return " ".join(text.lower().split())
    folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
    return " ".join(folded.split())


def digest(value: object) -> bytes:
    """Return the SHA-256 of `value` as compact JSON: lists, texts, numbers, true, false and null."""
    return hashlib.sha256(orjson.dumps(value)).digest()


def short_hash(value: object) -> str:
    """Return the first 32 hex digits of `digest`."""
    return digest(value).hex()[:KEY_LENGTH]


def normalised(turns: Iterable[Turn]) -> list[list[str]]:
    """Return role and normalised content of each turn."""
    return [[role, normalise_text(content)] for role, content in turns]


def turns_key(turns: Iterable[Turn]) -> str:
    """Return the key of a list of turns: equal for turns that differ in case, whitespace or Unicode form only."""
    return short_hash(normalised(turns))


def group_id(prompt: Turns) -> str:
    """Return the key by which prompts are split and held out.

    System turns do not count: the same question under another system message must not sit on the other side.
    """
    return turns_key(turn for turn in prompt if turn.role != "system")


def exact(turns: Turns) -> list[list[str]]:
    """Return turns as plain lists."""
    return [[role, content] for role, content in turns]


def exact_prompt_id(prompt: Turns) -> str:
    """Return an id of the prompt's exact text."""
    return short_hash(exact(prompt))


def serialised(turns: Turns) -> str:
    """Return turns as one text from which they can be told again: no text holds a NUL character, no role is empty."""
    if len(turns) == 1:
        return f"{turns[0][0]}\0{turns[0][1]}\0\0"
    return "".join([f"{role}\0{content}\0" for role, content in turns]) + "\0"


def example_digest(prompt: Turns, chosen: Turns, rejected: Turns | None, judgement: object = None) -> bytes:
    """Return the digest of an example's exact text. Its id is the start.

    Args:
        prompt: before the answer.
        chosen: the answer, or the chosen one of two.
        rejected: the other one of a pair.
        judgement: of an answer judged alone, as JSON: two judgements of one answer are two examples.
    """
    text = serialised(prompt) + serialised(chosen) + ("" if rejected is None else serialised(rejected))
    tail = b"" if judgement is None else orjson.dumps(judgement)
    return hashlib.sha256(text.encode() + tail).digest()


def content_digest(row: PairRow | FeedbackRow | PromptItem | StepwiseRow, of_example: bytes) -> bytes:
    """Return the digest of all that training could use of a row; equal to the example's for a pair without numbers.

    Args:
        row: any.
        of_example: its `example_digest`.
    """
    rest: list[object]
    if isinstance(row, PairRow):
        same = row.chosen_prompt == row.rejected_prompt
        numbers = (row.margin, row.chosen_score, row.rejected_score)
        if same and not row.is_tie and numbers == (None, None, None):
            return of_example
        rest = [None if same else exact(row.rejected_prompt), *numbers, row.is_tie]
    elif isinstance(row, PromptItem):
        rest = [row.prompt_id, row.extra]
    else:
        rest = ["steps" if isinstance(row, StepwiseRow) else "feedback"]
    return digest([of_example.hex(), *rest])


def judgement_of(row: FeedbackRow | StepwiseRow) -> list[object]:
    """Return what people made of an answer, as JSON."""
    return list(row.labels) if isinstance(row, StepwiseRow) else [row.label, row.rating]


def text_keys(column: Sequence[Turns | None]) -> list[int | None]:
    """Return a 64-bit key (unsigned) of each list of normalised turns, for joins inside one check.

    Ids that are kept are longer: these may be equal by chance once in many billions of rows.
    """
    if all(turns is not None and len(turns) == 1 and turns[0][0] == "assistant" for turns in column):
        texts = normalise_all([turns[0][1] for turns in column if turns])
        return [xxhash.xxh3_64_intdigest(text.encode(), ONE_ANSWER) for text in texts]
    return [None if turns is None else _text_key(turns) for turns in column]


def _text_key(turns: Turns) -> int:
    if len(turns) == 1 and turns[0][0] == "assistant":  # Most answers; the seed stands for the role.
        return xxhash.xxh3_64_intdigest(normalise_text(turns[0][1]).encode(), ONE_ANSWER)
    return xxhash.xxh3_64_intdigest("".join(f"{role}\0{text}\0" for role, text in normalised(turns)).encode())


def normalise_all(texts: Sequence[str]) -> list[str]:
    """Return `normalise_text` of each text, none of which holds a NUL character; many at once where all are ASCII."""
    whole = "\0".join(texts)
    if not texts or not whole.isascii():
        return [normalise_text(text) for text in texts]
    whole = whole.lower()
    for space in OTHER_SPACES:
        whole = whole.replace(space, " ")
    while "  " in whole:
        whole = whole.replace("  ", " ")
    return [text.strip(" ") for text in whole.split("\0")]
