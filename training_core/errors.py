"""Errors that a user can act on, and the exit code each one becomes.

A stage process and the `tidegate` command turn an error's type into an exit code (`exit_code`). Every class stays
picklable: no custom `__init__`, the message is the only argument. To add one, derive it from the category whose
exit code fits and say in the docstring when it is raised. Expected outcomes (rejected by the gate, no signal in
this batch) are values, not errors.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

EXIT_OK = 0
EXIT_GATE_NOT_PASSED = 1
EXIT_CONFIGURATION = 2
EXIT_DATA = 3
EXIT_ARTIFACT = 4
EXIT_DIVERGED = 5
EXIT_INTERNAL = 70
EXIT_TEMPORARY = 75
EXIT_INTERRUPTED = 130


class TidegateError(Exception):
    """Base of every error with a message meant for a user."""

    exit_code = EXIT_INTERNAL


class ConfigurationError(TidegateError, ValueError):
    """A configuration or usage error: unknown key, wrong type, missing file named in a config, impossible choice."""

    exit_code = EXIT_CONFIGURATION


class DataError(TidegateError, ValueError):
    """Data cannot be used: no rows, too many bad rows, unreadable file."""

    exit_code = EXIT_DATA


class DigestMismatchError(DataError):
    """A file read by a stage is not the file that was planned."""


class EvaluationError(TidegateError, ValueError):
    """An evaluation has no answer: a non-finite score, no matched items, a missing baseline."""

    exit_code = EXIT_DATA


class ArtifactError(TidegateError):
    """A checkpoint, stage output or registered model is missing, damaged, of a refused kind, or changed."""

    exit_code = EXIT_ARTIFACT


class NotPromotableError(ArtifactError):
    """A model may not be registered or made champion: its digest is not the one that the gate judged."""


class TrainingDivergedError(TidegateError):
    """Training met a non-finite loss or gradient, or another sentinel stopped it."""

    exit_code = EXIT_DIVERGED


class WeightVersionError(TidegateError):
    """A rollout engine reported weights other than those the trainer handed over. Never retried in silence."""

    exit_code = EXIT_DIVERGED


class TemporaryError(TidegateError):
    """Running the same command again later can succeed."""

    exit_code = EXIT_TEMPORARY


class PreemptedError(TemporaryError):
    """SIGTERM (or the parent's death) asked the stage to stop; its state is saved where the stage has checkpoints."""


class StopRequestedError(BaseException):
    """SIGTERM, raised wherever the main thread happens to be; becomes a `PreemptedError` at the stage's edge.

    Not an `Exception`: a library's `except Exception` must not take it for a row that failed or a damaged file.
    """


class StageLockedError(TemporaryError):
    """Another live process owns the stage directory."""


class StageTimeoutError(TemporaryError):
    """A stage ran longer than `launch.timeout_seconds` and was ended."""


class ServerUnreachableError(TemporaryError):
    """A server (MLflow, Prefect, hub) does not answer."""


class DiskFullError(TemporaryError):
    """No space left, or over quota, while writing."""


DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
RUST_ERRNO = re.compile(r"\(os error (\d+)\)")
"""How Rust libraries (safetensors, tokenizers) end the message of a failed system call."""
SQLITE_FULL = "database or disk is full"


def as_tidegate_error(error: BaseException, folder: Path | None = None) -> TidegateError | None:
    """Return the user-facing error for `error`: itself, a translation of a stop or a full disk, or None for a bug.

    Args:
        folder: where the work was done; named for a full disk when the library that met it names no file.
    """
    if isinstance(error, TidegateError):
        return error
    if isinstance(error, StopRequestedError):
        return PreemptedError(str(error))
    for link in _chain(error):
        if _is_disk_full(link):
            name = getattr(link, "filename", None)
            return disk_full(Path(os.fsdecode(name)) if isinstance(name, str | bytes | os.PathLike) else None, folder)
    return None


def disk_full(file: Path | None = None, folder: Path | None = None) -> DiskFullError:
    """Return the error for a full disk: what was being written, where, and what is free there now."""
    what = str(file) if file else (f"a file below {folder}" if folder else "a file")
    place = file.parent if file else folder
    free = f" ({free_space(place)})" if place else ""
    return DiskFullError(
        f"no space left while writing {what}{free}. Completed checkpoints are kept: free some space (or move `root`) "
        "and run the same command again"
    )


def free_space(place: Path) -> str:
    """Return how many bytes are free where `place` is or would be made, in words."""
    existing = next((path for path in (place, *place.absolute().parents) if os.path.exists(path)), Path("/"))
    free = shutil.disk_usage(existing).free
    return f"{free} bytes = {free / 1024**2:.1f} MiB free at {existing}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and what it came from, as a traceback shows them."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in DISK_FULL_ERRNOS
    # Known by name: this module loads in processes that must not load these libraries. No error numbers there.
    if type(error).__name__ == "OperationalError":  # SQLite's, and SQLAlchemy's around it.
        return SQLITE_FULL in str(error)
    if type(error).__name__ != "SafetensorError":
        return False
    found = RUST_ERRNO.search(str(error))
    return found is not None and int(found[1]) in DISK_FULL_ERRNOS


def error_class(name: str) -> type[TidegateError]:
    """Return the error class called `name`; TidegateError when the name is unknown."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, TidegateError) else TidegateError
