"""Rows of the small files in each layout of pairs, and what formats make of rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data_checks.formats import FORMATS, Options, RowError
from data_checks.rows import RawRow, Reason

FOLDER = Path(__file__).parents[1] / "data_checks" / "fixtures" / "formats"


def load(name: str) -> list[dict[str, Any]]:
    """Return the rows of `pairs_NAME`, without their null columns."""
    path = next(path for path in FOLDER.iterdir() if path.stem == f"pairs_{name}")
    rows: list[dict[str, Any]]
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
    elif path.suffix == ".csv":
        with path.open(newline="") as stream:
            rows = list(csv.DictReader(stream))
    elif path.suffix == ".json":
        rows = json.loads(path.read_text())
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: item for key, item in row.items() if item is not None} for row in rows]


def convert(value: dict[str, Any], format_name: str, number: int = 1, **options: Any) -> list[Any]:
    """Return what one row becomes."""
    return FORMATS[format_name].convert(RawRow("f", number, "", value), Options(source="here", **options))


def refusal(value: dict[str, Any], format_name: str, reason: Reason = Reason.WRONG_TYPE, **options: Any) -> str:
    """Return why a row is refused; the reason must be this one."""
    with pytest.raises(RowError) as caught:
        convert(value, format_name, **options)
    assert caught.value.finding.reason == reason
    return caught.value.finding.detail


def plain(turns: Any) -> tuple[tuple[str, str], ...]:
    """Return turns as pairs of texts."""
    return tuple((turn.role, turn.content) for turn in turns)
