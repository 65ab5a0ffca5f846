"""Null baselines: rules that read no answer. What a reward model adds is what it gets right beyond the best of them.

Longest, shortest and a coin are computed here, pair by pair, so that they can be compared on the very pairs that the
reward model was measured on. The data checks know others, such as a probe of trivial features; of these the accuracy is
known, not which pairs they got right.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray

from training_core.errors import DataError

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]

REPORTED = re.compile(r"validation_(?!best)(\w+)_accuracy")
"""Keys of the data checks' baselines.json that hold an accuracy on validation pairs."""
MAX_DIFFERENCE = 1e-6
"""Of one baseline's accuracy on the same pairs, computed there and here; they are rounded to 9 digits there."""
BATCH_ROWS = 4096


@dataclass(frozen=True)
class Baseline:
    """One rule's accuracy on the validation pairs."""

    name: str
    accuracy: float
    credits: Floats | None
    """1 a pair that it gets right, 0.5 where it cannot tell, else 0; float64 [pairs]. None: not known by pair."""
    standard_error: float = 0.0
    """Of the accuracy; read where the credits are not known."""


def credits(scores: Floats) -> Floats:
    """Return what each pair adds to an accuracy: 1 for a positive score, 0.5 for 0, else 0.

    >>> credits(np.array([2.0, 0.0, -1.0])).tolist()
    [1.0, 0.5, 0.0]
    """
    found: Floats = (np.sign(scores) + 1.0) / 2.0
    return found


def null_baselines(pairs: Path) -> list[Baseline]:
    """Return longest, shortest and random on the pairs of a Parquet file, in the order of its rows.

    Lengths are in characters of the answer, the contents of several messages joined by a line break, as the data checks
    count them. Random is 0.5 in each pair, not drawn.

    Args:
        pairs: `validation_pairs` of the data checks, with at least one row.
    """
    differences = np.concatenate(
        [
            answer_characters(batch.column("chosen_messages")) - answer_characters(batch.column("rejected_messages"))
            for batch in _batches(pairs)
        ]
    ).astype(np.float64)
    rules = {"longest": differences, "shortest": -differences, "random": np.zeros(len(differences))}
    return [Baseline(name, float(credits(rule).mean()), credits(rule)) for name, rule in rules.items()]


def _batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    with pyarrow.parquet.ParquetFile(path) as file:
        yield from file.iter_batches(BATCH_ROWS, columns=["chosen_messages", "rejected_messages"])


def answer_characters(messages: pyarrow.Array) -> NDArray[np.int64]:
    """Return the characters of each answer, int64 [rows].

    Args:
        messages: list<struct<role, content>> [rows].
    """
    contents = pyarrow.compute.struct_field(pyarrow.compute.list_flatten(messages), "content")
    lengths = pyarrow.compute.fill_null(pyarrow.compute.utf8_length(contents), 0).to_numpy(zero_copy_only=False)
    counts = pyarrow.compute.fill_null(pyarrow.compute.list_value_length(messages), 0).to_numpy(zero_copy_only=False)
    sums = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ends = np.cumsum(counts, dtype=np.int64)
    found: NDArray[np.int64] = sums[ends] - sums[ends - counts] + np.maximum(counts - 1, 0)
    return found


def reported_baselines(path: Path, known: Mapping[str, Baseline], num_pairs: int) -> list[Baseline]:
    """Return the baselines that only the data checks know, and compare the others with theirs.

    Args:
        path: `baselines.json` of the data checks (docs/stages.md).
        known: baselines computed here, by name.
        num_pairs: validation pairs here. The data checks may have seen a sample of them.

    Raises:
        DataError: the file cannot be read, or holds no such numbers.
    """
    report = _read(path)
    seen = report.get("validation_num_pairs")
    found = []
    for key, accuracy in report.items():
        match = REPORTED.fullmatch(key)
        if match is None or accuracy is None:
            continue
        name, share = match[1], _number(accuracy, path)
        if name not in known:
            error = _number(report.get(f"validation_{name}_standard_error"), path)
            found.append(Baseline(name, share, None, error))
        elif seen == num_pairs and abs(share - known[name].accuracy) > MAX_DIFFERENCE:
            logger.warning(
                "the data checks give the null baseline %s an accuracy of %.4f on %d validation pairs, here it is "
                "%.4f: they did not see the same answers",
                *(name, share, num_pairs, known[name].accuracy),
            )
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}. Run the data checks again to write it") from None
    # Empty where the data checks had no pairs to look at.
    if not isinstance(report, dict) or (report and not any(map(REPORTED.fullmatch, report))):
        raise DataError(f"{path} holds no accuracies of null baselines. Run the data checks again to write it")
    return report


def _number(value: Any, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{path}: an accuracy or its standard error is no number. Run the data checks again")
    return float(value)
