"""Standard output that belongs to one JSON object, whatever libraries print."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import IO, Any


@contextlib.contextmanager
def protected_stdout(wanted: bool) -> Iterator[IO[str]]:
    """Yield the real standard output; while it is protected, everything else printed there goes to standard error."""
    try:
        descriptor = sys.stdout.fileno()
    except (io.UnsupportedOperation, ValueError):  # Captured by a test: nothing to move.
        yield sys.stdout
        return
    if not wanted:
        yield sys.stdout
        return
    sys.stdout.flush()
    saved = os.dup(descriptor)
    os.dup2(sys.stderr.fileno(), descriptor)
    try:
        with os.fdopen(saved, "w", encoding="utf-8", closefd=False) as stdout:
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(saved, descriptor)
        os.close(saved)


@contextlib.contextmanager
def unbroken(stream: IO[str]) -> Iterator[None]:
    """Write to `stream` and flush it; when its reader went away (`| head`), all from here on goes to nobody.

    What a stream could not write stays in its buffer, and Python would fail on it once more at its end.
    """
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, stream.fileno())
        os.close(nobody)


def print_json(value: Any, stdout: IO[str] | None = None) -> None:
    """Print one JSON value and flush it."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str), file=stdout or sys.stdout, flush=True)
