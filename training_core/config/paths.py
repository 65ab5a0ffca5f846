"""Paths that a config names: why one cannot be used, in words."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

NEAR = 0.75
"""How much alike two file names must be, on difflib's scale from 0 to 1, for one to be taken for the other."""
LFS_MARK = b"version https://git-lfs"


def resolved(text: str) -> Path:
    """Return `text` as an absolute path, `~` expanded.

    Raises:
        OSError: it starts with `~name` and there is no such user.
    """
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise OSError(str(error)) from None


def describe_missing(path: Path, suffixes: Sequence[str] = (), *, folders: bool = False) -> str:
    """Return what to say after the name of a path where nothing is: "does not exist. Did you mean …?".

    Args:
        path: absolute, or relative to the current folder.
        suffixes: endings of the files that could be meant.
        folders: whether a folder could be meant.
    """
    if (link := dangling_link(path)) is not None:
        where = "is a link" if link == path else f"lies behind the link {link}, which leads"
        return f"{where} to {os.readlink(link)}, and that target is missing. Restore the target, or name another path"
    if path.parent.exists() and not path.parent.is_dir():
        return f"does not exist: {path.parent} is a file, not a folder"
    if not path.parent.is_dir():
        return f"does not exist. The folder {path.parent} does not exist either"
    near = nearest_file(path, suffixes, folders=folders)
    return f"does not exist.{f' Did you mean {near}?' if near else ''}"


def dangling_link(path: Path) -> Path | None:
    """Return the first link on the way to `path` whose target is missing (or leads back to itself), or None."""
    for part in (*reversed(path.parents), path):
        if part.is_symlink() and not part.exists():
            return part
    return None


def nearest_file(path: Path, suffixes: Sequence[str] = (), *, folders: bool = False) -> Path | None:
    """Return the neighbour of `path` that was meant: one of the same stem, or one whose name is nearly the same."""
    near = [(likeness(path.name, entry.name), entry) for entry in _candidates(path, suffixes, folders)]
    best = max(near, key=lambda item: item[0], default=(0.0, path))
    return best[1] if best[0] >= NEAR else None


def likeness(wanted: str, found: str) -> float:
    """Return how much alike two file names are: 1 for equal ones, at least 0.9 for one stem with two suffixes.

    >>> likeness("pairs.json", "pairs.jsonl.gz") >= 0.9, likeness("prefs.jsonl", "eval.jsonl") < NEAR
    (True, True)
    """
    ratio = difflib.SequenceMatcher(None, wanted.lower(), found.lower()).ratio()
    stems = [name.lower().split(".")[0] for name in (wanted, found)]
    # A common suffix makes short names look alike: their stems must be, too.
    stem_ratio = difflib.SequenceMatcher(None, stems[0], stems[1]).ratio()
    return max(ratio, 0.9) if stems[0] == stems[1] and stems[0] else min(ratio, stem_ratio)


def _candidates(path: Path, suffixes: Sequence[str], folders: bool) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # A folder that may not be listed: no hint is better than no message.
        for entry in sorted(path.parent.iterdir()):
            if (folders and entry.is_dir()) or (entry.is_file() and entry.name.lower().endswith(tuple(suffixes))):
                yield entry


def lfs_pointer(head: bytes) -> str | None:
    """Return what to say of a file that starts with `head` if it is Git LFS' stand-in for the real one, else None."""
    if not head.startswith(LFS_MARK):
        return None
    return "is Git LFS' stand-in for the file, not the file itself. Fetch it with `git lfs pull`"
