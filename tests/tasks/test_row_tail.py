"""Rows of a growing, replaced or damaged file."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tasks import row_tail
from tasks.row_tail import Row, RowTail


def write_rows(path: Path, *steps: int) -> None:
    with path.open("a") as stream:
        stream.writelines(json.dumps({"step": step, "a": 1.0}) + "\n" for step in steps)


def test_rows_come_once_and_a_line_cut_short_waits(tmp_path: Path) -> None:
    tail = RowTail(tmp_path / "m.jsonl")
    assert tail.take() == []
    write_rows(tail.path, 1, 2)
    with tail.path.open("a") as stream:
        stream.write('{"step": 3, "a"')
    assert [row.step for row in tail.take()] == [1, 2]
    assert tail.take() == []
    with tail.path.open("a") as stream:
        stream.write(': "x", "b": null}\n')
    (row,) = tail.take()
    assert (row.step, row.values) == (3, {"a": "x", "b": None})


def test_rows_that_are_not_confirmed_come_again_with_the_time_of_the_first_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail, clock = RowTail(tmp_path / "m.jsonl"), iter([10.0, 20.0, 30.0])
    monkeypatch.setattr("tasks.row_tail.time.time", lambda: next(clock))
    write_rows(tail.path, 1)
    assert tail.rows()[0] == [Row(1, 10_000, {"a": 1.0})]
    rows, position = tail.rows()
    assert rows == [Row(1, 10_000, {"a": 1.0})]
    tail.confirm(position)
    assert tail.rows()[0] == []


def test_damaged_lines_are_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tail = RowTail(tmp_path / "m.jsonl")
    tail.path.write_bytes(b'{"step": 1}\n{"step": \nnull\n[1]\n{"a": 1}\n\xff\xfe\n{"step": "x"}\n{"step": 2}\n')
    with caplog.at_level(logging.WARNING):
        assert [row.step for row in tail.take()] == [1, 2]
    assert len(caplog.records) == 6
    assert str(tail.path) in caplog.text
    assert tail.take() == []


@pytest.mark.parametrize("longer", [False, True])
def test_a_file_that_was_replaced_is_read_from_its_start(tmp_path: Path, longer: bool) -> None:
    tail = RowTail(tmp_path / "m.jsonl")
    write_rows(tail.path, 1, 2, 3)
    assert [row.step for row in tail.take()] == [1, 2, 3]
    steps = [1, 2, 3, 4, 5] if longer else [1]
    write_rows(tmp_path / "new", *steps)
    (tmp_path / "new").replace(tail.path)
    assert [row.step for row in tail.take()] == steps


def test_a_long_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tail, "ROWS_PER_READ", 2)
    tail = RowTail(tmp_path / "m.jsonl")
    write_rows(tail.path, 1, 2, 3, 4, 5)
    assert [row.step for row in tail.rows()[0]] == [1, 2]
    assert [row.step for row in tail.take()] == [1, 2, 3, 4, 5]


def test_a_file_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        RowTail(tmp_path).rows()
