"""Damaged, hostile and merely odd files: each ends in rows that are all accounted for, or in an error for people."""

from __future__ import annotations

import gzip
import io
import json
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_checking import files_of, load_check

from data_checks.config import CheckDataConfig
from data_checks.reading import block, blocks, read_block, streams
from training_core.errors import TidegateError

SEED = 20_240
MAX_SECONDS = 5.0
MAX_GROWTH_BYTES = 1 << 30
KINDS = (
    "rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.ndjson", "rows.json", "lines.json", "wrapped.json",
    "rows.json.gz", "rows.csv", "rows.tsv", "rows.csv.gz", "rows.csv.zst", "rows.parquet", "file.arrow", "stream.arrow",
)  # fmt: skip
NUM_MUTATIONS = 36
"""Of each kind: fifteen kinds give 540 files."""


class Outcome(NamedTuple):
    """What became of a file."""

    num_rows: int | None
    num_refused: int = 0
    error: TidegateError | None = None


def check_file_safely(path: Path) -> Outcome:
    """Read a file whatever it is; anything but rows or an error for people is a failure of the test."""
    num_rows = num_refused = 0
    refusal = None
    try:
        for piece in blocks(path, path.name, f"data.preferences.0.path: {path.name}"):
            assert piece.size_bytes <= 2 * block.CHUNK_BYTES + block.MAX_ROW_BYTES
            rows = read_block(piece)
            for row in rows:
                assert (row.value is None) != (row.finding is None)
                assert row.number >= piece.number
            num_rows += len(rows)
            num_refused += sum(row.finding is not None for row in rows)
    except TidegateError as error:
        refusal = error
    if refusal is None:
        return Outcome(num_rows, num_refused)
    assert path.name in str(refusal)
    return Outcome(None, error=refusal)


def seed_rows(rng: random.Random) -> list[dict[str, Any]]:
    chat = [{"role": "user", "content": 'Where, "when"\nand why?'}, {"role": "assistant", "content": "Here é €"}]
    return [
        {"prompt": f"p {index}", "chosen": chat, "rejected": "no\tway" * rng.randrange(1, 4), "margin": index / 3}
        for index in range(rng.randrange(3, 30))
    ]


def valid_file(name: str, rng: random.Random) -> bytes:
    """Return a small valid file of the kind that its name says."""
    rows = seed_rows(rng)
    stem, suffix, *packing = name.split(".")
    if suffix in ("csv", "tsv"):
        content = separated(rows, "," if suffix == "csv" else "\t")
    elif suffix == "parquet":
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=7)
        return sink.getvalue()
    elif suffix == "arrow":
        table, buffer = pa.Table.from_pylist(rows), pa.BufferOutputStream()
        new = pa.ipc.new_file if stem == "file" else pa.ipc.new_stream
        with new(buffer, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
        return bytes(buffer.getvalue())
    elif suffix == "json" and stem != "lines":
        value = {"version": 1, "data": rows} if stem == "wrapped" else rows
        content = json.dumps(value, ensure_ascii=False, indent=rng.choice([None, 2])).encode()
    else:
        content = b"".join(json.dumps(row, ensure_ascii=rng.random() < 0.5).encode() + b"\n" for row in rows)
    return pack(content, packing)


def separated(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    import csv

    sink = io.StringIO(newline="")
    writer = csv.writer(sink, delimiter=delimiter)
    writer.writerow(rows[0])
    writer.writerows([[json.dumps(v) if isinstance(v, list) else v for v in row.values()] for row in rows])
    return sink.getvalue().encode()


def pack(content: bytes, packing: list[str]) -> bytes:
    if packing == ["gz"]:
        return gzip.compress(content, 1, mtime=0)
    return pa.Codec("zstd").compress(content).to_pybytes() if packing == ["zst"] else content


def unpack(content: bytes, packing: list[str]) -> bytes:
    """Return what a packed file holds; the file must be valid."""
    if packing == ["gz"]:
        return gzip.decompress(content)
    if packing == ["zst"]:
        return pa.CompressedInputStream(pa.BufferReader(content), "zstd").read()
    return content


def truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 20])):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def spliced(data: bytes, rng: random.Random) -> bytes:
    """Put a hostile piece in the place of some bytes."""
    start = rng.randrange(len(data))
    return data[:start] + rng.choice(HOSTILE) + data[start + rng.choice([0, 0, 1, 10]) :]


def shuffled(data: bytes, rng: random.Random) -> bytes:
    """Take a piece of the file out and put it elsewhere, as a copy that went wrong."""
    first, second = sorted(rng.randrange(len(data)) for _ in range(2))
    place = rng.randrange(len(data))
    return data[:place] + data[first:second] + data[place:]


HOSTILE = [
    b"\x00", b"\x00" * 5000, b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b"\r\n", b"\n\n\n", b'"', b"\\",
    b'\\"', b"{", b"}", b"[", b"]", b",", b'{"prompt": 1}', b'{"a": 1, "a": 2}', b"[" * 100_000, b'{"a":' * 100_000,
    b'{"a": 1e999}', b'{"a": -1e999}', b'{"a": ' + b"9" * 6000 + b"}", b'{"a": NaN}', b'{"a": Infinity}',
    b'{"a": "\\ud800"}', b'{"a": "\\u0000"}', b"x" * 300_000, b" " * 300_000, b"null", b'{"prompt": [{"role": []}]}',
    b"\x1f\x8b", b"PAR1", b"ARROW1", b"\xc3", b"\xf4\x90\x80\x80", b'{"b": {"c": [1, {"d": null}]}}', b'""""',
]  # fmt: skip
OUTER: list[Callable[[bytes, random.Random], bytes]] = [truncated, flipped, spliced, shuffled]
LINE_KINDS = ("rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.ndjson")


