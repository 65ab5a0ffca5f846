"""What a file of rows may be, told from its name and its first and last bytes. A plan asks the same as the stage."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training_core.config.paths import describe_missing, lfs_pointer
from training_core.errors import ConfigurationError, DataError

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""What a text file's name may end in beyond its suffix."""
SUFFIXES = (*(text + packed for packed in ("", *COMPRESSIONS) for text in TEXT_SUFFIXES), ".arrow", ".parquet")
GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"
ARROW_MAGIC = b"ARROW1"
ARROW_STREAM_MAGIC = b"\xff\xff\xff\xff"
"""How an Arrow stream starts, which is what `datasets` writes: the mark before a message's length."""
MAGICS = {
    PARQUET_MAGIC: "Parquet",
    GZIP_MAGIC: "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    ARROW_MAGIC: "Arrow",
    ARROW_STREAM_MAGIC: "Arrow",
    b"PK\x03\x04": "a ZIP archive (as .zip and .xlsx files are)",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    **{bytes([0x50 + index, 0x2A, 0x4D, 0x18]): "zstd" for index in range(16)},  # A frame that readers skip.
}
"""First bytes -> what the file is; anything else is plain text."""
UNICODE_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32 (little-endian)",
    b"\x00\x00\xfe\xff": "UTF-32 (big-endian)",
    b"\xff\xfe": "UTF-16 (little-endian)",
    b"\xfe\xff": "UTF-16 (big-endian)",
}
ALLOWED = (
    f"Allowed: a file whose name ends in {', '.join(TEXT_SUFFIXES)} (each also with {' or '.join(COMPRESSIONS)} behind "
    "it), .arrow or .parquet"
)
CONVERSIONS = {
    ".xlsx": 'Convert it: pandas.read_excel("FILE").to_json("FILE.jsonl", orient="records", lines=True)',
    ".feather": "Rename it to end in .arrow",
    ".ipc": "Rename it to end in .arrow",
    ".zip": "Unpack it",
    ".bz2": "Unpack it",
    ".xz": "Unpack it",
    ".gz": "If JSON lines are inside, rename it to end in .jsonl.gz",
    ".zst": "If JSON lines are inside, rename it to end in .jsonl.zst",
}
"""What to do with a file of another kind."""
DATASET_FILE = "state.json"
SPLITS_FILE = "dataset_dict.json"


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


def kind_of_name(name: str) -> tuple[str, str | None]:
    """Return a file's suffix without its compression, and the compression.

    >>> kind_of_name("rows.csv.gz"), kind_of_name("rows.parquet")
    (('.csv', 'gzip'), ('.parquet', None))
    """
    packed = Path(name).suffix
    if packed in COMPRESSIONS:
        return Path(name.removesuffix(packed)).suffix, COMPRESSIONS[packed]
    return packed, None


def kind_of_bytes(head: bytes) -> str:
    """Return what a file is that starts with `head`."""
    return next((kind for magic, kind in MAGICS.items() if head.startswith(magic)), "plain text")


def parts_of(path: Path) -> list[Path]:
    """Return the files that a path stands for: itself, or the data files of a folder if they are of one kind, by name.

    A folder that `datasets.save_to_disk` wrote is one data set, and stands for itself.
    """
    if not path.is_dir() or (path / DATASET_FILE).is_file() or (path / SPLITS_FILE).is_file():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES))
    seen = [file for file in found if not file.name.startswith((".", "_"))]
    return seen if len({kind_of_name(file.name)[0] for file in seen}) == 1 else [path]


def check_file(path: Path, label: str) -> None:
    """Check that a file or folder of rows can be one, without reading it.

    Args:
        path: the file, or a folder that `datasets.save_to_disk` wrote.
        label: what to call it in messages: the config's field and the path there.

    Raises:
        ConfigurationError: it is missing, a folder without rows, or of a kind that is not read.
        DataError: it is empty, cut short, or of another kind than its name says.
    """
    if path.is_dir():
        dataset_files(path, label)
        return
    if not path.exists():
        raise ConfigurationError(f"{label} {describe_missing(path, SUFFIXES)}")
    if not path.is_file() or not path.name.endswith(SUFFIXES):
        suffix = "".join(path.suffixes[-1:]).lower()
        advice = f". {CONVERSIONS[suffix]}" if suffix in CONVERSIONS else ""
        what = "is of an unknown kind" if path.is_file() else "is no ordinary file"
        raise ConfigurationError(f"{label} {what}. {ALLOWED}{advice}")
    _check_ends(path, label)


