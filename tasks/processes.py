"""End a process group, and know that it is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

import psutil

POLL_SECONDS = 0.05
GONE_AFTER_KILL_SECONDS = 10.0


def group_members(group: int) -> list[int]:
    """Return the ids of the live processes of a process group; zombies do not count, they hold nothing."""
    members = []
    for process in psutil.process_iter(["pid", "status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        with contextlib.suppress(OSError):
            if os.getpgid(process.info["pid"]) == group:
                members.append(process.info["pid"])
    return members


def signal_group(group: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal_number)


def end_group(process: subprocess.Popen[bytes], grace_seconds: float) -> list[int]:
    """End the group that `process` leads: SIGTERM, the grace time, SIGKILL. Return the ids that would not die.

    An exception during the grace time (a second Ctrl-C) shortens it: the group is killed at once.
    """
    group = process.pid
    try:
        signal_group(group, signal.SIGTERM)
        wait_until_gone(process, grace_seconds)
    finally:
        left = kill_leftovers(process)
    return left


def kill_leftovers(process: subprocess.Popen[bytes]) -> list[int]:
    """SIGKILL whatever is left of the group and wait for it; return the ids that stay (blocked in the kernel)."""
    if not group_members(process.pid):
        process.poll()
        return []
    signal_group(process.pid, signal.SIGKILL)
    wait_until_gone(process, GONE_AFTER_KILL_SECONDS)
    return group_members(process.pid)


def wait_until_gone(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until the whole group is gone; return whether it is."""
    deadline = time.monotonic() + seconds
    while True:
        # Poll first: it reaps the leader, which would stay a zombie otherwise.
        if process.poll() is not None and not group_members(process.pid):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
