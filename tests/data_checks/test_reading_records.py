"""The fast parser and the exact one agree; cutting does not depend on where chunks of a file end."""

from __future__ import annotations

import csv
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_checks.reading import block, blocks, iter_rows, parse_line, read_block, records, streams
from data_checks.reading.cutting import Cutter, Piece
from data_checks.reading.json_lists import ItemBlock, item_blocks, item_cutter
from data_checks.reading.lines import LineBlock
from data_checks.reading.separated import RecordEnds
from data_checks.rows import Finding, RawRow, Reason

TEXTS = st.one_of(
    st.text(max_size=6),
    st.sampled_from([":", ' ":', '": ', "\\", '\\"', "\x00", "a\\u0000", "é", "😀", "\ud800", " : "]),
)
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([2**63, -(2**63), 2**63 - 1, 2**64, 10**30, -0.0, 1e22, 9.3e18]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)
ROWS = st.dictionaries(TEXTS, VALUES, max_size=4)
SPACINGS = st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : "), (",\t", "\t:"), (",", " \t :")])
RAW_LINES = [
    b'{"a": 1, "a": 1}', b'{"a": {"b": 1, "b": 2}, "c": ":"}', b'{"a" :1, "a" :2, "b":":x"}', b'{"a\\\\":1,"a\\\\":2}',
    b'[{"a": 1}]', b'"a"', b"null", b"1", b"{", b"", b" ", b"\x00", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}',
    b'{"a": 01}', b'{"a": "\\ud800"}', b'{"a": "\\uDC00\\uD800"}', b'{"a": "\\u0000"}', b'{"a": "\x01"}',
    b'{"a": "\xff"}',
    b'{"a": "\xed\xa0\x80"}', b"\xef\xbb\xbf{}", b"\x0b{}", b'{"a": 1}}', b'{"a": ' + b"9" * 5000 + b"}", b'{"a": 1.}',
    b'{"a": ' + b"[" * 198 + b"]" * 198 + b"}", b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
    b'{"a": ' + b"[" * 1100 + b"]" * 1100 + b"}", b'{"a": "' + b"[" * 300 + b'"}', b'{"a": null}', b'{"a": nul}',
    b'{"a": 18446744073709551616}',
    b'{"a": [123456789012345678901234567890]}', b'{"a": "\\ud83d\\ude00"}', b'{"a":"\\x"}',
]  # fmt: skip
"""Lines about which parsers disagree."""
MODEST = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.sampled_from(RAW_LINES))
    item, colon = draw(SPACINGS)
    ascii_only = draw(st.booleans())
    line = json.dumps(draw(ROWS), separators=(item, colon), ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    if kind == 1 and line:  # One byte is gone.
        place = draw(st.integers(0, len(line) - 1))
        line = line[:place] + line[place + 1 :]
    return line.replace(b"\n", b" ")


def same(row: RawRow) -> tuple[Any, ...]:
    """Return what tells rows apart; repr, since 1 == 1.0 == True and 0.0 == -0.0."""
    return (row.file, row.number, row.raw, repr(row.value), row.finding, row.offset)


def exact_rows(content: bytes) -> list[RawRow]:
    rows, offset = [], 0
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            rows.append(parse_line(line.rstrip(b"\r"), "f", number, offset))
        offset += len(line) + 1
    return rows


@MODEST
@given(st.lists(lines(), min_size=1, max_size=12), st.sampled_from([b"\n", b"\r\n"]))
def test_the_fast_parser_agrees_with_the_exact_one(texts: list[bytes], newline: bytes) -> None:
    content = newline.join(texts)
    found = read_block(LineBlock("f", 1, 0, content))
    assert [same(row) for row in found] == [same(row) for row in exact_rows(content)]


@pytest.mark.parametrize("line", RAW_LINES, ids=range(len(RAW_LINES)))
def test_the_parsers_agree_on_hostile_lines(line: bytes) -> None:
    for content in (line, b'{"b": ":"}\n' + line + b'\n{"c" :1}'):
        found = read_block(LineBlock("f", 1, 0, content))
        assert [same(row) for row in found] == [same(row) for row in exact_rows(content)]


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"a": 1, "a": 1}', Reason.MALFORMED_JSON, "a key occurs twice in one object"),
        (b'{"x": ":", "a": [{"b": 1, "b": 2}]}', Reason.MALFORMED_JSON, "a key occurs twice in one object"),
        (b'{"a": Infinity}', Reason.MALFORMED_JSON, "Infinity is not JSON"),
        (b'{"a": 1e999}', Reason.MALFORMED_JSON, "a number is too large to be held"),
        (b'{"a": "\\ud800"}', Reason.INVALID_UNICODE, "a text holds a lone surrogate"),
        (b'{"\\u0000": 1}', Reason.NUL_CHARACTER, "a text holds a NUL character"),
        (b'{"a": "\xe9"}', Reason.INVALID_UNICODE, "byte 7 of the line is not UTF-8"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", Reason.MALFORMED_JSON, records.TOO_DEEP),
        (b"[1]", Reason.MALFORMED_JSON, "the line is a list, not an object"),
        (b'{"a": 1', Reason.MALFORMED_JSON, "Expecting ',' delimiter at character 7"),
        (b'{"a": "b', Reason.MALFORMED_JSON, "Unterminated string starting at character 6"),
    ],
)
def test_a_refused_line_says_why_and_where(line: bytes, reason: Reason, detail: str) -> None:
    row = read_block(LineBlock("f", 5, 70, b'{"fine": 1}\n' + line))[1]
    assert (row.finding, row.value, row.number, row.offset) == (Finding(reason, detail), None, 6, 82)
    assert row.raw == line.decode("utf-8", errors="backslashreplace")


