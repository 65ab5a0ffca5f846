"""Pairs and judged answers in which a good word makes the better answer, and a stage that trains on them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

GOOD = ("good", "happy", "warm", "wonderful")
BAD = ("bad", "sad", "cold", "terrible")
THINGS = ("sea", "rain", "train", "bread", "street")

Pair = tuple[str, str, str]


def make_pairs(num_pairs: int, seed: int) -> list[Pair]:
    """Return (prompt, chosen, rejected); lengths tell nothing."""
    draw = random.Random(seed)

    def answer(words: tuple[str, ...]) -> str:
        return " ".join(f"The {draw.choice(THINGS)} is {draw.choice(words)}." for _ in range(draw.randint(1, 3)))

    return [(f"Tell me about {seed} {i}.", answer(GOOD), answer(BAD)) for i in range(num_pairs)]


def turns(role: str, texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": role, "content": text}] for text in texts]


def write_pairs(path: Path, pairs: list[Pair]) -> Path:
    columns = {
        "example_id": [f"e{i}" for i in range(len(pairs))],
        "group_id": [pair[0] for pair in pairs],
        "prompt_messages": turns("user", [pair[0] for pair in pairs]),
        "chosen_messages": turns("assistant", [pair[1] for pair in pairs]),
        "rejected_messages": turns("assistant", [pair[2] for pair in pairs]),
        "margin": pa.nulls(len(pairs), pa.float64()),
    }
    pq.write_table(pa.table(columns), path)
    return path


def write_feedback(path: Path, rows: list[tuple[str, str, bool | None]]) -> Path:
    """Write (prompt, answer, label) rows."""
    columns = {
        "example_id": [f"f{i}" for i in range(len(rows))],
        "group_id": [row[0] for row in rows],
        "prompt_messages": turns("user", [row[0] for row in rows]),
        "answer_messages": turns("assistant", [row[1] for row in rows]),
        "label": pa.array([row[2] for row in rows], pa.bool_()),
        "rating": pa.array([0.5] * len(rows), pa.float64()),
    }
    pq.write_table(pa.table(columns), path)
    return path


def taken_apart(pairs: list[Pair]) -> list[tuple[str, str, bool | None]]:
    """Return the rows that pairs become when they are taken apart."""
    return [(p[0], p[1], True) for p in pairs] + [(p[0], p[2], False) for p in pairs]


def make_inputs(folder: Path, model: Path) -> dict[str, Path]:
    """Return the inputs of a stage: 24 pairs to train on, 12 to measure on."""
    return {
        "model": model,
        "train_pairs": write_pairs(folder / "train.parquet", make_pairs(24, 1)),
        "validation_pairs": write_pairs(folder / "validation.parquet", make_pairs(12, 2)),
    }


def make_config(name: str = "dpo", **options: Any) -> Any:
    from training_core.config.preference import PreferenceStageConfig

    values = {
        "name": name,
        "optimizer": {"learning_rate": 1e-3},
        "batch_size": 8,
        "micro_batch_size": 4,
        "num_epochs": 2,
        "autocast": "none",
        "checkpoint_every_steps": 2,
    }
    return PreferenceStageConfig.model_validate({"algorithm": {**values, **options}})


def make_context(path: Path, inputs: dict[str, Path], config: Any) -> Any:
    """Return the context of stage `policy` in `path`, with kernels as that stage sets them."""
    from training_core.determinism import make_deterministic
    from training_core.protocol.context import StageContext
    from training_core.protocol.digests import path_digest
    from training_core.protocol.directory import StageDirectory
    from training_core.records import Artifact, StageSpec

    make_deterministic()
    artifacts = {name: Artifact(path=str(p), sha256=path_digest(p)) for name, p in inputs.items()}
    resolved = config.model_dump(mode="json")
    spec = StageSpec(stage="policy", stage_version=1, config=resolved, inputs=artifacts, seed=3)
    directory = StageDirectory(path)
    directory.prepare(spec)
    return StageContext(spec, directory)


def run_stage(path: Path, inputs: dict[str, Path], name: str = "dpo", **options: Any) -> Any:
    """Train in directory `path`; return the outcome."""
    from training_core.preference.stage import train

    config = make_config(name, **options)
    return train(make_context(path, inputs, config), config.algorithm)


def squared(pair: Any, target: float) -> Any:
    """A loss of a user's own."""
    chosen, rejected = pair.policy_chosen - pair.reference_chosen, pair.policy_rejected - pair.reference_rejected
    return (chosen - rejected - target) ** 2


def likelier(pair: Any) -> Any:
    """A loss of a user's own that looks at no reference."""
    assert pair.reference_chosen is None
    return (1.0 - pair.policy_chosen / pair.chosen_lengths + pair.policy_rejected / pair.rejected_lengths).relu()


def mean_of_pairs(pair: Any) -> Any:
    """Not a loss: one number for all pairs."""
    return squared(pair, 1.0).mean()
