"""Each kind of file gives the same rows; what is damaged, packed oddly or of another kind is refused with a reason."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_checks.files import SUFFIXES, check_file
from data_checks.reading import Block, block, blocks, iter_rows, read_block, streams, tables
from data_checks.rows import RawRow, Reason
from training_core.errors import ConfigurationError, DataError

CHAT = [{"role": "user", "content": 'A "quoted"\nline, é'}, {"role": "assistant", "content": "[1]"}]
ROWS: list[dict[str, Any]] = [
    {"prompt": f"p: {index}", "chosen": CHAT, "rejected": "[no, list]", "note": "x\ny" if index % 2 else None}
    for index in range(40)
]
EXPECTED = [{key: value for key, value in row.items() if value is not None} for row in ROWS]
JSON_LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def separated(delimiter: str) -> bytes:
    sink = io.StringIO(newline="")
    writer = csv.writer(sink, delimiter=delimiter)
    writer.writerow(ROWS[0])
    writer.writerows([[json.dumps(v) if isinstance(v, list) else v for v in row.values()] for row in ROWS])
    return sink.getvalue().encode()


PLAIN = {
    ".jsonl": JSON_LINES,
    ".ndjson": b"\xef\xbb\xbf" + JSON_LINES.replace(b"\n", b"\r\n"),
    ".json": json.dumps(ROWS, indent=1).encode(),
    ".csv": separated(","),
    ".tsv": b"\xef\xbb\xbf" + separated("\t"),
}


def write_kind(path: Path) -> Path:
    """Write ROWS to a file of the kind that its suffix says."""
    plain = path.with_suffix("") if path.suffix in (".gz", ".zst") else path
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(ROWS)
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    elif path.suffix == ".gz":  # Members one after the other, an empty one among them.
        content = PLAIN[plain.suffix]
        path.write_bytes(gzip.compress(content[:99]) + gzip.compress(b"") + gzip.compress(content[99:]) + b"\x00" * 9)
    elif path.suffix == ".zst":
        content = PLAIN[plain.suffix]
        codec = pa.Codec("zstd")
        path.write_bytes(b"".join(codec.compress(part).to_pybytes() for part in (content[:99], b"", content[99:])))
    else:
        path.write_bytes(PLAIN[path.suffix])
    return path


def read(path: Path) -> list[RawRow]:
    return [row for rows in iter_rows(path, path.name, f"data.x: {path.name}") for row in rows]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_kind_gives_the_same_rows(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_kind(tmp_path / f"rows{suffix}")
    for chunk_bytes, block_rows in ((1 << 22, 8192), (301, 3)):
        monkeypatch.setattr(streams, "CHUNK_BYTES", chunk_bytes)
        monkeypatch.setattr(block, "MAX_BLOCK_ROWS", block_rows)
        found = [pickle.loads(pickle.dumps(piece)) for piece in blocks(path, "f", "f")]
        rows = [row for piece in found for row in read_block(piece)]
        assert [row.value for row in rows] == EXPECTED
        assert [row.number for row in rows] == list(range(1, 41))
        assert all(isinstance(piece, Block) for piece in found)
        assert all(row.file == "f" and row.finding is None for row in rows)
        is_table = suffix in (".parquet", ".arrow")
        assert all((row.offset is None) == is_table for row in rows)
    assert max(len(read_block(piece)) for piece in found) <= 3


def test_a_folder_of_datasets_is_read_in_its_own_order(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    folder = tmp_path / "set"
    datasets.Dataset.from_list(ROWS).save_to_disk(folder, num_shards=3)
    assert [(row.number, row.value) for row in read(folder)] == list(enumerate(EXPECTED, start=1))
    (folder / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataError, match=r"not complete: data-00001-of-00003\.arrow is missing"):
        check_file(folder, "data.x: set")
    (folder / "state.json").write_text('{"_data_files": [{"filename": "../x.arrow"}]}')
    with pytest.raises(DataError, match=r"its state\.json names no files"):
        check_file(folder, "data.x: set")
    (folder / "state.json").write_text("oops")
    with pytest.raises(DataError, match=r"its state\.json has no list '_data_files'"):
        check_file(folder, "data.x: set")


def test_a_folder_of_splits_wants_one_named(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    part = datasets.Dataset.from_list(ROWS[:2])
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "set")
    with pytest.raises(ConfigurationError, match=r"several splits\. Name one of them: some/set/train, some/set/test$"):
        check_file(tmp_path / "set", "data.x: some/set")
    assert len(read(tmp_path / "set" / "train")) == 2
    (tmp_path / "set" / "dataset_dict.json").unlink()
    with pytest.raises(ConfigurationError, match=r"is a folder\. It holds: test/, train/\."):
        check_file(tmp_path / "set", "data.x: some/set")


@pytest.mark.parametrize(
    "content",
    [
        JSON_LINES,
        json.dumps({"version": 1, "meta": {"data": [1]}, "data": ROWS, "end": "x"}).encode(),
        b"\n" + json.dumps({"data": ROWS}, indent=2).encode() + b"\n\n",
        b" " + json.dumps(ROWS, ensure_ascii=False).encode(),
    ],
    ids=["lines", "wrapped", "indented", "blank_first"],
)
def test_json_files_hold_lists_wrapped_lists_or_lines(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    rows = read(path)
    assert [row.value for row in rows] == EXPECTED
    for row in rows:
        assert row.offset is not None
        assert content[row.offset :].startswith(row.raw.encode())


def test_a_bad_item_of_a_list_costs_one_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"a": 1}, oops, {"a": 2, "a": 3},, {"a": "\\ud800"}, [1], {"a": "],["}, ]')
    rows = read(path)
    reasons = [row.finding.reason if row.finding else None for row in rows]
    malformed = Reason.MALFORMED_JSON
    assert reasons == [None, malformed, malformed, malformed, Reason.INVALID_UNICODE, malformed, None, malformed]
    assert [row.raw for row in rows[1:4]] == ["oops", '{"a": 2, "a": 3}', ","]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1}, {"a"', r"damaged JSON file: after 1 .*the list is not closed"),
        (b'[{"a": 1}', r"damaged JSON file: after 0 .*the list is not closed"),
        (b'[{"a": 1}, ' + b"[" * (1 << 21), "after 1 .*brackets are open"),
        (b'[{"a": 1}] [', "after 1 .*something follows the list's end"),
        (b'[{"a": 1}}, 1]', "after 1 .*curly bracket"),
        (b'{"data": [{"a": 1}], "b": }', "what follows the list is not the end of the object"),
        (b'{"data": [{"a": 1}], "test": [{"a": 2}]}', "several lists: data, test"),
        (b'{"test": [{"a": 2}], "data": [{"a": 1}]}', "several lists: data, test"),
        (b'{"data": {"a":\n[1]}}', "holds no list of rows"),
        (b'"text"', "holds no list of rows"),
        (b"[]", "holds no rows"),
        (b" \n ", "holds no rows"),
    ],
    ids=range(12),
)
def test_json_files_that_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^data\.x: rows\.json .*{message}"):
        read(path)


def test_csv_cells_are_text_unless_they_are_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    cells = {
        "margin": "1.5", "chosen": '[{"role": "user", "content": "x"}]', "rejected": "[1, 2]", "prompt": '{"a": 1}',
        "models": '["a", "b"]', "scores": '{"a": 1}', "note": "[sic]", "empty": "", "extra": " [1]",
    }  # fmt: skip
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([cells.keys(), cells.values()])
    expected = {**cells, "chosen": [{"role": "user", "content": "x"}], "models": ["a", "b"], "scores": {"a": 1}}
    expected["margin"] = 1.5
    del expected["empty"]
    assert read(path)[0].value == expected


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        (b"1", Reason.MALFORMED_JSON, "the row has 1 fields, the header names 2"),
        (b"1,2,3", Reason.MALFORMED_JSON, "the row has 3 fields, the header names 2"),
        (b"\xff,2", Reason.INVALID_UNICODE, "byte 0 of the row is not UTF-8"),
        (b"a\x00,2", Reason.NUL_CHARACTER, "a text holds a NUL character"),
        (b"a\rb,2", Reason.MALFORMED_JSON, "the row is no CSV"),
        (b"1,\"[{'role': 'user', 'content': 'secret'}]\"", Reason.WRONG_TYPE, "column chosen holds a chat in Python's"),
        (b'1,"[{""role"": 1, ""role"": 2}]"', Reason.MALFORMED_JSON, "column chosen holds JSON that cannot be used"),
        (b'"{""x"": ""\\ud800""}",2', Reason.INVALID_UNICODE, "a text holds a lone surrogate"),
    ],
    ids=range(8),
)
def test_csv_rows_that_are_refused(tmp_path: Path, record: bytes, reason: Reason, detail: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"other,chosen\n\n0,ok\n" + record + b"\n1,fine")
    rows = read(path)
    assert [row.number for row in rows] == [2, 3, 4]  # The blank line is counted, and is no row.
    assert [row.value is None for row in rows] == [False, True, False]
    assert rows[1].finding is not None
    assert rows[1].finding.reason == reason
    assert rows[1].finding.detail.startswith(detail)
    assert rows[1].offset == len(b"other,chosen\n\n0,ok\n")
    assert rows[1].raw == record.decode(errors="backslashreplace")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'a,b\n1,2\n1,"x\n2,3\n', "damaged CSV file: after 2 .*a quoted field is not closed"),
        (b"a,a\n1,2\n", "two columns of one name"),
        (b"a;b\n1;2\n", "one column, and ';' in its name"),
        (b"\xff\xfd,b\n1,2\n", "no readable header"),
        (b"a\rb\n1,2\n", "no readable header"),
        (b"a,b\n", "holds no rows"),
        (b"\n", "holds no rows"),
    ],
)
def test_csv_files_that_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^data\.x: rows\.csv .*{message}"):
        read(path)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".json", ".csv.gz", ".parquet", ".arrow"])
def test_no_row_of_a_file_cut_short_is_used_in_silence(tmp_path: Path, suffix: str) -> None:
    path = write_kind(tmp_path / f"rows{suffix}")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"damaged (gzip|zstd|JSON|Parquet|Arrow) file: .*(after|cut short)"):
        read(path)


def test_damage_names_the_rows_before_it(tmp_path: Path) -> None:
    for suffix, pack in ((".gz", gzip.compress), (".zst", lambda text: pa.Codec("zstd").compress(text).to_pybytes())):
        path = tmp_path / f"rows.jsonl{suffix}"
        lines = [json.dumps({"a": str(index**20)}).encode() for index in range(90_000)]
        path.write_bytes(pack(b"\n".join(lines))[:-4])
        with pytest.raises(DataError, match=r"damaged \w+ file: after [78]\d{4} line\(s\), .*Fetch or write it again"):
            read(path)
    stream = tmp_path / "rows.arrow"
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(str(stream), table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    stream.write_bytes(stream.read_bytes()[: -len(tables.END_OF_STREAM)])
    with pytest.raises(DataError, match=r"damaged Arrow file: after 40 row\(s\), the mark at its end is missing"):
        read(stream)


def test_a_row_of_a_table_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(block, "CHUNK_BYTES", 500)
    monkeypatch.setattr(block, "KEPT_BYTES", 100)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"a": ["x", "y" * 2000, "z"], "b": pa.array([1, 2, None])}), path)
    rows = read(path)
    assert [row.value for row in rows] == [{"a": "x", "b": 1}, None, {"a": "z"}]
    assert rows[1].finding is not None
    assert rows[1].finding.reason == Reason.ROW_TOO_LARGE
    assert json.loads(rows[1].raw) == {"a": "y" * 25, "b": "(int64)"}


def test_types_of_columns_become_json(tmp_path: Path) -> None:
    import datetime
    import decimal

    path = tmp_path / "rows.parquet"
    columns = {
        "decimal": pa.array([decimal.Decimal("1.50"), None]),
        "dictionary": pa.array(["a", "b"]).dictionary_encode(),
        "large": pa.array(["a", None], pa.large_string()),
        "view": pa.array(["a", "b"], pa.string_view()),
        "time": pa.array([datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)] * 2),
        "big": pa.array([2**64 - 1, 1], pa.uint64()),
    }
    pq.write_table(pa.table(columns), path)
    first, second = (row.value for row in read(path))
    assert first is not None
    assert first.pop("time").year == 2020
    assert first == {"decimal": 1.5, "dictionary": "a", "large": "a", "view": "a", "big": 2**64 - 1}
    assert isinstance(first["decimal"], float)
    assert second is not None
    assert sorted(second) == ["big", "dictionary", "time", "view"]


def test_arrow_text_that_is_no_text(tmp_path: Path) -> None:
    texts = pa.array([b"good", b"b\xffd", b"n\x00l"]).cast(pa.string(), safe=False)
    nested = pa.ListArray.from_arrays([0, 1, 2, 3], texts)
    table = pa.table({"prompt": texts, "nested": nested})
    path = tmp_path / "rows.arrow"
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    rows = read(path)
    assert rows[0].value == {"prompt": "good", "nested": ["good"]}
    reasons = [row.finding.reason for row in rows[1:] if row.finding]
    assert reasons == [Reason.INVALID_UNICODE, Reason.NUL_CHARACTER]


def test_a_table_that_unpacks_to_far_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(tables, "MAX_RATIO", 50)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"a": ["x" * (4 << 20)]}), path, compression="zstd", use_dictionary=False)
    with pytest.raises(DataError, match="unpacks to more than 50 times"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), r"is UTF-16 text, not UTF-8: .*little-endian.*iconv -f UTF-16"),
        ("a.csv", "a,b".encode("utf-32"), "is UTF-32 text"),
        ("a.jsonl.gz", gzip.compress('{"a": 1}'.encode("utf-16"), mtime=0), "is UTF-16 text"),
        ("a.json", b"\xfe\xff\x00[", "is UTF-16 text, not UTF-8: its first bytes say UTF-16 .big-endian"),
        ("a.csv", b"PK\x03\x04rest", "holds a ZIP archive"),
        ("a.jsonl.gz", b"\x28\xb5\x2f\xfdrest", "holds zstd, which its name does not say"),
        ("a.jsonl.zst", b"rest", "is not a zstd file although its name says so"),
        ("a.arrow", b"rest", "is not an Arrow file although its name says so"),
        ("a.arrow", b"ARROW1rest", "is a damaged Arrow file"),
        ("a.csv", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.parquet", b"", "has 0 bytes"),
    ],
)
def test_other_bytes_than_the_name_says(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^data\.x: {name} .*{message}"):
        read(path)
