"""Repeats, contradictions and circles: the queries give what a plain loop over the rows gives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import networkx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_checks.whole import duplicates as whole
from data_checks.whole.store import number, open_store, register

SCHEMA = pa.schema(
    [
        ("example", pa.int64()),
        ("source", pa.string()),
        *((name, pa.int64()) for name in ("group_key", "prompt_key", "chosen_key", "rejected_key")),
        ("label", pa.bool_()),
        ("rating", pa.float64()),
        ("annotator", pa.string()),
    ]
)
Rows = Sequence[dict[str, Any]]


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    return open_store(tmp_path_factory.mktemp("store"), 256 << 20, 2)


def show(connection: duckdb.DuckDBPyConnection, rows: Rows, name: str = "examples") -> str:
    """Make a view of rows, numbered as they come."""
    filled = [{"source": "a", "group_key": row["prompt_key"], "example": n, **row} for n, row in enumerate(rows)]
    connection.register(name, pa.Table.from_pylist(filled, SCHEMA))
    return name


def pair(prompt: int, chosen: int, rejected: int, **more: Any) -> dict[str, Any]:
    return {"prompt_key": prompt, "chosen_key": chosen, "rejected_key": rejected, **more}


def answer(
    prompt: int, chosen: int, label: bool | None = None, rating: float | None = None, **more: Any
) -> dict[str, Any]:
    return {"prompt_key": prompt, "chosen_key": chosen, "label": label, "rating": rating, **more}


def loop_over_pairs(rows: Rows, keep_conflicts: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Return conflicting rows and (row, earlier row) of repeats, as a reader of the file would mark them."""
    keys = [(row["prompt_key"], row["chosen_key"], row["rejected_key"]) for row in rows]
    present = set(keys)
    conflicts, repeats = [], []
    seen: dict[tuple[int, int, int], int] = {}
    for index, (prompt, chosen, rejected) in enumerate(keys):
        if chosen != rejected and (prompt, rejected, chosen) in present:
            conflicts.append(index)
            if not keep_conflicts:
                continue
        first = seen.setdefault(keys[index], index)
        if first != index:
            repeats.append((index, first))
    return conflicts, repeats


