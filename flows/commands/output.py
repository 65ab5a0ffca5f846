"""Standard output that belongs to one JSON object, whatever libraries print."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from flows.commands.streams import text_stream
from training_core.errors import EXIT_OK


@dataclass(frozen=True)
class Answer:
    """What a command that knows `--json` ends with; for a person it has printed the same as text already."""

    value: dict[str, Any] | None
    """The one object for standard output."""
    exit_code: int = EXIT_OK


def wants_json(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for one JSON object, even one that is wrong elsewhere."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options


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
        with text_stream(saved, "utf-8") as stdout:
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(saved, descriptor)
        os.close(saved)


def print_json(value: Any, stdout: IO[str]) -> None:
    """Print one JSON value and flush it. ASCII only: valid in every encoding, and for file names that have none."""
    print(json.dumps(value, indent=2, default=str), file=stdout, flush=True)
