"""The partner of a row is the next one that fits and answers another prompt, as found one by one, but fast."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import preference_data
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training_core.data.tables import build_feedback_table, build_pair_table
from training_core.errors import DataError
from training_core.models.loading import load_tokenizer
from training_core.preference.items import FeedbackSource, JudgedItems, TakenApartSource, find_partners
from training_core.preference.partners import next_fitting

ROWS = st.lists(st.tuples(st.integers(1, 6), st.integers(-1, 7), st.integers(0, 3)), min_size=1, max_size=40)
NUM_MANY = 100_000


def one_by_one(rows: list[tuple[int, int, int]]) -> list[int]:
    count, found = len(rows), []
    for row, (_, room, group) in enumerate(rows):
        others = ((row + offset) % count for offset in range(1, count))
        found.append(next((other for other in others if rows[other][0] <= room and rows[other][2] != group), -1))
    return found


@given(ROWS)
def test_partners_are_those_found_one_by_one(rows: list[tuple[int, int, int]]) -> None:
    lengths, rooms, groups = np.array(rows, np.int64).T
    found = next_fitting(lengths, rooms, groups)
    assert found.dtype == np.int64
    assert found.tolist() == one_by_one(rows)


@pytest.mark.parametrize("case", ["one prompt dominates", "few answers fit"])
def test_a_hundred_thousand_rows_take_no_time(case: str) -> None:
    """One by one these take NUM_MANY^2 looks, which is hours."""
    lengths, rooms = np.full(NUM_MANY, 5), np.full(NUM_MANY, 9)
    groups = np.arange(NUM_MANY)
    if case == "one prompt dominates":
        groups = np.where(groups == 70_000, 1, 0)
    else:
        rooms[:] = 4
        lengths[70_000] = 4
    started = time.monotonic()
    found = next_fitting(lengths, rooms, groups)
    assert time.monotonic() - started < 2.0
    expected = np.full(NUM_MANY, 70_000)
    expected[70_000] = 70_001 if case == "one prompt dominates" else -1
    assert np.array_equal(found, expected)


def test_groups_are_numbers_and_stand_for_the_prompts_of_the_rows(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    rows = [("B?", "no", True), ("only rated?", "so", None), ("A?", "yes", False), ("B?", "well", True)]
    path = preference_data.write_feedback(tmp_path / "f.parquet", rows)
    source = FeedbackSource(build_feedback_table(path, tokenizer, 256, tmp_path / "f.arrow"))
    assert [source.group_names[number] for number in source.groups] == ["B?", "A?", "B?"]
    items = JudgedItems(source, 256)
    assert items.group_ids() == {"A?", "B?"}
    assert items.partners.tolist() == [1, 2, 1]
    pairs = preference_data.write_pairs(tmp_path / "p.parquet", [("B?", "a", "b"), ("A?", "c", "d"), ("B?", "e", "f")])
    apart = TakenApartSource(build_pair_table(pairs, tokenizer, 256, tmp_path / "p.arrow"))
    assert [apart.group_names[number] for number in apart.groups] == ["B?", "A?", "B?"] * 2
    assert find_partners(apart, 256).tolist() == [1, 2, 4, 4, 5, 1]


def test_one_prompt_alone_is_refused_by_name(tiny_checkpoint: Path, tmp_path: Path) -> None:
    rows = [("other?", "so", None), ("A?", "yes", True), ("A?", "no", False)]
    path = preference_data.write_feedback(tmp_path / "f.parquet", rows)
    table = build_feedback_table(path, load_tokenizer(tiny_checkpoint), 256, tmp_path / "f.arrow")
    with pytest.raises(DataError, match=r"all 2 answers belong to one prompt \(group 'A\?'\)"):
        find_partners(FeedbackSource(table), 256)
