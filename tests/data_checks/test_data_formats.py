"""Reading files, telling their format, cutting conversations at turns."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_checks.detection import detect, identify
from data_checks.formats import RowError, parse_pair, parse_prompt, split_transcript
from data_checks.reading import iter_rows, parse_line
from data_checks.rows import Finding, PairRow, RawRow, Reason, Turn
from training_core.errors import ConfigurationError, DataError

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
OTHER = {"role": "assistant", "content": "Go away"}


def read_rows(path: Path, name: str, label: str | None = None) -> list[RawRow]:
    return [row for rows in iter_rows(path, name, label or name) for row in rows]


def parse(value: dict[str, Any], format_name: str = "pairs") -> PairRow | Finding:
    return parse_pair(RawRow("f", 1, "", value), format_name, "somewhere")


def test_transcripts_are_cut_at_turns_and_keep_their_text() -> None:
    text = "\n\nHuman: Human: is a word\n\nAssistant:  two spaces \n\nHuman:\n\nAssistant: tail\n\n"
    assert split_transcript(text) == (
        Turn("user", "Human: is a word"),
        Turn("assistant", " two spaces "),
        Turn("user", ""),
        Turn("assistant", "tail\n\n"),
    )
    assert split_transcript("Human: no blank lines first") == (Turn("user", "no blank lines first"),)
    with pytest.raises(RowError, match="does not start"):
        split_transcript("Dear reader,\n\nHuman: hi")


def test_hh_prompt_is_not_cut_at_common_characters() -> None:
    base = "\n\nHuman: Colour?\n\nAssistant: The sky is bl"
    pair = parse({"chosen": base + "ue", "rejected": base + "ack"}, "hh")
    assert isinstance(pair, PairRow)
    assert pair.prompt == (Turn("user", "Colour?"),)
    assert (pair.chosen, pair.rejected) == (
        (Turn("assistant", "The sky is blue"),),
        (Turn("assistant", "The sky is black"),),
    )


HH = "\n\nHuman: Colour?\n\nAssistant: Which?\n\nHuman: Of the sky\n\nAssistant:"
HH_CASES = [
    ({"chosen": HH + " Blue", "rejected": HH + " Red"}, {}),
    # A marker inside a text is a turn; then the sides differ in more than the answer, or do not end with one.
    ({"chosen": HH + " Blue\n\nHuman: Thanks\n\nAssistant: Bye", "rejected": HH + " Red"}, {"prompt_mismatch": 1}),
    ({"chosen": HH + " Blue\n\nHuman: Thanks", "rejected": HH + " Red"}, {"last_turn_not_assistant": 1}),
    ({"chosen": HH + " Blue\n\nAssistant: Or not", "rejected": HH + " Red"}, {"prompt_mismatch": 1}),
    ({"chosen": HH + " Blue", "rejected": HH.replace("Which", "What") + " Red"}, {"prompt_mismatch": 1}),
    ({"chosen": HH + " Blue", "rejected": HH.replace("Colour", "Color") + " Red"}, {"prompt_mismatch": 1}),
    ({"chosen": HH, "rejected": HH + " Red"}, {"empty_response": 1}),
    ({"chosen": "\n\nAssistant: Blue", "rejected": "\n\nAssistant: Red"}, {"empty_prompt": 1}),
    ({"chosen": "\n\nHuman:\n\nAssistant: Blue", "rejected": "\n\nHuman:\n\nAssistant: Red"}, {"empty_prompt": 1}),
    ({"chosen": "Colour?\n\nAssistant: Blue", "rejected": HH + " Red"}, {"wrong_type": 1}),
]


@pytest.mark.parametrize(("row", "quarantined"), HH_CASES)
def test_transcripts_that_are_no_pair(row: Any, quarantined: Any, write_rows: Any, check: Any) -> None:
    good = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
    data = check(write_rows([good, row]), format="hh")
    assert data.counts["preferences"].quarantined == quarantined
    if not quarantined:
        kept = next(kept for kept in data.pairs if kept.source_row == 2)
        assert [turn.role for turn in kept.prompt] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"},
        {"prompt": [USER], "chosen": "Hello", "rejected": "Go away"},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [OTHER]},
        {"prompt": [USER], "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]},
        {"prompt": "Hi", "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]},
        {"prompt": "Hi", "chosen": [ASSISTANT], "rejected": [USER, OTHER]},
        {"chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]},
    ],
)
def test_all_ways_to_write_one_pair(value: dict[str, Any]) -> None:
    pair = parse({**value, "score_chosen": 9, "score_rejected": 2.5, "margin": 1})
    assert isinstance(pair, PairRow)
    assert pair.prompt == pair.rejected_prompt == (Turn("user", "Hi"),)
    assert (pair.chosen, pair.rejected) == ((Turn("assistant", "Hello"),), (Turn("assistant", "Go away"),))
    assert (pair.margin, pair.chosen_score, pair.rejected_score, pair.source) == (1.0, 9.0, 2.5, "somewhere")


def test_hybrid_of_several_turns_takes_the_messages() -> None:
    context = [{"role": "system", "content": "Be kind."}, USER, ASSISTANT, {"role": "user", "content": "More"}]
    for prompt in ("Hi", "More"):
        pair = parse({"prompt": prompt, "chosen": [*context, ASSISTANT], "rejected": [*context, OTHER]})
        assert isinstance(pair, PairRow)
        assert [turn.content for turn in pair.prompt] == ["Be kind.", "Hi", "Hello", "More"]
    wrong = parse({"prompt": "Hello", "chosen": [*context, ASSISTANT], "rejected": [*context, OTHER]})
    assert isinstance(wrong, Finding)
    assert wrong.reason == Reason.PROMPT_MISMATCH


def test_detection_says_why(write_rows: Any, good_pairs: Any) -> None:
    evidence = identify("f", write_rows(good_pairs), "f", ("pairs",))
    assert (evidence.format, evidence.decided_by) == ("pairs", "columns")
    assert evidence.columns == {"chosen": 40, "prompt": 40, "rejected": 40}
    assert "40 of 40 sampled rows have chosen and rejected" in evidence.evidence
    transcript = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c", "note": 1}
    evidence = identify("f", write_rows([transcript]), "f", ("pairs",))
    assert (evidence.format, evidence.unused_columns) == ("hh", ["note"])
    assert identify("f", write_rows(good_pairs), "f", ("pairs",), "hh").decided_by == "config"


def test_ambiguous_and_unknown_formats_are_errors() -> None:
    transcript = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
    with pytest.raises(DataError, match=r"ambiguous.*Write format: pairs .* or format: hh.* beside its path"):
        detect("f", [{**transcript, "prompt": "a"}])
    with pytest.raises(DataError, match="ambiguous"):
        detect("f", [transcript, {"chosen": "a", "rejected": "b"}])
    with pytest.raises(DataError, match="no prompt can be told"):
        detect("f", [{"chosen": "The sky is blue", "rejected": "The sky is black"}])
    with pytest.raises(DataError, match="columns found: completion, label"):
        detect("f", [{"completion": "a", "label": True}])
    with pytest.raises(DataError, match="no row could be read"):
        detect("f", [])


def test_a_few_bad_rows_do_not_change_the_format(write_rows: Any, good_pairs: Any, check: Any) -> None:
    data = check(write_rows([*good_pairs, {"chosen": "x", "rejected": "y"}, b"oops"]))
    assert data.formats[0].format == "pairs"
    assert data.counts["preferences"].quarantined == {"malformed_json": 1, "wrong_type": 1}


def test_all_kinds_of_files_give_the_same_tables(write_rows: Any, good_pairs: Any, check: Any) -> None:
    rows = [{**row, "margin": 0.5 if index % 2 else None} for index, row in enumerate(good_pairs)]
    rows += [{"prompt": "ü", "chosen": "é ", "rejected": "e\u0301\n", "margin": None}]
    tables = {}
    for name in ("a.jsonl", "a.ndjson", "a.jsonl.gz", "a.parquet"):
        data = check(write_rows(rows, name))
        assert data.formats[0].columns["margin"] == 20
        parts = [
            data.table(f"{side}_pairs").drop_columns(["source_file", "source"]) for side in ("train", "validation")
        ]
        tables[name] = (*parts, data.table("rl_prompts"), data.table("eval_prompts"), data.fingerprint)
    assert all(table == tables["a.jsonl"] for table in tables.values())
    assert "é " in str(tables["a.jsonl"][0]["chosen_messages"].to_pylist() + tables["a.jsonl"][1].to_pylist())


def test_lines_are_counted_as_an_editor_does(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n   \n{"a": 2}\n{"a"\n{"a": 3}')
    rows = read_rows(path, "rows")
    assert [(row.number, row.value) for row in rows] == [(1, {"a": 1}), (4, {"a": 2}), (5, None), (6, {"a": 3})]
    assert rows[2].raw == '{"a"'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "holds no rows"),
        ("a.jsonl.gz", b"", "holds no rows"),
        ("a.jsonl", b"\n \n", "holds no rows"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 999, mtime=0)[:-9], "damaged gzip"),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "holds gzip"),
        ("a.jsonl.gz", b"{}", "is not a gzip file although its name says so"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.jsonl", b"PAR1rest", "holds Parquet"),
        ("a.parquet", b"PAR1rest of it PAR1", "damaged Parquet"),
        ("a.parquet", b"PAR1rest of it", "cut short after 14 bytes"),
        ("a.parquet", b"{}", "is not a Parquet file although its name says so"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows(path, name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.jsonl", r"^data\.x: nothing.jsonl does not exist\. Did you mean .*nothing.ndjson\?$"),
        ("folder", r"is a folder\. It holds: b\.jsonl\. Allowed: a file whose name ends in \.jsonl, .* or \.parquet"),
        ("a.txt", r"unknown kind\. Allowed: [^:]*\.parquet$"),
        ("away.jsonl", r"is a link to gone\.jsonl, and that target is missing"),
        ("pipe.jsonl", "is no ordinary file"),
    ],
)
def test_files_of_other_kinds_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.jsonl").touch()
    (tmp_path / "nothing.ndjson").touch()
    (tmp_path / "away.jsonl").symlink_to("gone.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for other in ("a.txt",):
        (tmp_path / other).write_text("a")
    with pytest.raises(ConfigurationError, match=message):
        read_rows(tmp_path / name, name, f"data.x: {name}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n"prompt": "a"\n}\n', "none of its 3 rows could be read; row 1: .*JSON text over many lines.*jq -c"),
        (b'[{"prompt": "a"}]', "its only row could not be read; row 1: the line is a list, not an object.*jq -c"),
        (b'{"prompt": "\xe9"}\n' * 2, "none of its 2 rows .* row 1: byte 12 of the line is not UTF-8.*as UTF-8$"),
    ],
)
def test_a_file_without_any_readable_row_says_why(tmp_path: Path, check: Any, content: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^data\.preferences\.0\.path: .*rows\.jsonl: {message}"):
        check(path)
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n')
    for field in ("eval_prompts", "rl_prompts"):
        with pytest.raises(DataError, match=rf"^data\.{field}: .*rows\.jsonl: {message}"):
            check(good, **{field: str(path)})


def test_parquet_with_bytes_that_are_no_text(tmp_path: Path) -> None:
    texts = pa.array([b"good", b"b\xffd"]).view(pa.binary()).cast(pa.string(), safe=False)
    nested = pa.array([["x"], ["y"]])
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.table({"prompt": texts, "other": nested}), path)
    rows = read_rows(path, "bad")
    assert rows[0].value == {"prompt": "good", "other": ["x"]}
    assert rows[1].finding == Finding(Reason.INVALID_UNICODE, "unreadable value in column prompt")
    assert json.loads(rows[1].raw)["prompt"] == "b\\xffd"


def test_parquet_with_two_columns_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "twice.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), path)
    with pytest.raises(DataError, match="two columns of one name"):
        read_rows(path, "twice")


def test_parse_line_keeps_the_text_of_what_it_refuses() -> None:
    row = parse_line(b"caf\xe9", "f", 9)
    assert (row.raw, row.number, row.value) == ("caf\\xe9", 9, None)
    assert row.finding is not None
    assert "byte 3" in row.finding.detail


def test_columns_nested_too_deep_to_be_written_are_a_finding() -> None:
    value: Any = "x"
    for _ in range(100_000):
        value = [value]
    found = parse_prompt(RawRow("f", 1, "", {"prompt": "a", "extra": value}))
    assert isinstance(found, Finding)
    assert found.reason == Reason.WRONG_TYPE


def test_nesting_of_any_depth_is_read_or_refused() -> None:
    for depth in (10, 300, *range(900, 1010, 10), 5000, 200_000):
        row = parse_line(b'{"prompt": "a", "extra": ' + b"[" * depth + b"]" * depth + b"}", "f", 1)
        parsed = row.finding or parse_prompt(row)
        assert isinstance(parsed, Finding) or depth < 5000
        assert not isinstance(parsed, Finding) or parsed.reason in (Reason.MALFORMED_JSON, Reason.WRONG_TYPE)
