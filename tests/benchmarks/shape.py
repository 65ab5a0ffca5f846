"""What both sides of the step benchmark are given. Plain Python: TRL's environment has no Tidegate in it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """One training of a few GRPO steps."""

    model: str
    """Folder of the checkpoint, safetensors."""
    prompts: list[str]
    """In the order in which steps use them, `prompts_per_step` a step."""
    num_steps: int
    prompts_per_step: int
    group_size: int
    micro_batch_size: int
    """Answers in one forward and backward pass."""
    max_new_tokens: int
    learning_rate: float
    seed: int
    engine: str = "vllm"
    """Tidegate's rollout engine. TRL's side samples with transformers' `generate` in any case."""
    kv_cache_gib: float = 0.1
    """Of vLLM: room for all answers of a step at once (45,000 tokens a GiB for the demo's model)."""
    recompute: bool = False
    """Gradient checkpointing."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))


def load_shape(path: Path) -> Shape:
    return Shape(**json.loads(path.read_text()))


class Events:
    """Appends what happened to a file of JSON lines, each with the time on the machine-wide monotonic clock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, kind: str, **values: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, "time": time.monotonic(), **values}) + "\n")


def read_events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
