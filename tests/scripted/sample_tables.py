"""Samples of canonical rows, as the costly checks get them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

import pyarrow as pa

from data_checks.features import text_features

_WORDS = (
    "river house garden people water help question answer write think maybe because without please good bad small "
    "large early late read carry open close bring"
)
WORDS = _WORDS.split()
Answers = tuple[str, str]
"""A chosen and a rejected answer."""


def key_of(text: str) -> int:
    """Return a 64-bit key, signed."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def sample_table(
    prompts: Sequence[str],
    chosen: Sequence[str],
    rejected: Sequence[str | None],
    *,
    sources: Sequence[str] | None = None,
    clusters: Sequence[str] | None = None,
    labels: Sequence[bool | None] | None = None,
    ties: Sequence[bool] | None = None,
) -> pa.Table:
    """Return rows with the columns of features; about a tenth of prompts are in the validation split."""
    size = len(prompts)
    columns = {name: pa.array(values) for name, values in features(prompts, chosen, rejected).items()}
    keys = [key_of(prompt) for prompt in prompts]
    return pa.table(
        {
            "example": pa.array(range(size), pa.int64()),
            "file": pa.array(["made.jsonl"] * size, pa.string()),
            "row": pa.array(range(1, size + 1), pa.int64()),
            "source": pa.array(sources or ["made"] * size, pa.string()),
            "prompt_text": pa.array(prompts, pa.string()),
            "chosen_text": pa.array(chosen, pa.string()),
            "rejected_text": pa.array(rejected, pa.string()),
            "group_key": pa.array(keys, pa.int64()),
            "cluster_key": pa.array([key_of(name) for name in clusters] if clusters else keys, pa.int64()),
            "content_hash": pa.array([key_of(repr(row)) for row in zip(prompts, chosen, rejected, strict=True)]),
            "split": pa.array(["validation" if key % 10 == 0 else "train" for key in keys]),
            "label": pa.array(labels or [None] * size, pa.bool_()),
            "is_tie": pa.array(ties or [False] * size, pa.bool_()),
            **columns,
        }
    )


def features(prompts: Sequence[str], chosen: Sequence[str], rejected: Sequence[str | None]) -> dict[str, object]:
    if not len(prompts):
        one = text_features({"prompt": ["a"], "chosen": ["a"], "rejected": ["a"]})
        return {name: values[:0] for name, values in one.items()}
    return dict(text_features({"prompt": list(prompts), "chosen": list(chosen), "rejected": list(rejected)}))


def random_answer(draw: random.Random) -> str:
    """Return an answer of 4 to 24 words, sometimes a list, sometimes a refusal."""
    words = [draw.choice(WORDS) for _ in range(draw.randrange(4, 25))]
    text = "\n".join(f"- {word}" for word in words[:5]) if draw.random() < 0.3 else " ".join(words) + "."
    return f"I'm sorry, but I can't help with that. {text}" if draw.random() < 0.1 else text


def random_pairs(
    num_pairs: int, seed: int, *, plant: Callable[[str, str], Answers] | None = None, per_prompt: int = 1
) -> pa.Table:
    """Return pairs of random answers; `plant` decides which of two is chosen, or changes them."""
    draw = random.Random(seed)
    prompts, chosen, rejected = [], [], []
    for number in range(num_pairs):
        answers = (random_answer(draw), random_answer(draw))
        better, worse = plant(*answers) if plant else answers
        prompts.append(f"Tell me about the {WORDS[number // per_prompt % len(WORDS)]} number {number // per_prompt}")
        chosen.append(better)
        rejected.append(worse)
    return sample_table(prompts, chosen, rejected)


def pairs_of_worth(num_pairs: int, flipped: float, seed: int) -> pa.Table:
    """Return pairs whose better answer has the larger sum of its words' worth, a share of them labelled wrongly."""
    draw = random.Random(seed)
    worth = {f"word{number}": draw.gauss(0, 1) for number in range(60)}
    prompts, chosen, rejected = [], [], []
    for number in range(num_pairs):
        first, second = ([draw.choice(sorted(worth)) for _ in range(8)] for _ in range(2))
        better = sum(map(worth.__getitem__, first)) > sum(map(worth.__getitem__, second))
        if better == (draw.random() < flipped):
            first, second = second, first
        prompts.append(f"prompt number {number}")
        chosen.append(" ".join(first))
        rejected.append(" ".join(second))
    return sample_table(prompts, chosen, rejected)
