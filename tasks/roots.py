"""The root: which one a command works over, and whether it takes files, before anything is started over it."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from training_core.errors import DISK_FULL_ERRNOS, ConfigurationError, DiskFullError, free_space

DEFAULT_ROOT = ".tidegate"
ROOT_VARIABLE = "TIDEGATE_ROOT"
HOW_TO_NAME = "Name a folder, or a place where one can be made (--root, TIDEGATE_ROOT or `root` in the config)"
MIN_FREE_BYTES = 32 * 1024**2
"""What a run needs before its first stage: the databases of Prefect and MLflow and the records take 6 to 10 MiB."""

MAX_SHOWN_CHARACTERS = 120

_known: list[Path] = []
"""The root that this command has settled on: the traceback of a bug belongs there."""


def usable_root(text: str | Path) -> Path:
    """Return a root as an absolute path, `~` expanded, and remember it for `known_root`.

    Raises:
        ConfigurationError: it is empty, no path, holds a `?` or what the locale cannot express, or something that is no
            folder lies there, or on the way.
    """
    if not str(text).strip():
        raise ConfigurationError(f"root is empty. {HOW_TO_NAME}")
    check_expressible(text)
    if "?" in str(Path(text).absolute()):
        # The databases of MLflow and Prefect are named by URIs, where it ends the path.
        raise ConfigurationError(
            f"root {text} has a '?' in its absolute path: databases below it would be made elsewhere. {HOW_TO_NAME}"
        )
    try:
        path = normal(Path(text).expanduser().absolute())
        check_expressible(path)
        for part in (path, *path.parents):
            # Not `exists`, which is silent about a name that is too long.
            if os.path.lexists(part) and not os.path.isdir(part):
                kind = "a broken link" if os.path.islink(part) else "a file"
                raise ConfigurationError(f"root {path} cannot be a folder: {part} is {kind}. {HOW_TO_NAME}")
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RuntimeError) as error:  # Too long, not searchable; a NUL; no such user.
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"root {text} cannot be used: {error}. {HOW_TO_NAME}") from None
    _known[:] = [path]
    return path


def normal(path: Path) -> Path:
    """Return an absolute path without `..`; as it is where a link on the way gives the `..` another meaning."""
    shorter = Path(os.path.normpath(path))
    return shorter if os.path.realpath(shorter) == os.path.realpath(path) else path


def check_expressible(text: str | Path) -> None:
    """Refuse what is no text, or has no name for the system in the present locale.

    Raises:
        ConfigurationError: it holds a letter that the locale cannot express.
    """
    try:
        os.fsencode(text)
        str(text).encode()
    except UnicodeEncodeError as error:
        raise inexpressible(error.object) from None


def inexpressible(text: str) -> ConfigurationError:
    """Return the error for a text with letters that the locale cannot express."""
    shown = ascii(text[:MAX_SHOWN_CHARACTERS])
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":  # The bytes of another encoding, from an old file system or a script.
        return ConfigurationError(f"{shown} is not UTF-8 text. Rename the file or folder, or write the name in UTF-8")
    return ConfigurationError(
        f"{shown} cannot be expressed in the locale, whose encoding is {encoding}. Set LC_ALL=C.UTF-8 (and unset "
        "PYTHONUTF8) and run the same command again"
    )


def resolve_root(root: str | Path | None) -> Path:
    """Return the root for commands that read no config: `--root`, TIDEGATE_ROOT, or .tidegate.

    Raises:
        ConfigurationError: as `usable_root`.
    """
    return usable_root(root if root is not None else root_from_environment() or DEFAULT_ROOT)


def root_from_environment() -> str | None:
    """Return TIDEGATE_ROOT; set to nothing it counts as not set."""
    return os.environ.get(ROOT_VARIABLE) or None


def known_root() -> Path:
    """Return the root that this command settled on, else the one that it would take."""
    return _known[0] if _known else Path(root_from_environment() or DEFAULT_ROOT).absolute()


def forget_root() -> None:
    """Begin a new command."""
    _known.clear()


def nearest_folder(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    return next((part for part in (path, *path.absolute().parents) if os.path.isdir(part)), Path("/"))


def free_bytes(path: Path) -> int:
    """Return what is free where `path` is or would be made; 0 when no further file can be made there.

    `sys.maxsize` stands for no limit.
    """
    status = os.statvfs(nearest_folder(path))
    if status.f_blocks == 0:  # A file system without a size, such as /proc, is never full.
        return sys.maxsize
    return 0 if status.f_files > 0 and status.f_favail == 0 else status.f_bavail * status.f_frsize


def prepare_root(root: Path, wanted_bytes: int = MIN_FREE_BYTES) -> None:
    """Make the root if need be, and see that it takes files.

    Raises:
        DiskFullError: less than `wanted_bytes` are free, or the disk takes no file.
        ConfigurationError: it cannot be made or written.
    """
    if free_bytes(root) < wanted_bytes:
        raise _too_full(root, wanted_bytes)
    try:
        root.mkdir(parents=True, exist_ok=True)
        problem = write_problem(root)
    except OSError as error:
        problem = error
    if problem is None:
        return
    if problem.errno in DISK_FULL_ERRNOS:
        raise _too_full(root, wanted_bytes)
    raise ConfigurationError(
        f"root {root} cannot be written: {problem.strerror}. Name a folder that you may write (--root, TIDEGATE_ROOT "
        "or `root` in the config), or change its permissions"
    )


def write_problem(folder: Path) -> OSError | None:
    """Return why no file can be written in an existing folder, or None when one can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"probe")
            probe.flush()
    except OSError as error:
        return error
    return None


def _too_full(root: Path, wanted_bytes: int) -> DiskFullError:
    return DiskFullError(
        f"no space left for root {root}: {free_space(root)}; a run needs at least {wanted_bytes} bytes = "
        f"{wanted_bytes / 1024**2:.0f} MiB for its records and databases, and its checkpoints on top. Free some space, "
        "or name a root on another disk (--root, TIDEGATE_ROOT or `root` in the config), and run the same command again"
    )
