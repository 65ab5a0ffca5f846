"""One live owner per stage directory.

The lock is an OS lock (`flock`): the kernel drops it when its owner dies, so a dead owner is taken over at once.
Beside it lies `lock.json` with the owner's name and a heartbeat. The heartbeat decides between hosts, where a
network file system may not honour `flock`: an owner on another host counts as alive while it beats.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from training_core.errors import StageLockedError
from training_core.protocol.atomic import read_json, write_json

HEARTBEAT_SECONDS = 5.0
STALE_AFTER_SECONDS = 60.0
ACQUIRE_SECONDS = 1.0
"""How long to wait for the lock: `is_locked` of another process holds it for a moment."""


def read_owner(directory: Path) -> dict[str, Any] | None:
    """Return the last recorded owner of `directory`, or None."""
    try:
        owner = read_json(directory / "lock.json")
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) else None


def _refuse(directory: Path, owner: dict[str, Any] | None) -> StageLockedError:
    who = f"process {owner.get('pid')} on {owner.get('host')}" if owner else "another process"
    return StageLockedError(
        f"{directory} is being written by {who}. Two processes never write one stage directory: wait until it ends "
        "and run the same command again (a finished stage is reused), or stop that process"
    )


def _alive_elsewhere(owner: dict[str, Any] | None) -> bool:
    return owner is not None and owner.get("host") != socket.gethostname() and _beats(owner)


def _beats(owner: dict[str, Any] | None) -> bool:
    return owner is not None and time.time() - float(owner.get("heartbeat", 0.0)) < STALE_AFTER_SECONDS


@contextlib.contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Hold `directory` for this process.

    Raises:
        StageLockedError: a live process holds it; the message names the owner.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(directory / "lock"))
    try:
        lock.acquire(timeout=ACQUIRE_SECONDS, poll_interval=0.02)
    except Timeout:
        raise _refuse(directory, read_owner(directory)) from None
    stop = threading.Event()
    beat = threading.Thread(target=_beat, args=(directory, stop), name="lock-heartbeat", daemon=True)
    is_owner = False
    try:
        owner = read_owner(directory)
        if _alive_elsewhere(owner):
            raise _refuse(directory, owner)
        is_owner = True
        _write_owner(directory, time.time())
        beat.start()
        yield
    finally:
        stop.set()
        if beat.is_alive():
            beat.join()
        # A refused process leaves the file alone: it is the live owner's heartbeat.
        if is_owner:
            with contextlib.suppress(OSError):
                (directory / "lock.json").unlink(missing_ok=True)
        lock.release()


def is_locked(directory: Path) -> bool:
    """Return whether a live process holds `directory` at this moment."""
    if not (directory / "lock").exists():
        return False
    lock = FileLock(str(directory / "lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:  # A root that may only be read: the heartbeat is all there is to go by.
        return _beats(read_owner(directory))
    lock.release()
    return _alive_elsewhere(read_owner(directory))


def _write_owner(directory: Path, now: float) -> None:
    write_json(directory / "lock.json", {"pid": os.getpid(), "host": socket.gethostname(), "heartbeat": now})


def _beat(directory: Path, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_SECONDS):
        # A full disk must not end a training run through its heartbeat; the OS lock still protects this host.
        with contextlib.suppress(OSError):
            _write_owner(directory, time.time())