def loop_over_answers(rows: Rows, keep_conflicts: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Do for judged answers what `loop_over_pairs` does for pairs."""
    labels: dict[tuple[int, int], set[bool]] = {}
    for row in rows:
        if row["label"] is not None:
            labels.setdefault((row["prompt_key"], row["chosen_key"]), set()).add(row["label"])
    conflicts, repeats = [], []
    seen: dict[tuple[Any, ...], int] = {}
    for index, row in enumerate(rows):
        item = (row["prompt_key"], row["chosen_key"])
        if row["label"] is not None and len(labels[item]) > 1:
            conflicts.append(index)
            if not keep_conflicts:
                continue
        first = seen.setdefault((*item, row["label"], row["rating"]), index)
        if first != index:
            repeats.append((index, first))
    return conflicts, repeats


def assert_like(
    connection: duckdb.DuckDBPyConnection, rows: Rows, loop: Callable[..., tuple[list[int], list[tuple[int, int]]]]
) -> None:
    view = show(connection, rows)
    conflicts = whole.find_conflicts(connection, view)["example"].to_pylist()
    for keep_conflicts in (True, False):
        left = rows if keep_conflicts else [row for number, row in enumerate(rows) if number not in conflicts]
        numbers = [number for number in range(len(rows)) if keep_conflicts or number not in conflicts]
        found = whole.find_duplicates(
            connection,
            show(connection, [{**row, "example": n} for n, row in zip(numbers, left, strict=True)], "remaining"),
        )
        repeats = list(zip(found["example"].to_pylist(), found["first_example"].to_pylist(), strict=True))
        assert (conflicts, repeats) == loop(rows, keep_conflicts)


few = st.integers(0, 2)
pairs = st.lists(st.builds(pair, few, few, few), max_size=14)
answers = st.lists(
    st.builds(answer, few, few, st.sampled_from([None, True, False]), st.sampled_from([None, 1.0, 2.0])), max_size=14
)


@settings(max_examples=40, deadline=None)
@given(rows=pairs)
def test_pairs_like_the_loop(connection: duckdb.DuckDBPyConnection, rows: Rows) -> None:
    assert_like(connection, rows, loop_over_pairs)


@settings(max_examples=40, deadline=None)
@given(rows=answers)
def test_judged_answers_like_the_loop(connection: duckdb.DuckDBPyConnection, rows: Rows) -> None:
    assert_like(connection, rows, loop_over_answers)


def test_one_answer_twice_contradicts_nothing(connection: duckdb.DuckDBPyConnection) -> None:
    """Answers with one key differ in case or spaces only."""
    view = show(connection, [pair(1, 5, 5), pair(1, 5, 5)])
    assert whole.find_conflicts(connection, view).num_rows == 0
    assert whole.find_duplicates(connection, view).to_pylist() == [{"example": 1, "first_example": 0}]


def networkx_cycles(rows: Rows) -> list[int]:
    found = []
    for prompt in {row["prompt_key"] for row in rows}:
        graph = networkx.DiGraph()
        graph.add_edges_from((r["chosen_key"], r["rejected_key"]) for r in rows if r["prompt_key"] == prompt)
        parts = [part for part in networkx.strongly_connected_components(graph) if len(part) >= 3]
        found += [
            index
            for index, row in enumerate(rows)
            if row["prompt_key"] == prompt
            and row["chosen_key"] != row["rejected_key"]
            and any({row["chosen_key"], row["rejected_key"]} <= part for part in parts)
        ]
    return sorted(found)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.builds(pair, few, st.integers(0, 5), st.integers(0, 5)), max_size=24))
def test_cycles_like_networkx(connection: duckdb.DuckDBPyConnection, rows: Rows) -> None:
    cycles = whole.find_cycles(connection, show(connection, rows))
    expected = networkx_cycles(rows)
    assert cycles.examples.tolist() == expected
    assert cycles.num_prompts == len({rows[index]["prompt_key"] for index in expected})


def test_cycles_part_by_part(connection: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    rows = [pair(draw.randrange(-40, 40), draw.randrange(5), draw.randrange(5)) for _ in range(400)]
    view = show(connection, rows)
    monkeypatch.setattr(whole, "EDGES_AT_ONCE", 30)
    assert whole.find_cycles(connection, view).examples.tolist() == networkx_cycles(rows) != []


def test_ranked_answers_are_no_cycle_and_cost_no_graph(
    connection: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [pair(prompt, a, b) for prompt in range(20) for a, b in itertools.combinations(range(7), 2)]
    monkeypatch.setattr(whole, "_in_cycles", lambda *_: pytest.fail("the chains were not cut off"))
    assert whole.find_cycles(connection, show(connection, rows)).num_prompts == 0


def test_what_two_people_say_neither_repeats_nor_contradicts(connection: duckdb.DuckDBPyConnection) -> None:
    rows = [
        *(pair(1, *order, annotator=name) for order, name in (((5, 6), "a"), ((5, 6), "b"), ((6, 5), "c"))),
        *(pair(2, *order, annotator="a") for order in ((5, 6), (5, 6), (6, 5))),
        *(pair(3, *order, annotator=name) for order, name in (((5, 6), None), ((6, 5), None), ((6, 5), "a"))),
        *(pair(4, *order, annotator=name) for order, name in (((1, 2), "a"), ((2, 3), "b"), ((3, 1), "c"))),
        *(pair(5, *order, annotator="a") for order in ((1, 2), (2, 3), (3, 1))),
    ]
    view = show(connection, rows)
    assert whole.find_duplicates(connection, view).to_pylist() == [{"example": 4, "first_example": 3}]
    assert whole.find_conflicts(connection, view)["example"].to_pylist() == [3, 4, 5, 6, 7]
    cycles = whole.find_cycles(connection, view)
    assert (cycles.examples.tolist(), cycles.num_prompts) == ([12, 13, 14], 1)
    labels = [answer(1, 5, label, annotator=name) for label, name in ((True, "a"), (True, "b"), (False, "c"))]
    view = show(connection, [*labels, answer(1, 5, False, annotator="a")])
    assert whole.find_duplicates(connection, view).num_rows == 0
    assert whole.find_conflicts(connection, view)["example"].to_pylist() == [0, 3]


def test_agreement_of_annotators(connection: duckdb.DuckDBPyConnection) -> None:
    rows = [
        *(pair(1, *order, annotator=name) for order, name in (((5, 6), "a"), ((5, 6), "b"), ((6, 5), "c"))),
        pair(2, 5, 6, annotator="a"),  # Judged by one person.
        pair(3, 5, 6, annotator="a"), pair(3, 5, 6, annotator="a"),  # By one person twice.
        pair(4, 5, 6, annotator="a"), pair(4, 6, 5, annotator="a"), pair(4, 5, 6, annotator="b"),  # Unsure.
        pair(5, 5, 6), pair(5, 6, 5),  # Nobody's name.
    ]  # fmt: skip
    found = whole.annotator_agreement(connection, show(connection, rows))
    assert found == {"annotator_agreement_fraction": pytest.approx(1 / 3), "num_items_judged_by_several": 1}


def test_agreement_on_judged_answers(connection: duckdb.DuckDBPyConnection) -> None:
    rows = [answer(1, 5, label, annotator=name) for label, name in ((True, "a"), (True, "b"), (None, "c"))]
    rows += [answer(1, 6, label, annotator=name) for label, name in ((True, "a"), (False, "b"))]
    found = whole.annotator_agreement(connection, show(connection, rows))
    assert found == {"annotator_agreement_fraction": 0.5, "num_items_judged_by_several": 2}


def test_the_first_pairs_of_a_prompt_are_under_the_cap(connection: duckdb.DuckDBPyConnection) -> None:
    rows = [pair(prompt, n, n + 1, group_key=prompt % 10) for n, prompt in enumerate([1, 11, 2, 1, 1, 2, 3])]
    found = whole.over_cap(connection, show(connection, rows), 2)
    assert found["example"].to_pylist() == [3, 4]
    with pytest.raises(ValueError, match="at least 1"):
        whole.over_cap(connection, "examples", 0)


def test_nothing_found_is_a_table_without_rows(connection: duckdb.DuckDBPyConnection) -> None:
    for rows in ([], [pair(1, 2, 3), pair(2, 2, 3)]):
        view = show(connection, rows)
        assert whole.find_duplicates(connection, view).column_names == ["example", "first_example"]
        assert whole.find_conflicts(connection, view).column_names == ["example"]
        assert whole.find_duplicates(connection, view).num_rows == whole.find_conflicts(connection, view).num_rows == 0
        assert whole.over_cap(connection, view, 1).num_rows == 0
        assert whole.find_cycles(connection, view).examples.dtype == np.int64
        assert whole.find_cycles(connection, view).num_prompts == 0
        assert whole.annotator_agreement(connection, view)["annotator_agreement_fraction"] is None


def test_the_store_writes_into_its_folder_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    work = tmp_path / "it's here"
    work.mkdir()
    paths = [work / f"{name}.parquet" for name in ("b", "a")]
    for place, path in enumerate(paths):
        pq.write_table(pa.table({"example": [place * 10, place * 10 + 1]}), path)
    connection = open_store(work, 64 << 20, 1)
    register(connection, "files", paths)
    assert [row[0] for row in connection.sql("select example from files").fetchall()] == [0, 1, 10, 11]
    # More than memory holds: it spills there.
    assert (
        number(connection, "select count(distinct (r, r::varchar || 'padding')) from range(3000000) t(r)") == 3_000_000
    )
    connection.close()
    assert list(home.iterdir()) == []
    with pytest.raises(ValueError, match="at least one file"):
        register(open_store(work, 64 << 20, 1), "none", [])
    with pytest.raises(ValueError, match="1 thread"):
        open_store(work, 1 << 20, 1)
