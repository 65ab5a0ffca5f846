"""How worker processes are started and how they end. Importing this imports nothing large."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterable
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path

SMALL_BYTES = 32 << 20
"""Files of less than this altogether are not worth the start of other processes."""
MAX_FOLDER_BYTES = 70
"""A socket's path has 107 bytes at most, and `/pymp-xxxxxxxx/listener-xxxxxxxx` is in it."""
PR_SET_PDEATHSIG = 1


def process_context() -> BaseContext:
    """Return how processes are started: from one that has imported what they need, and has no threads.

    This one has (Arrow, DuckDB, tokenizers), and a fork copies their locks as they stand. Where the folder of temporary
    files has too long a name for that process's socket, each process is started from nothing, which takes longer.
    """
    if len(os.fsencode(tempfile.gettempdir())) > MAX_FOLDER_BYTES:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["data_checks.preload"])
    return context


def begin_early(paths: Iterable[Path]) -> None:
    """Have the process that workers are forked from begin its imports, if these files will be worth workers."""
    if default_workers(paths) > 1 and process_context().get_start_method() == "forkserver":
        forkserver.ensure_running()


def default_workers(paths: Iterable[Path]) -> int:
    """Return how many processes are worth it for some files or folders: one for small ones, else one a core."""
    cores = len(os.sched_getaffinity(0))
    return 1 if sum(map(_size, paths)) < SMALL_BYTES else max(1, min(cores, 8))


def _size(path: Path) -> int:
    """Return about how many bytes of rows lie at a path; 0 for what is elsewhere."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    factor = 4 if path.suffix in (".gz", ".zst", ".parquet") else 1
    return factor * sum(file.stat().st_size for file in files)


def start_worker() -> None:
    """Have this process killed when its parent dies, however that happens: no check may leave workers behind.

    The parent is the fork server, which ends when the process that started it does.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides what a Ctrl-C means.
    if os.getppid() != parent:
        os._exit(1)
