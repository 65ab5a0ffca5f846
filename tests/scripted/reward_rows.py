"""Rows and stages for tests of reward models: answers with good words are better."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from training_core.config.reward_model import RewardModelConfig
from training_core.protocol.context import StageContext
from training_core.protocol.digests import path_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageSpec

GOOD = ("good", "happy", "warm", "wonderful")
BAD = ("bad", "sad", "cold", "terrible")
THINGS = ("sea", "rain", "train", "bread", "street")


def answer(draw: random.Random, num_good: int, num_sentences: int) -> str:
    """Return sentences of which `num_good` have a good word, in any order."""
    words = [draw.choice(GOOD) for _ in range(num_good)] + [draw.choice(BAD) for _ in range(num_sentences - num_good)]
    draw.shuffle(words)
    return " ".join(f"The {draw.choice(THINGS)} is {word}." for word in words)


def turn(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def pair_rows(num_rows: int, seed: int, **columns: list[float | None]) -> list[dict[str, Any]]:
    """Return pairs; `columns` sets margin, chosen_score or rejected_score, one value a row."""
    draw = random.Random(seed)
    rows = []
    for i in range(num_rows):
        chosen, rejected = draw.randint(1, 3), draw.randint(1, 3)
        rows.append(
            {
                "example_id": f"{seed}/{i}",
                "group_id": f"group {seed} {i}",
                "prompt_messages": turn("user", f"Tell me about {seed} {i}."),
                "chosen_messages": turn("assistant", answer(draw, chosen, chosen)),
                "rejected_messages": turn("assistant", answer(draw, 0, rejected)),
                **dict.fromkeys(("margin", "chosen_score", "rejected_score")),
                **{name: values[i] for name, values in columns.items()},
            }
        )
    return rows


def feedback_rows(num_rows: int, seed: int, missing: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Return answers of three sentences, rated 1 to 4 by their good words; label: more than half are good.

    Args:
        num_rows: how many.
        seed: of the rows.
        missing: rows without a rating and a label.
    """
    draw = random.Random(seed)
    rows = []
    for i in range(num_rows):
        num_good = i % 4
        known = i not in missing
        rows.append(
            {
                "example_id": f"{seed}/{i}",
                "group_id": f"judged {seed} {i}",
                "prompt_messages": turn("user", f"Tell me about {seed} {i}."),
                "answer_messages": turn("assistant", answer(draw, num_good, 3)),
                "label": num_good > 1 if known else None,
                "rating": 1.0 + num_good if known else None,
            }
        )
    return rows


NUMBERS = {name: pyarrow.float64() for name in ("margin", "chosen_score", "rejected_score", "rating")}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    for name, kind in {**NUMBERS, "label": pyarrow.bool_()}.items():
        if name in table.column_names:  # A column of nothing but null has no type of its own.
            index = table.column_names.index(name)
            table = table.set_column(index, name, table.column(name).cast(kind))
    pyarrow.parquet.write_table(table, path)
    return path


def make_context(path: Path, inputs: dict[str, Path], **options: object) -> StageContext:
    """Return the context of a small training: 8 rows a step, float32."""
    values = {
        "optimizer": {"learning_rate": 1e-3},
        "batch_size": 8,
        "num_epochs": 2,
        "checkpoint_every_steps": 2,
        "autocast": "none",
    }
    config = RewardModelConfig.model_validate({**values, **options}).model_dump(mode="json")
    artifacts = {name: Artifact(path=str(p), sha256=path_digest(p)) for name, p in inputs.items()}
    spec = StageSpec(stage="reward_model", stage_version=4, config=config, inputs=artifacts, seed=3)
    directory = StageDirectory(path)
    directory.prepare(spec)
    return StageContext(spec, directory)