def test_integers_stay_what_they_are() -> None:
    rows = read_block(
        LineBlock("f", 1, 0, b'{"a": 123456789012345678901234567890, "b": 1.0, "c": [18446744073709551616]}')
    )
    assert repr(rows[0].value) == "{'a': 123456789012345678901234567890, 'b': 1.0, 'c': [18446744073709551616]}"


@MODEST
@given(st.lists(lines(), max_size=15), st.integers(1, 40), st.integers(1, 5), st.sampled_from([b"", b"\n"]))
def test_lines_do_not_depend_on_chunks(tmp_path: Path, texts: list[bytes], size: int, rows: int, last: bytes) -> None:
    content = b"\n".join(texts) + last
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"first": 1}\n' + content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "CHUNK_BYTES", size)
        patch.setattr(block, "MAX_BLOCK_ROWS", rows)
        found = [row for piece in blocks(path, "f", "f") for row in pickle.loads(pickle.dumps(piece)).rows()]
    assert [same(row) for row in found] == [same(row) for row in exact_rows(path.read_bytes())]


@MODEST
@given(st.lists(VALUES, max_size=8), st.integers(1, 40), SPACINGS, st.sampled_from([None, 2]))
def test_items_of_a_list_do_not_depend_on_chunks(
    values: list[Any], size: int, spacing: tuple[str, str], indent: int | None
) -> None:
    content = json.dumps(values, separators=spacing, indent=indent).encode()
    chunks = [(start, content[start : start + size]) for start in range(0, len(content), size)]
    found = [row for piece in item_blocks(iter(chunks), item_cutter("f"), b"", "f") for row in read_block(piece)]
    assert [row.number for row in found] == list(range(1, len(values) + 1))
    for row, value in zip(found, values, strict=True):
        exact = parse_line(row.raw.encode(), "f", row.number, row.offset)
        assert same(row) == same(exact)
        assert json.loads(row.raw) == value
        assert row.offset is not None
        assert content[row.offset :].startswith(row.raw.encode())


FIELDS = st.text(alphabet='a,"\n\r;é ', max_size=5)


@settings(MODEST, max_examples=300)
@given(st.lists(st.lists(FIELDS, min_size=2, max_size=3), max_size=6), st.integers(1, 30))
def test_csv_is_cut_where_pythons_reader_ends_a_record(table: list[list[str]], size: int) -> None:
    sink = io.StringIO(newline="")
    csv.writer(sink).writerows(table)
    content = sink.getvalue().encode()
    assert records_of(content, size) == [tuple(row) for row in table]


@settings(MODEST, max_examples=300)
@given(st.text(alphabet='a,"\n', max_size=25), st.integers(1, 30))
def test_any_text_is_cut_as_pythons_reader_does(text: str, size: int) -> None:
    cutter = Cutter("f", RecordEnds(","))
    content = text.encode()
    chunks = [(start, content[start : start + size]) for start in range(0, len(content), size)]
    for _ in cutter.pieces(chunks):
        pass
    ends = cutter.find_ends
    assert isinstance(ends, RecordEnds)
    if ends.is_unclosed:
        return  # A quote is not closed: the file is refused.
    assert [row for row in records_of(content, size) if any(row)] == [
        tuple(row) for row in csv.reader(io.StringIO(text, newline="")) if any(row)
    ]


def records_of(content: bytes, size: int) -> list[tuple[str, ...]]:
    cutter = Cutter("f", RecordEnds(","))
    chunks = [(start, content[start : start + size]) for start in range(0, len(content), size)]
    found = []
    for piece in [*cutter.pieces(chunks), *cutter.last()]:
        assert isinstance(piece, Piece)
        start = 0
        for end in piece.ends.tolist():
            found += list(csv.reader([piece.data[start:end].decode()]))
            start = end
    return [tuple(row) for row in found]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
@pytest.mark.parametrize("chunk_bytes", [7, 100, 1 << 20])
def test_a_row_too_large_is_counted_and_not_held(
    tmp_path: Path, kind: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "MAX_ROW_BYTES", 50)
    monkeypatch.setattr(block, "KEPT_BYTES", 20)
    monkeypatch.setattr(streams, "CHUNK_BYTES", chunk_bytes)
    small, large = '{"a": 1}', '{"a": "' + "x" * 300 + '"}'
    content = {
        "jsonl": "\n".join([small, large, small, " " * 300, large, small]),
        "json": "[" + ",".join([small, large, small, large, small]) + "]",
        "csv": "a\n" + "\n".join(["1", "y" * 309, "1", "y" * 309, "1"]),
    }[kind]
    path = tmp_path / f"rows.{kind}"
    path.write_text(content)
    rows = [row for rows in iter_rows(path, "f", "f") for row in rows]
    assert [row.finding.reason if row.finding else None for row in rows] == [
        None, Reason.ROW_TOO_LARGE, None, Reason.ROW_TOO_LARGE, None,
    ]  # fmt: skip
    numbers = [1, 2, 3, 5, 6] if kind == "jsonl" else [1, 2, 3, 4, 5]
    assert [row.number for row in rows] == numbers
    assert len(rows[1].raw) == 20
    for row in rows:
        assert row.offset is not None
        assert content[row.offset :].startswith(row.raw[:20])
    assert rows[1].finding is not None
    assert "bytes; rows of up to 50 bytes are read" in rows[1].finding.detail


def test_blocks_say_how_much_they_carry() -> None:
    assert LineBlock("f", 1, 0, b"{}").size_bytes == 2
    assert ItemBlock("f", 1, 0, b"{},", b"\x03" + b"\x00" * 7).size_bytes == 11