def mutated(name: str, index: int) -> tuple[bytes, bytes | None]:
    """Return a mutated file, and what it unpacks to where that is known."""
    rng = random.Random(f"{SEED} {name} {index}")
    data = valid_file(name, rng)
    packing = name.split(".")[2:]
    mutate = OUTER[index % len(OUTER)]
    if packing and index % 3:  # The packing is sound, what is inside is not.
        content = mutate(unpack(data, packing), rng)
        return pack(content, packing), content
    data = mutate(data, rng)
    return data, None if packing else data


def num_lines(content: bytes) -> int:
    return sum(bool(line.strip()) for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"))


@pytest.mark.parametrize("name", KINDS)
def test_mutated_files_end_in_rows_or_errors(tmp_path: Path, name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = tmp_path / name
    outcomes = []
    for index in range(NUM_MUTATIONS):
        data, content = mutated(name, index)
        path.write_bytes(data)
        start = time.perf_counter()
        outcome = check_file_safely(path)
        assert time.perf_counter() - start < MAX_SECONDS, f"mutation {index}"
        if outcome.num_rows is not None and content is not None and name in LINE_KINDS:
            assert outcome.num_rows == num_lines(content), f"mutation {index}"
        outcomes.append(outcome)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth * 1024 < MAX_GROWTH_BYTES
    assert any(outcome.error for outcome in outcomes) or name in LINE_KINDS, "no mutation was refused"
    assert any(outcome.num_rows for outcome in outcomes), "no mutation left rows"


@pytest.mark.parametrize("name", KINDS)
def test_mutated_files_through_the_whole_check(tmp_path: Path, name: str) -> None:
    """Every sixth of them: each row that was read is kept or put aside, whatever stands in it."""
    path = tmp_path / name
    for index in range(0, NUM_MUTATIONS, 6):
        path.write_bytes(mutated(name, index)[0])
        read = check_file_safely(path)
        config = CheckDataConfig.model_validate({"preferences": [{"path": str(path), "format": "pairs"}]})
        refusal = None
        try:
            loaded = load_check(files_of(config), config, None, tmp_path / str(index))
        except TidegateError as error:
            refusal = error
        if refusal is not None:
            assert path.name in str(refusal)
            # A file of which no row could be read is refused, too.
            assert read.error is not None or read.num_rows == read.num_refused
            continue
        ledger = loaded.counts["preferences"]
        accounted = ledger.kept + sum(ledger.quarantined.values()) + sum(ledger.dropped.values())
        assert read.num_rows == ledger.rows == ledger.examples == accounted, f"mutation {index}"


@pytest.mark.parametrize("name", KINDS)
def test_valid_files_have_all_their_rows(tmp_path: Path, name: str) -> None:
    rng = random.Random(f"{SEED} {name} valid")
    path = tmp_path / name
    path.write_bytes(valid_file(name, rng))
    expected = len(seed_rows(random.Random(f"{SEED} {name} valid")))
    assert check_file_safely(path) == Outcome(expected, 0)


ODD_LINES = [b'{"a": 1}', b"x", b"", b"  ", b"\x00", b'{"a": "\\u0000"}', b'{"a": 1}\r', b"[" * 100_000, b"\xff"]


@pytest.mark.parametrize("packing", [[], ["gz"], ["zst"]])
def test_every_odd_line_is_one_row_however_chunks_fall(
    tmp_path: Path, packing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".".join(["odd", "jsonl", *packing])
    for chunk_bytes in (1, 7, 64, 4096, 1 << 22):
        monkeypatch.setattr(streams, "CHUNK_BYTES", chunk_bytes)
        for index in range(6):
            rng = random.Random(f"{SEED} lines {index}")
            lines = [rng.choice(ODD_LINES if chunk_bytes > 7 else ODD_LINES[:7]) for _ in range(40)]
            content = b"\n".join(lines)
            parts = [content] if index % 2 else [content[:30], b"", content[30:], b"\n"]
            path.write_bytes(b"".join(pack(part, packing) for part in parts))
            assert check_file_safely(path).num_rows == num_lines(content)


@pytest.mark.parametrize("packing", ["gz", "zst"])
@pytest.mark.parametrize(
    ("pattern", "rows"), [(b"\x00", 1), (b" ", None), (b"\n", None), (b"[", 1), (b"\x00\n", 64 << 10), (b'"', 1)]
)
def test_bombs_are_counted_or_refused(
    tmp_path: Path, packing: str, pattern: bytes, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred MiB out of a few kilobytes; blank ones hold no rows."""
    times = (64 << 10) if pattern == b"\x00\n" else (100 << 20)
    packed = pack(pattern * times, [packing])
    path = tmp_path / f"bomb.jsonl.{packing}"
    path.write_bytes(packed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    outcome = check_file_safely(path)
    assert time.perf_counter() - start < MAX_SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_GROWTH_BYTES
    if rows is None:
        assert "holds no rows" in str(outcome.error)
    else:
        assert (outcome.num_rows, outcome.num_refused) == (rows, rows)
    monkeypatch.setattr(streams, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(streams, "MAX_RATIO", 100)
    refused = check_file_safely(path).error
    assert (refused is not None and "unpacks to more than 100 times" in str(refused)) or pattern == b"\x00\n"
