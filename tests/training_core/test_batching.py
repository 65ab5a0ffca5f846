"""Padding and batches, and the Parquet readers."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training_core.data.batching import batches_by_tokens, micro_batches, pad_sequences
from training_core.data.prompts import read_prompts
from training_core.errors import DataError


def test_mask_follows_lengths_not_ids() -> None:
    ids, mask = pad_sequences([[3, 0, 0], [5]], pad_token_id=0, side="left")
    assert ids.tolist() == [[3, 0, 0], [0, 0, 5]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]


@pytest.mark.parametrize("sequences", [[], [[1], []]])
def test_empty_batches_are_refused(sequences: list[list[int]]) -> None:
    with pytest.raises(DataError, match="at least one"):
        pad_sequences(sequences, pad_token_id=0)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_batches_hold_every_item_once_within_the_bound(lengths: list[int], bound: int) -> None:
    batches = batches_by_tokens(lengths, bound)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= bound
    widths = [max(lengths[i] for i in batch) for batch in batches]
    assert widths == sorted(widths, reverse=True)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 5))
def test_micro_batches_hold_every_item_once(lengths: list[int], size: int) -> None:
    chunks = micro_batches(range(len(lengths)), lengths, size)
    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(lengths)))
    assert all(len(chunk) == size for chunk in chunks[:-1])
    assert len(chunks[-1]) <= size


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        batches_by_tokens([1], 0)
    with pytest.raises(ValueError, match="positive"):
        micro_batches([0], [1], 0)


def write_prompts(path: Path, rows: list[tuple[str, str | None]]) -> Path:
    table = {
        "prompt_id": [row[0] for row in rows],
        "group_id": ["g" for _ in rows],
        "prompt_messages": [[{"role": "user", "content": "Hi"}] for _ in rows],
        "extra": pyarrow.array([row[1] for row in rows], pyarrow.string()),
    }
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    return path


def test_prompts_are_read_in_order_with_their_extra(tmp_path: Path) -> None:
    rows = read_prompts(write_prompts(tmp_path / "p.parquet", [("b", '{"answer": "4"}'), ("a", None)]))
    assert [row.prompt_id for row in rows] == ["b", "a"]
    assert rows[0].extra == {"answer": "4"}
    assert rows[1].extra == {}
    assert rows[0].prompt[0].content == "Hi"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("a", None), ("a", None)], "more than once"),
        ([("a", "[1]")], "JSON object"),
        ([("a", "{")], "not JSON"),
        ([], "no rows"),
    ],
)
def test_unusable_prompts_are_refused(tmp_path: Path, rows: list[tuple[str, str | None]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_prompts(write_prompts(tmp_path / "p.parquet", rows))
