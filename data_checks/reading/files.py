"""The loader: which reader a file needs, and what is said when one breaks off."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from data_checks.files import check_file, dataset_files, kind_of_name
from data_checks.reading.block import Block
from data_checks.reading.cutting import Cutter
from data_checks.reading.hub import check_hub_id, hub_batches, is_hub_id
from data_checks.reading.json_lists import find_list, item_blocks, item_cutter
from data_checks.reading.lines import line_blocks, line_cutter
from data_checks.reading.records import SPACES, parse_line
from data_checks.reading.separated import DELIMITERS, record_blocks, record_cutter
from data_checks.reading.streams import DamageError, read_chunks
from data_checks.reading.tables import TableCutter, arrow_batches, parquet_batches
from data_checks.rows import RawRow
from training_core.errors import DataError

ADVICE = {
    "JSON": "Write it again, or one JSON object a line (jq -c '.[]' FILE > FILE.jsonl)",
    "CSV": "Two quotes stand for one inside a quoted field. Write it again with pandas or Python's csv",
}


def blocks(path: Path, name: str, label: str) -> Iterator[Block]:
    """Cut a file of rows into blocks that `read_block` turns into rows, here or in another process.

    The file is read once, in order; at most one block, one unfinished row of up to `MAX_ROW_BYTES` and a few MiB beside
    them are held.

    Args:
        path: a file, a folder that `datasets.save_to_disk` wrote, or a data set of the hub (`is_hub_id`).
        name: what to call it in `RawRow.file`.
        label: what to call it in messages: the config's field and the path there.

    Raises:
        ConfigurationError: there is no such file, or it is of a kind that is not read.
        DataError: it is of another kind than its name says, damaged, or without any row. Damage is found where it is
            met: what was read of the file until then is not the file and must not be used.
    """
    if is_hub_id(str(path)) and not path.exists():
        check_hub_id(str(path), label)
    else:
        check_file(path, label)
    cutter, found = _reader(path, name, label)
    num_blocks = 0
    try:
        for block in found:
            num_blocks += 1
            yield block
    except DamageError as error:
        advice = ADVICE.get(error.kind, "Fetch or write it again")
        after = f"after {cutter.num_records} {'line' if isinstance(cutter, Cutter) else 'row'}(s)"
        raise DataError(f"{label} is a damaged {error.kind} file: {after}, {error}. {advice}") from None
    if not num_blocks:
        raise DataError(f"{label} holds no rows. Check the path, or the program that wrote it")


def read_block(block: Block) -> list[RawRow]:
    """Return the rows of a block: for each row of the file its value, or the finding that says why there is none."""
    return block.rows()


def iter_rows(path: Path, name: str, label: str) -> Iterator[list[RawRow]]:
    """Yield the rows of a file in lists of bounded size. Arguments and errors are those of `blocks`."""
    return map(read_block, blocks(path, name, label))


def _reader(path: Path, name: str, label: str) -> tuple[Cutter | TableCutter, Iterator[Block]]:
    """Return what counts the rows, and the blocks."""
    table = TableCutter(name)
    if path.is_dir():
        return table, table.blocks(arrow_batches(dataset_files(path, label), label))
    if not path.exists():
        return table, table.blocks(hub_batches(str(path), label))
    suffix = kind_of_name(path.name)[0]
    if suffix == ".parquet":
        return table, table.blocks(parquet_batches(path, label))
    if suffix == ".arrow":
        return table, table.blocks(arrow_batches([path], label))
    chunks = read_chunks(path, label)
    if suffix in DELIMITERS:
        cutter = record_cutter(name, suffix)
        return cutter, record_blocks(chunks, cutter, suffix, label)
    if suffix == ".json":
        return _json_reader(chunks, name, label)
    cutter = line_cutter(name)
    return cutter, line_blocks(chunks, cutter)


def _json_reader(chunks: Iterator[tuple[int, bytes]], name: str, label: str) -> tuple[Cutter, Iterator[Block]]:
    """Return the reader of a .json file: many hold JSON lines."""
    lines = line_cutter(name)
    try:
        offset, head = next(chunks, (0, b""))
    except DamageError as error:
        raise DataError(
            f"{label} is a damaged {error.kind} file: after 0 line(s), {error}. Fetch or write it again"
        ) from None
    if _is_lines(head):
        return lines, line_blocks(chain([(offset, head)], chunks), lines)
    start = find_list(head)
    if start is None:
        if not head.strip(SPACES):
            return lines, line_blocks(chain([(offset, head)], chunks), lines)
        raise DataError(
            f"{label} holds no list of rows: it is neither a list of objects, nor an object whose `data` is one, nor "
            "one object a line. Write it as JSON lines"
        )
    items = item_cutter(name)
    prefix = b"" if head[start : start + 1] == head.lstrip(SPACES)[:1] else head[:start]
    return items, item_blocks(chain([(offset + start, head[start:])], chunks), items, prefix, label)


def _is_lines(head: bytes) -> bool:
    """Return whether text starts with an object on a line of its own, and goes on, or holds no list of rows."""
    first, newline, rest = head.lstrip(SPACES).partition(b"\n")
    if not first.startswith(b"{"):
        return False
    if newline and parse_line(first.rstrip(SPACES), "", 1).value is not None:
        return rest.lstrip(SPACES).startswith(b"{") or find_list(head) is None
    return not newline and find_list(head) is None
