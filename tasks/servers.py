"""Servers on loopback that belong to one command: sessions of their own, ended with it, however it ends."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from tasks.launch import log_tail
from tasks.processes import end_group
from training_core.errors import DiskFullError, ServerUnreachableError, TidegateError, free_space
from training_core.protocol.child import GRACE_VARIABLE, PARENT_PIPE_VARIABLE

STARTUP_SECONDS = 180.0
SHUTDOWN_SECONDS = 10.0
POLL_SECONDS = 0.1
HEALTH_SECONDS = 5.0
LOG_LINES = 8
DISK_FULL_TEXT = re.compile(r"No space left on device|Disk quota exceeded|database or disk is full", re.IGNORECASE)
MIN_SERVER_BYTES = 2 * 1024**2
"""With less, a server's database has no room to begin, and its log none to say so."""


@dataclass
class Server:
    """A server process."""

    name: str
    health_url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def wait_until_ready(self) -> None:
        """Wait until it answers.

        Raises:
            ServerUnreachableError: it ended, or did not answer in time.
            DiskFullError: the same, for want of space.
        """
        deadline = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if answers(self.health_url):
                return
            time.sleep(POLL_SECONDS)
        raise self.failure("did not come up")

    def failure(self, what: str) -> TidegateError:
        """Return the error for a server that `what`: a full disk when its log or the disk says so."""
        tail = log_tail(self.log_path, LOG_LINES)
        if self.met_full_disk():
            return DiskFullError(
                f"{self.name} {what}: no space left for its files ({free_space(self.log_path.parent)}; its output is "
                f"in {self.log_path}). Free some space (or name a root on another disk) and run the same command again"
            )
        return ServerUnreachableError(
            f"{self.name} {what}; the end of {self.log_path}:\n{tail}\nRun the same command again when the cause is "
            "gone"
        )

    def met_full_disk(self) -> bool:
        """Return whether its log names a full disk, or the disk is too full for that."""
        if DISK_FULL_TEXT.search(log_tail(self.log_path)):
            return True
        with contextlib.suppress(OSError):
            return shutil.disk_usage(self.log_path.parent).free < MIN_SERVER_BYTES
        return False


@contextlib.contextmanager
def running_server(
    name: str, command: list[str], health_url: str, log_path: Path, environment: Mapping[str, str]
) -> Iterator[Server]:
    """Run `python -m <command>` for the duration; it may not be ready yet when this yields.

    Args:
        command: module and arguments.
        health_url: answers 200 once the server is up.
        log_path: takes its output; emptied first.
        environment: added to ours.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    read_end, write_end = os.pipe()
    pipe = {PARENT_PIPE_VARIABLE: str(read_end), GRACE_VARIABLE: str(SHUTDOWN_SECONDS)}
    process: subprocess.Popen[bytes] | None = None
    try:
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tasks.guard", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(read_end,),
                env={**os.environ, **environment, **pipe},
            )
        yield Server(name, health_url, process, log_path)
    finally:
        os.close(read_end)
        if process is not None:
            end_group(process, SHUTDOWN_SECONDS)
        os.close(write_end)


def answers(url: str) -> bool:
    """Return whether something answers 200 at `url`."""
    try:
        return httpx.get(url, timeout=HEALTH_SECONDS).status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def free_port(wanted: int = 0) -> int:
    """Return a free port on loopback: `wanted` if it is free, else any."""
    for port in (wanted, 0):
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    raise ServerUnreachableError("no free port on 127.0.0.1")
