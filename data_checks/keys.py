"""Keys for comparing texts. Only keys are normalised; the text that is trained on never is."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

import numpy as np
import orjson
import xxhash

from data_checks.columns import TurnColumn
from data_checks.rows import FeedbackRow, PairRow, PromptItem, StepwiseRow, Turn, Turns

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


def plain_digests(
    prompts: Sequence[str | None], chosen: Sequence[str | None], rejected: Sequence[str | None]
) -> Iterator[bytes]:
    """Yield the `example_digest` of pairs of one user turn and two assistant turns; of None, anything."""
    for prompt, one, other in zip(prompts, chosen, rejected, strict=True):
        text = f"user\0{prompt}\0\0assistant\0{one}\0\0assistant\0{other}\0\0"
        yield hashlib.sha256(text.encode()).digest()


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


def text_keys(column: TurnColumn) -> list[int | None]:
    """Return a 64-bit key (unsigned) of each list of normalised turns, for joins inside one check.

    Ids that are kept are longer: these may be equal by chance once in many billions of rows.

    Args:
        column: of answers: one assistant turn is the common case.
    """
    texts = [text or "" for text in column.texts] if column.others else column.texts
    parts = joined_normal(texts).split(b"\0")  # type: ignore[arg-type]
    keys: list[int | None] = list(map(xxhash.xxh3_64_intdigest, parts, repeat(ONE_ANSWER)))
    for place, turns in column.others.items():
        keys[place] = None if turns is None else _text_key(turns)
    return keys[: len(texts)]


def _text_key(turns: Turns) -> int:
    return xxhash.xxh3_64_intdigest("".join(f"{role}\0{text}\0" for role, text in normalised(turns)).encode())


def joined_normal(texts: Sequence[str]) -> bytes:
    """Return `normalise_text` of each text, none of which holds a NUL character, as UTF-8 joined by NUL bytes.

    What is plain is done all at once: ASCII, with nothing but single spaces between words.
    """
    whole = "\0".join(texts).encode()
    codes = np.frombuffer(whole, np.uint8)
    ends, space = codes == 0, codes == ord(" ")
    gap = ends | space
    uneven = (codes >= 128) | ((codes - np.uint8(9)) < 5) | ((codes - np.uint8(28)) < 4)
    uneven[1:] |= (space[1:] & gap[:-1]) | (gap[1:] & space[:-1])
    uneven[:1] |= space[:1]
    uneven[-1:] |= space[-1:]
    places = np.flatnonzero(uneven)
    if not len(places):
        return whole.lower()
    found = np.searchsorted(np.flatnonzero(ends), places)
    parts = whole.lower().split(b"\0")
    # A gap that ends with a NUL byte is marked there: it belongs to the text before.
    for place in np.unique(found).tolist():
        parts[place] = normalise_text(texts[place]).encode()
    return b"\0".join(parts)


def normalise_all(texts: Sequence[str]) -> list[str]:
    """Return `normalise_text` of each text, none of which holds a NUL character."""
    return joined_normal(texts).decode().split("\0") if texts else []
