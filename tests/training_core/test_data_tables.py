"""Token tables: the same ids as encoding row by row, opened when nothing changed, and no Python objects for rows."""

from __future__ import annotations

import copy
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from training_core.data import tables
from training_core.data.encoding import tokenizer_digest
from training_core.data.tables import FeedbackTable, PairTable, build_feedback_table, build_pair_table
from training_core.errors import DataError
from training_core.models.chat import encode_conversation, encode_pair
from training_core.models.loading import load_tokenizer

LIMIT = 512
NUM_PAIRS = 600
"""More than two batches of a table."""


def message(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def pair_rows(number: int) -> list[dict[str, Any]]:
    return [
        {
            "example_id": f"e{i}",
            "group_id": f"g{i // 2}",
            "prompt_messages": message("user", f"About {i}?"),
            "chosen_messages": message("assistant", "yes " * (1 + i % 4)),
            "rejected_messages": message("assistant", f"no {i} " * (1 + i % 3)),
            "margin": None if i % 2 else i / 4,
            "chosen_score": float(i),
            "rejected_score": None,
        }
        for i in range(number)
    ]


def feedback_rows(number: int) -> list[dict[str, Any]]:
    return [
        {
            "example_id": f"f{i}",
            "group_id": f"g{i}",
            "prompt_messages": message("user", f"About {i}?"),
            "answer_messages": message("assistant", "yes " * (1 + i % 4)),
            "label": (True, False, None)[i % 3],
            "rating": None if i % 3 == 0 else i / 2,
        }
        for i in range(number)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    schema = pa.Table.from_pylist(rows).schema
    for name in ("margin", "chosen_score", "rejected_score", "rating"):
        if name in schema.names:
            schema = schema.set(schema.get_field_index(name), pa.field(name, pa.float64()))
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Any:
    return load_tokenizer(tiny_checkpoint)


@pytest.fixture(scope="module")
def pairs(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> PairTable:
    folder = tmp_path_factory.mktemp("pairs")
    return build_pair_table(
        write(folder / "p.parquet", pair_rows(NUM_PAIRS)), tokenizer, LIMIT, folder / "sub" / "p.arrow"
    )


@pytest.mark.parametrize("index", [0, 255, 256, 511, 512, NUM_PAIRS - 1, -1])
def test_pair_equals_encoding_its_row(pairs: PairTable, tokenizer: Any, index: int) -> None:
    row = pair_rows(NUM_PAIRS)[index]
    pair = pairs[index]
    ids = encode_pair(tokenizer, row["prompt_messages"], row["chosen_messages"], row["rejected_messages"])
    assert (pair.chosen, pair.rejected, pair.num_prompt_tokens) == ids
    assert all(type(token) is int for token in pair.chosen)
    for name in ("margin", "chosen_score", "rejected_score", "example_id", "group_id"):
        assert getattr(pair, name) == row[name]
    assert pair.length == pairs.lengths[index] == max(len(ids[0]), len(ids[1]))


def test_columns_without_rows(pairs: PairTable) -> None:
    everything = list(pairs)
    assert len(everything) == len(pairs) == NUM_PAIRS
    assert pairs.lengths.dtype == np.int64
    assert pairs.lengths.tolist() == [pair.length for pair in everything]
    assert pairs.group_ids() == {f"g{i}" for i in range(NUM_PAIRS // 2)}
    for column, name in ((pairs.chosen, "chosen"), (pairs.rejected, "rejected")):
        assert list(column) == [getattr(pair, name) for pair in everything]
        assert column[-3:] == list(column)[-3:]
        assert column.lengths.tolist() == [len(getattr(pair, name)) for pair in everything]
    expected = [float("nan") if pair.margin is None else pair.margin for pair in everything]
    np.testing.assert_array_equal(pairs.numbers("margin"), expected)
    with pytest.raises(IndexError):
        pairs[NUM_PAIRS]
    with pytest.raises(IndexError):
        pairs[-NUM_PAIRS - 1]


def test_feedback_equals_encoding_its_rows(tokenizer: Any, tmp_path: Path) -> None:
    rows = feedback_rows(300)
    table = build_feedback_table(write(tmp_path / "f.parquet", rows), tokenizer, LIMIT, tmp_path / "f.arrow")
    for row, item in zip(rows, table, strict=True):
        ids = encode_conversation(tokenizer, row["prompt_messages"], row["answer_messages"])
        assert (item.ids, item.num_prompt_tokens) == ids
        assert {name: getattr(item, name) for name in ("label", "rating", "example_id", "group_id")} == {
            name: row[name] for name in ("label", "rating", "example_id", "group_id")
        }
    assert table.lengths.tolist() == [item.length for item in table] == table.ids.lengths.tolist()
    assert table.numbers("label")[:2].tolist() == [1.0, 0.0]
    assert np.isnan(table.numbers("label")[2])


def test_scores_may_be_absent(tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        {name: value for name, value in row.items() if name not in ("chosen_score", "rejected_score")}
        for row in pair_rows(3)
    ]
    table = build_pair_table(write(tmp_path / "p.parquet", rows), tokenizer, LIMIT, tmp_path / "p.arrow")
    assert [pair.chosen_score for pair in table] == [None] * 3
    assert np.isnan(table.numbers("rejected_score")).all()


def changed(row: dict[str, Any], **values: Any) -> list[dict[str, Any]]:
    return [*pair_rows(2), {**row, **values}]


@pytest.mark.parametrize(
    ("values", "message_part"),
    [
        ({"rejected_messages": message("assistant", "yes yes yes ")}, "pair 'e2' has the same tokens for both answers"),
        ({"chosen_messages": message("assistant", "long " * 600)}, r"pair 'e2' has \d+ tokens, the model's limit is"),
        ({"prompt_messages": None}, "pair 'e2' has no prompt_messages"),
        ({"chosen_messages": []}, "pair 'e2': an answer needs at least one message"),
    ],
)
def test_refuses_what_teaches_nothing(
    tokenizer: Any, tmp_path: Path, values: dict[str, Any], message_part: str
) -> None:
    parquet = write(tmp_path / "p.parquet", changed(pair_rows(3)[2], **values))
    with pytest.raises(DataError, match=message_part):
        build_pair_table(parquet, tokenizer, LIMIT, tmp_path / "p.arrow")
    assert [path.name for path in tmp_path.iterdir()] == ["p.parquet"]  # Neither half a table nor its temporary file.


def test_feedback_that_is_too_long_or_does_not_render(tokenizer: Any, tmp_path: Path) -> None:
    for values, part in (
        ({"answer_messages": message("assistant", "long " * 600)}, "feedback 'f1' has .* limit is 512"),
        ({"answer_messages": []}, "feedback 'f1': an answer needs"),
    ):
        parquet = write(tmp_path / "f.parquet", [feedback_rows(1)[0], {**feedback_rows(2)[1], **values}])
        with pytest.raises(DataError, match=part):
            build_feedback_table(parquet, tokenizer, LIMIT, tmp_path / "f.arrow")


def test_refuses_files_without_rows_or_columns(tokenizer: Any, tmp_path: Path) -> None:
    whole = pa.Table.from_pylist(pair_rows(2))
    files = {"empty": whole.slice(0, 0), "lacking": whole.drop_columns(["margin"])}
    for name, table in files.items():
        pq.write_table(table, tmp_path / name)
    (tmp_path / "text").write_text("not Parquet")
    for name, part in (
        ("empty", "has no rows"),
        ("lacking", "has no column margin"),
        ("text", "cannot be read as Parquet"),
        ("absent", "cannot be read"),
    ):
        with pytest.raises(DataError, match=part):
            build_pair_table(tmp_path / name, tokenizer, LIMIT, tmp_path / "p.arrow")


def test_opens_what_it_finds_and_rebuilds_what_changed(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet, path = write(tmp_path / "p.parquet", pair_rows(3)), tmp_path / "p.arrow"
    build_pair_table(parquet, tokenizer, LIMIT, path)
    content = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(tables, "pair_cells", None)  # Encoding again would fail.
        moved = shutil.copy(parquet, tmp_path / "moved.parquet")
        assert len(build_pair_table(Path(moved), tokenizer, LIMIT, path)) == 3
        other_template = copy.deepcopy(tokenizer)
        other_template.chat_template = tokenizer.chat_template + " "
        write(tmp_path / "longer.parquet", pair_rows(4))
        for arguments in (
            (parquet, tokenizer, LIMIT - 1),
            (parquet, other_template, LIMIT),
            (tmp_path / "longer.parquet", tokenizer, LIMIT),
        ):
            with pytest.raises(TypeError):
                build_pair_table(*arguments, path)
        assert path.read_bytes() == content  # A build that fails leaves the old file.
    assert len(build_pair_table(tmp_path / "longer.parquet", tokenizer, LIMIT, path)) == 4
    for damage in (content[:-20], b"", b"something else"):
        path.write_bytes(damage)
        assert len(build_pair_table(parquet, tokenizer, LIMIT, path)) == 3
        assert path.read_bytes() == content


def test_a_table_of_another_kind_is_replaced(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    build_pair_table(write(tmp_path / "p.parquet", pair_rows(3)), tokenizer, LIMIT, path)
    table = build_feedback_table(write(tmp_path / "f.parquet", feedback_rows(5)), tokenizer, LIMIT, path)
    assert isinstance(table, FeedbackTable)
    assert len(table) == 5


def test_tokenizer_digest_is_of_content(tokenizer: Any, tmp_path: Path) -> None:
    digest = tokenizer_digest(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    same = load_tokenizer(tmp_path)
    same(["a", "longer text"], padding=True, truncation=True, max_length=4)
    assert tokenizer_digest(same) == digest
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<new>"])
    assert tokenizer_digest(other) != digest


def test_many_rows_cost_no_python_objects(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16,000 pairs of 2 x 100 tokens would be 26 MB of pointers as Python lists."""
    ids = np.arange(1000, 1100, dtype=np.int32)

    def cells(row: dict[str, Any], *_: Any) -> dict[str, Any]:
        kept = {name: row[name] for name in ("margin", "chosen_score", "rejected_score", "example_id", "group_id")}
        return {"chosen": ids, "rejected": ids + 1, "num_prompt_tokens": 50, **kept}

    monkeypatch.setattr(tables, "pair_cells", cells)
    peaks, kept, arrow = {}, {}, {}
    for number in (1_000, 16_000):
        parquet = write(tmp_path / f"{number}.parquet", pair_rows(number))
        tracemalloc.start()
        in_pool = pa.total_allocated_bytes()
        table = build_pair_table(parquet, tokenizer, LIMIT, tmp_path / f"{number}.arrow")
        assert sum(len(pair.chosen) for pair in table) == 100 * number
        kept[number], peaks[number] = tracemalloc.get_traced_memory()
        arrow[number] = pa.total_allocated_bytes() - in_pool
        tracemalloc.stop()
    assert peaks[16_000] < peaks[1_000] + 1_000_000
    assert kept[16_000] < kept[1_000] + 16 * 15_000  # Lengths, and a little for each batch.
    assert arrow[16_000] < arrow[1_000] + 16 * 15_000  # Mapped, not read into Arrow's own memory either.