def refuse_encoding(head: bytes, label: str) -> None:
    """Raise DataError if text that starts with `head` says of itself that it is no UTF-8."""
    for mark, encoding in UNICODE_MARKS.items():
        if head.startswith(mark):
            raise DataError(
                f"{label} is {encoding.split(' ')[0]} text, not UTF-8: its first bytes say {encoding}. Convert it: "
                f"iconv -f {encoding.split(' ')[0]} -t UTF-8 FILE > NEW"
            )


def dataset_files(folder: Path, label: str) -> list[Path]:
    """Return the Arrow files of a folder that `datasets.save_to_disk` wrote, in the order of its rows.

    Raises:
        ConfigurationError: it is another folder, or one of several splits.
        DataError: a file that it names is missing, or its description is damaged.
    """
    if (folder / SPLITS_FILE).is_file():
        splits = _names_in(folder / SPLITS_FILE, "splits", label)
        named = ", ".join(str(Path(label.rpartition(": ")[2]) / split) for split in splits) or "none"
        raise ConfigurationError(f"{label} is a folder of several splits. Name one of them: {named}")
    if not (folder / DATASET_FILE).is_file():
        _refuse_folder(folder, label)
    entries = _names_in(folder / DATASET_FILE, "_data_files", label)
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise DataError(f"{label} is damaged: its {DATASET_FILE} names no files. Write it again with save_to_disk")
        if not (folder / name).is_file():
            raise DataError(f"{label} is not complete: {name} is missing. Copy or write it again")
        if not (folder / name).stat().st_size:
            raise DataError(f"{label} is not complete: {name} has 0 bytes. Copy or write it again")
    if not names:
        raise DataError(f"{label} holds no rows: its {DATASET_FILE} names no files")
    return [folder / str(name) for name in names]


def _names_in(file: Path, key: str, label: str) -> list[Any]:
    try:
        value = json.loads(file.read_bytes())[key]
    except (ValueError, KeyError, TypeError, RecursionError):
        value = None
    if not isinstance(value, list):
        raise DataError(f"{label} is damaged: its {file.name} has no list {key!r}. Write it again with save_to_disk")
    return value


def _refuse_folder(folder: Path, label: str) -> None:
    entries = sorted(folder.iterdir())
    found = [entry.name for entry in entries if entry.is_file() and entry.name.endswith(SUFFIXES)]
    found += [f"{entry.name}/" for entry in entries if (entry / DATASET_FILE).is_file()]
    there = f" It holds: {', '.join(found[:5])}{', …' if len(found) > 5 else ''}." if found else ""
    also = "; name each file on its own. A folder is read if datasets.save_to_disk wrote it"
    raise ConfigurationError(f"{label} is a folder.{there} {ALLOWED}{also}")


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
    kind = kind_of_bytes(head)
    suffix, compression = kind_of_name(path.name)
    wanted = compression or {".parquet": "Parquet", ".arrow": "Arrow"}.get(suffix, "plain text")
    if kind != wanted:
        article = "an" if wanted == "Arrow" else "a"
        claim = f"is not {article} {wanted} file although its name says so" if kind == "plain text" else None
        problem = claim or f"holds {kind}, which its name does not say"
        raise DataError(f"{label} {problem}. Rename or convert it. {ALLOWED}")
    if kind == "plain text":
        refuse_encoding(head, label)
    if kind == "Parquet" and (tail != PARQUET_MAGIC or size < 3 * len(PARQUET_MAGIC)):
        raise DataError(f"{label} is a damaged Parquet file: it is cut short after {size} bytes. Write it again")
