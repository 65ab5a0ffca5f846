"""Strings that must never leave the data, planted in rows; and a search for them in whatever was written.

All strings of a kind share a stem that stands nowhere else. It comes early in them, so that a string that was cut short
is found as well, and what follows it says where the string was planted.
"""

from __future__ import annotations

import base64
import contextlib
import html
import json
import sqlite3
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

STEMS = {
    "aws": "QZ7PLMXW4VTN",
    "github": "wK3vNq8RtYb2Lc9Xz5Hf",
    "hugging_face": "bTqWmXzRkVnYcJdLsPgH",
    "openai": "Vb7Nq2Mx9Lk4Jh6Gf1Ds",
    "pem": "KCAQEAxQ9vLr4Tn8Wz",
    "jwt": "eyJuYW1lIjoiWmVka3JvbmUgUXVhbG0i",
    "email": "quellbert.zwirbel",
    "phone": "7071 55831",
    "card": "4556737586",
    "iban": "37040044053",
    "social": "219-48-97",
    "word": "zirbelkauz",
    "umlaut": "Knöterichgrütze",
}
PUBLIC = ("word", "umlaut")
"""Kinds of text that are neither secrets nor personal: a kept row with them may be shown where texts are asked for."""


def planted(kind: str, place: int) -> str:
    """Return the string of a kind for one place, 0 to 99. None is a key or a person's: all are made up here."""
    stem, number = STEMS[kind], f"{place:02d}"
    if kind == "aws":
        return "AK" + "IA" + stem + number + "RD"
    if kind == "github":
        return "gh" + "p_" + stem + "7Jd1Sg6Am4Pe0U" + number
    if kind == "hugging_face":
        return "h" + "f_" + stem + "FaQeUiOtNy" + "AbCdEfGhIj"[place // 10] + "KlMnOpQrSt"[place % 10] + "Bv"
    if kind == "openai":
        return "s" + "k-proj-" + stem + "T3Blb8Yr5Wt0Qe3Ua6Io9P" + number
    if kind == "pem":
        body = "MIIEpAIBAA" + stem + "5Yq1Ub7Kd2Hs6Jf0Gm3Xc" + number + "PeRa"
        return f"-----BEGIN RSA {'PRIVATE'} KEY-----\n{body}\n-----END RSA {'PRIVATE'} KEY-----"
    if kind == "jwt":
        header = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').decode().rstrip("=")
        payload = base64.urlsafe_b64encode(f'{{"name":"Zedkrone Qualm","place":"{number}"}}'.encode()).decode()
        return f"{header}.{payload.rstrip('=')}.dYw2Ls9Rk4Tq7Vb1Nx6Zc3Mf8Hg5Jp0"
    if kind == "email":
        return f"{stem}{number}" + "@" + "laubfrosch.net"
    if kind == "phone":
        return f"+49 {stem} {number}"
    if kind == "card":
        return next(text for digit in "0123456789" if _luhn(text := f"{stem}899{number}{digit}"))
    if kind == "iban":
        account = f"{stem}20130{number}"
        return f"DE{98 - int(account + '131400') % 97:02d}{account}"
    return stem + number


def _luhn(digits: str) -> bool:
    doubled = [sum(map(int, str(2 * int(digit)))) for digit in digits[-2::-2]]
    return (sum(map(int, digits[-1::-2])) + sum(doubled)) % 10 == 0


def forms(stem: str) -> set[bytes]:
    """Return how a text may stand in a file: as it is, escaped as in JSON or HTML, in base64, as UTF-16."""
    found = {stem.encode(), json.dumps(stem)[1:-1].encode(), html.escape(stem).encode(), stem.encode("utf-16-le")}
    found |= {stem.encode("ascii", "xmlcharrefreplace"), stem.encode("ascii", "backslashreplace")}
    for shift in range(3):  # Of whole groups of three bytes alone the base64 text is known, wherever the stem begins.
        whole = stem.encode()[shift:]
        found.add(base64.b64encode(whole[: len(whole) // 3 * 3]))
    return found


NEEDLES = {(kind, form) for kind, stem in STEMS.items() for form in forms(stem)}


def found_in(content: bytes, kinds: Iterable[str] = tuple(STEMS)) -> list[str]:
    """Return what of the planted is in bytes: the kind and what stands around it."""
    wanted = set(kinds)
    found = []
    for kind, form in sorted(NEEDLES):
        if kind in wanted and (place := content.find(form)) >= 0:
            found.append(f"{kind}: {content[max(place - 120, 0) : place + len(form) + 40]!r}")
    return found


def leaks(folder: Path, allowed: Iterable[str] = ()) -> dict[str, list[str]]:
    """Return file -> what of the planted is in it, for a folder and all below, its file names included.

    Args:
        folder: where to look; Parquet files are searched as they are and decoded.
        allowed: patterns of files, below the folder, that hold rows by design; `*` stands for folders, too.
    """
    patterns = tuple(allowed)
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or any(fnmatch(name, pattern) for pattern in patterns):
            continue
        if told := found_in(str(path).encode()) + found_in(content_of(path)):
            found[name] = told
    return found


def content_of(path: Path) -> bytes:
    """Return the bytes of a file; of a Parquet file or a database also its texts, which may be packed or cut in two."""
    content = path.read_bytes()
    if path.suffix == ".db":
        with contextlib.closing(sqlite3.connect(path)) as database:
            content += "\n".join(database.iterdump()).encode()
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        content += repr(table.schema).encode() + json.dumps(table.to_pylist(), default=str).encode()
    return content


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write JSON lines; bytes among the rows are lines as they stand."""
    path.write_bytes(b"".join(line + b"\n" for line in _lines(rows)))
    return path


def _lines(rows: Iterable[Any]) -> Iterator[bytes]:
    for row in rows:
        yield row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode()
