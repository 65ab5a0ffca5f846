"""Keys for comparing texts. Only keys are normalised; the text that is trained on never is."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable

from data_checks.rows import FeedbackRow, PairRow, Turn, Turns
from training_core.protocol.digests import canonical_json

KEY_LENGTH = 32
"""Hex digits of a key: 128 bits."""


def normalise_text(text: str) -> str:
    """Return the text to compare by: NFC, case folded, runs of whitespace joined, ends trimmed.

    >>> normalise_text("  Stra\\u00dfe\\n 1") == normalise_text("STRASSE 1")
    True
    """
    folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
    return " ".join(folded.split())


def short_hash(value: object) -> str:
    """Return 32 hex digits over the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode("utf-8")).hexdigest()[:KEY_LENGTH]


def turns_key(turns: Iterable[Turn]) -> str:
    """Return the key of a list of turns: equal for turns that differ in case, whitespace or Unicode form only."""
    return short_hash([[turn.role, normalise_text(turn.content)] for turn in turns])


def group_id(prompt: Turns) -> str:
    """Return the key by which prompts are split and held out.

    System turns do not count: the same question under another system message must not sit on the other side.
    """
    return turns_key(turn for turn in prompt if turn.role != "system")


def exact_prompt_id(prompt: Turns) -> str:
    """Return an id of the prompt's exact text."""
    return short_hash(prompt)


def example_id(row: PairRow) -> str:
    """Return an id of the pair's exact text."""
    return short_hash([row.chosen_prompt, row.chosen, row.rejected])


def pair_keys(row: PairRow) -> tuple[str, str]:
    """Return the key of the pair and the key of the same pair with its answers exchanged."""
    prompt, chosen, rejected = turns_key(row.prompt), turns_key(row.chosen), turns_key(row.rejected)
    return short_hash([prompt, chosen, rejected]), short_hash([prompt, rejected, chosen])


def feedback_id(row: FeedbackRow) -> str:
    """Return an id of a judged answer: its exact text and what was made of it."""
    return short_hash([row.prompt, row.answer, row.label, row.rating])


def feedback_keys(row: FeedbackRow) -> tuple[str, str]:
    """Return the key of prompt and answer, and the key of the same with the judgement."""
    answer = short_hash([turns_key(row.prompt), turns_key(row.answer)])
    return answer, short_hash([answer, row.label, row.rating])


def dataset_fingerprint(rows: Iterable[PairRow], feedback: Iterable[FeedbackRow] = ()) -> str:
    """Return a SHA-256 over every row that could be read as a pair or as feedback, used or not.

    It does not depend on the order of rows nor on how they are spread over files or stored in them.
    """
    contents = sorted(
        short_hash(
            [r.chosen_prompt, r.chosen, r.rejected_prompt, r.rejected, r.margin, r.chosen_score, r.rejected_score]
        )
        for r in rows
    )
    contents += sorted(f"feedback {feedback_id(row)}" for row in feedback)
    return hashlib.sha256("\n".join(contents).encode()).hexdigest()
