"""What a file of rows may be, told from its name and its first and last bytes. A plan asks the same as the stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from training_core.config.paths import describe_missing, lfs_pointer
from training_core.errors import ConfigurationError, DataError

SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".parquet")
GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"
ALLOWED = f"Allowed: a file whose name ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
CONVERSIONS = {
    ".json": "Write one JSON object a line (jq -c '.[]' FILE.json > FILE.jsonl)",
    ".csv": 'Convert it: pandas.read_csv("FILE").to_json("FILE.jsonl", orient="records", lines=True)',
    ".tsv": 'Convert it: pandas.read_csv("FILE", sep="\\t").to_json("FILE.jsonl", orient="records", lines=True)',
    ".arrow": "Convert it: datasets.Dataset.from_file(FILE).to_parquet(FILE.parquet)",
    ".zip": "Unpack it",
    ".gz": "If JSON lines are inside, rename it to end in .jsonl.gz",
}
"""What to do with a file of another kind."""


def distinct_names(names: Mapping[str, str]) -> dict[str, str]:
    """Return a name for each input by which it can be told from all others.

    A name that several inputs have gets the input's own in front, never a folder's: moving files changes nothing.

    Args:
        names: input -> what to call its file, usually the last component of its path.

    >>> distinct_names({"preferences_0": "a.jsonl", "preferences_1": "a.jsonl", "rl_prompts": "b.jsonl"})
    {'preferences_0': 'preferences_0/a.jsonl', 'preferences_1': 'preferences_1/a.jsonl', 'rl_prompts': 'b.jsonl'}
    """
    times = Counter(names.values())
    return {key: name if times[name] == 1 else f"{key}/{Path(name).name}" for key, name in names.items()}


def check_file(path: Path, label: str) -> None:
    """Check that a file of rows can be one, without reading it.

    Args:
        path: the file.
        label: what to call it in messages: the config's field and the path there.

    Raises:
        ConfigurationError: it is missing, a folder, or of a kind that is not read.
        DataError: it is empty, cut short, or of another kind than its name says.
    """
    if path.is_dir():
        found = sorted(entry.name for entry in path.iterdir() if entry.is_file() and entry.name.endswith(SUFFIXES))
        there = f" It holds: {', '.join(found[:5])}{', …' if len(found) > 5 else ''}." if found else ""
        raise ConfigurationError(f"{label} is a folder.{there} {ALLOWED}; name each file on its own")
    if not path.exists():
        raise ConfigurationError(f"{label} {describe_missing(path, SUFFIXES)}")
    if not path.is_file() or not path.name.endswith(SUFFIXES):
        suffix = "".join(path.suffixes[-1:]).lower()
        advice = f". {CONVERSIONS[suffix]}" if suffix in CONVERSIONS else ""
        what = "is of an unknown kind" if path.is_file() else "is no ordinary file"
        raise ConfigurationError(f"{label} {what}. {ALLOWED}{advice}")
    _check_ends(path, label)


def _check_ends(path: Path, label: str) -> None:
    with path.open("rb") as stream:
        head = stream.read(64)
        size = stream.seek(0, 2)
        stream.seek(max(0, size - len(PARQUET_MAGIC)))
        tail = stream.read()
    if not head:
        raise DataError(f"{label} holds no rows: it has 0 bytes. Check the path, or the program that wrote it")
    if (pointer := lfs_pointer(head)) is not None:
        raise DataError(f"{label} {pointer}")
    kind = "Parquet" if head.startswith(PARQUET_MAGIC) else "gzip" if head.startswith(GZIP_MAGIC) else "plain text"
    wanted = {".parquet": "Parquet", ".gz": "gzip"}.get(path.suffix, "plain text")
    if kind != wanted:
        claim = f"is not a {wanted} file although its name says so" if kind == "plain text" else None
        problem = claim or f"holds {kind}, which its name does not say"
        raise DataError(f"{label} {problem}. Rename or convert it. {ALLOWED}")
    if kind == "Parquet" and (tail != PARQUET_MAGIC or size < 3 * len(PARQUET_MAGIC)):
        raise DataError(f"{label} is a damaged Parquet file: it is cut short after {size} bytes. Write it again")
