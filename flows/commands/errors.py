"""How a command ends: an exit code, and for an error one clear block on standard error."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from flows.commands.output import Answer, print_json, protected_stdout, wants_json
from flows.commands.streams import lost_output
from tasks.loopback import bypass_proxies
from tasks.roots import forget_root, inexpressible, known_root
from training_core.errors import (
    EXIT_GATE_NOT_PASSED,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TEMPORARY,
    ConfigurationError,
    TidegateError,
    as_tidegate_error,
)

CRASHES = "crashes"
"""Folder below the root for the tracebacks of bugs."""
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
"""What a file system refuses because of where or what a file is, not because of a bug."""


class TerminatedError(BaseException):
    """SIGTERM reached the command outside of a flow run. Not an Exception: nothing on the way may swallow it."""


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """Outside of the flow (inside, Prefect has its own handler) SIGTERM unwinds, so that servers are ended.

    SIGHUP, the end of the terminal or of the connection, becomes a SIGTERM: for whoever handles that one now. Where it
    is ignored (`nohup`) it stays ignored.
    """

    asked: list[type[BaseException]] = []

    def handler(signal_number: int, frame: FrameType | None) -> None:
        asked.append(TerminatedError)
        raise TerminatedError

    def interrupted(signal_number: int, frame: FrameType | None) -> None:
        asked.append(KeyboardInterrupt)
        raise KeyboardInterrupt

    def hung_up(signal_number: int, frame: FrameType | None) -> None:
        # Once: a shell and the kernel may both send one, and a second would interrupt the saving after the first.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.raise_signal(signal.SIGTERM)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, handler)}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, hung_up)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    except BaseException as error:
        # What a library made of being stopped in the middle is no error of its own.
        if asked and not isinstance(error, asked[0]):
            raise asked[0] from error
        raise
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def exit_code_of(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run the command and return its exit code; errors are printed.

    With `--json` standard output holds one object whatever happens: the command's own, or one that says what went
    wrong in `error`. Everything else goes to standard error. Output that nobody reads changes no exit code; output that
    a full device did not take makes 75 of 0 and 1.
    """
    forget_root()
    bypass_proxies()
    as_json = wants_json(arguments)
    with protected_stdout(as_json) as stdout:
        answer = _answer_of(app, arguments)
        if as_json and answer.value is not None:
            print_json(answer.value, stdout)
        lost = lost_output(stdout)
    if lost is None:
        return answer.exit_code
    print(f"standard output could not be written: {lost.strerror}. The answer is lost", file=sys.stderr)
    # Another code says more than that the output is lost; 0 and 1 would be taken for an answer that was given.
    return EXIT_TEMPORARY if answer.exit_code in (EXIT_OK, EXIT_GATE_NOT_PASSED) else answer.exit_code


def _answer_of(app: typer.Typer, arguments: Sequence[str]) -> Answer:
    try:
        found = app(args=list(arguments), standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        found = EXIT_INTERRUPTED
    except TerminatedError:
        message = "stopped by SIGTERM; run the same command again to continue"
        print(message, file=sys.stderr)
        return Answer(error_value("PreemptedError", message, EXIT_TEMPORARY), EXIT_TEMPORARY)
    except Exception as error:
        return failed(error)
    if found == EXIT_INTERRUPTED:  # Typer makes that of a Ctrl-C.
        print("interrupted", file=sys.stderr)
        return Answer(error_value("Interrupted", "stopped by Ctrl-C", EXIT_INTERRUPTED), EXIT_INTERRUPTED)
    return found if isinstance(found, Answer) else Answer(None, found if isinstance(found, int) else EXIT_OK)


def failed(error: Exception, value: Mapping[str, Any] | None = None, folder: Path | None = None) -> Answer:
    """Print `error` and return the answer of a command that it ended: `value` (what is known) with `error` added.

    Args:
        folder: where the work was done, for a full disk that names no file.
    """
    if is_usage_error(error):
        error.show()  # type: ignore[attr-defined]
        code = int(error.exit_code)  # type: ignore[attr-defined]
        found = error_value(ConfigurationError.__name__, error.format_message(), code)  # type: ignore[attr-defined]
    else:
        known = known_error(error, folder)
        code = report_error(known or error)
        found = error_value(type(known or error).__name__, str(known or error), code)
    return Answer({**(value or {}), **found}, code)


def error_value(kind: str, message: str, exit_code: int) -> dict[str, Any]:
    """Return what every `--json` object holds when its command failed."""
    return {"error": {"type": kind, "message": message, "exit_code": exit_code}}


def known_error(error: BaseException, folder: Path | None = None) -> TidegateError | None:
    """Return the error that a user can act on, or None for a bug. A file that may not be used is no bug."""
    known = as_tidegate_error(error, folder)
    if known is None and isinstance(error, UnicodeEncodeError):
        return inexpressible(error.object)
    if known is None and isinstance(error, OSError) and error.errno in NOT_ALLOWED and error.filename is not None:
        return ConfigurationError(
            f"{os.fsdecode(error.filename)}: {error.strerror}. Change its permissions, or name another place"
        )
    return known


def is_usage_error(error: Exception) -> bool:
    """Return whether the command line was wrong. Typer brings a Click of its own, so the type is known by its name."""
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)


def report_error(error: Exception) -> int:
    """Print one block for `error` and return its exit code; the traceback of a bug goes to a file."""
    known = known_error(error)
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
    """Write the traceback to a file of its own and return its path: below the root if there is one, else in /tmp."""
    name = f"tidegate-traceback-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    root = known_root()
    folders = [Path(tempfile.gettempdir())]
    if root.is_dir():  # A command that only looks must not make one.
        folders.insert(0, root / CRASHES)
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            (folder / name).write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            return folder / name
    traceback.print_exception(error)
    return Path("the output above")
