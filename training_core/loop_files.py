"""The files that a training loop keeps in the stage directory, and how they are cut back to a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from training_core.errors import ArtifactError
from training_core.metrics import read_metrics
from training_core.protocol.atomic import write_text
from training_core.protocol.context import StageContext

SAMPLES_FILE = "samples.jsonl"


def append_samples(path: Path, step: int, samples: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps({"step": step, **row}) + "\n" for row in samples)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(lines)
        stream.flush()
        os.fsync(stream.fileno())


def truncate_samples(path: Path, step: int) -> None:
    """Keep only whole rows of steps up to `step`."""
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if row["step"] <= step]
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


def truncate_steps(context: StageContext, step: int) -> list[dict[str, Any]]:
    """Drop what was written of steps after `step`; return the rows of metrics.jsonl that are left.

    Raises:
        ArtifactError: a row of a step that is done is missing.
    """
    context.metrics.truncate_after(step)
    context.timings.truncate_after(step)
    truncate_samples(context.directory.path / SAMPLES_FILE, step)
    rows = read_metrics(context.directory.metrics_path)
    found = [row["step"] for row in rows]
    if found != list(range(1, step + 1)):
        missing = sorted(set(range(1, step + 1)) - set(found))
        raise ArtifactError(
            f"{context.directory.metrics_path} does not have one row for each of the {step} steps that are done "
            f"(missing: {', '.join(map(str, missing[:5])) or 'none, but some are there twice'}), so sentinels "
            f"would see another past. Restore it, or delete {context.directory.path} to train from the start"
        )
    return rows
