"""How a command ends: an exit code, and for an error one clear block on standard error."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import typer

from training_core.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TEMPORARY,
    TidegateError,
    as_tidegate_error,
)


class TerminatedError(BaseException):
    """SIGTERM reached the command outside of a flow run. Not an Exception: nothing on the way may swallow it."""


def exit_code_of(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run the command and return its exit code; errors are printed."""
    try:
        code = app(args=list(arguments), standalone_mode=False)
        return code if isinstance(code, int) else EXIT_OK
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except TerminatedError:
        print("stopped by SIGTERM; run the same command again to continue", file=sys.stderr)
        return EXIT_TEMPORARY
    except BrokenPipeError:  # `tidegate list | head`: the reader has enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as error:
        if is_usage_error(error):
            error.show()  # type: ignore[attr-defined]
            return int(error.exit_code)  # type: ignore[attr-defined]
        return report_error(error)


def is_usage_error(error: Exception) -> bool:
    """Return whether the command line was wrong. Typer brings a Click of its own, so the type is known by its name."""
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)


def report_error(error: Exception) -> int:
    """Print one block for `error` and return its exit code; the traceback of a bug goes to a file."""
    known = as_tidegate_error(error)
    if known is None:
        print(
            f"internal error: {error!r}\n  This is a bug. The traceback is in {save_traceback(error)}", file=sys.stderr
        )
        return EXIT_INTERNAL
    print(describe_error(known), file=sys.stderr)
    return known.exit_code


def describe_error(error: TidegateError) -> str:
    """Return the block that is shown for an error: its kind, its message, and the log's end for an internal one."""
    kind = type(error).__name__.removesuffix("Error") or "Error"
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind).strip()
    lines = [f"error ({words}, exit code {error.exit_code}): {error}"]
    # The end of a stage's log helps with a bug; beside a message that says what to do it is noise.
    if error.exit_code == EXIT_INTERNAL:
        lines += getattr(error, "__notes__", [])
    return "\n".join(lines)


def save_traceback(error: Exception) -> Path:
    """Write the traceback to a file of its own and return its path."""
    name = f"tidegate-traceback-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            (folder / name).write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            return folder / name
    traceback.print_exception(error)
    return Path("the output above")
