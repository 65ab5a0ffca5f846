"""A text file's bytes, unpacked, a few MiB at a time."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa

from data_checks.files import kind_of_name, refuse_encoding
from data_checks.reading.block import CHUNK_BYTES
from training_core.errors import DataError

MAX_RATIO = 1000
"""How many times larger than packed a file may be once unpacked, from `FREE_BYTES` on. Text packs 3 to 20 times, and
rows that are nearly the same a few hundred times; nothing but one byte repeated packs this much."""
FREE_BYTES = 1 << 30
"""Up to this size unpacked, the ratio does not matter."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


PART_BYTES = 1 << 16
"""Bytes unpacked at once."""


class DamageError(Exception):
    """A file breaks off or contradicts itself; becomes a DataError that says after how many rows."""

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


def read_chunks(path: Path, label: str) -> Iterator[tuple[int, bytes]]:
    """Yield the file's text as (offset in the unpacked file, bytes), without a byte-order mark.

    Args:
        path: a plain, gzip or zstd file, as its name says; several packed parts one after the other are one text.
        label: what to call it in messages.

    Raises:
        DataError: it is no UTF-8 by its own first bytes, or unpacks to far more than text does.
        DamageError: it cannot be unpacked to its end.
    """
    compression = kind_of_name(path.name)[1]
    size = path.stat().st_size
    offset = 0
    for chunk in _unpacked(path, compression):
        if offset == 0:
            refuse_encoding(chunk[:4], label)
            start = len(BYTE_ORDER_MARK) if chunk.startswith(BYTE_ORDER_MARK) else 0
            yield start, chunk[start:]
        else:
            yield offset, chunk
        offset += len(chunk)
        if compression and offset > FREE_BYTES and offset > MAX_RATIO * size:
            raise DataError(
                f"{label} has {size} bytes and unpacks to more than {MAX_RATIO} times as many ({offset} so far): no "
                "text does. If it is meant, unpack it and name the unpacked file"
            )


def _unpacked(path: Path, compression: str | None) -> Iterator[bytes]:
    """Yield what is in the file; what was unpacked before damage comes before the error."""
    with ExitStack() as stack:
        read = _reader(path, compression, stack)
        is_end = False
        while not is_end:
            parts: list[bytes] = []
            size, damage = 0, None
            while size < CHUNK_BYTES and not is_end:
                try:
                    part = read(CHUNK_BYTES if compression is None else min(CHUNK_BYTES, PART_BYTES))
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    damage, part = DamageError("gzip", str(error)), b""
                except OSError as error:  # Arrow reports damage as an OSError without a number.
                    if error.errno is not None or compression != "zstd":
                        raise
                    damage, part = DamageError("zstd", str(error)), b""
                parts.append(part)
                size += len(part)
                is_end = not part
            if size:
                yield b"".join(parts)
            if damage is not None:
                raise damage


def _reader(path: Path, compression: str | None, stack: ExitStack) -> Callable[[int], bytes]:
    """Return what reads up to so many bytes of the text."""
    if compression == "gzip":
        # Not `read`: it loses what it unpacked before it met damage.
        return stack.enter_context(gzip.open(path, "rb")).read1
    if compression == "zstd":
        read: Callable[[int], bytes]
        read = stack.enter_context(pa.CompressedInputStream(stack.enter_context(pa.OSFile(str(path))), "zstd")).read
        return read
    return stack.enter_context(path.open("rb")).read
