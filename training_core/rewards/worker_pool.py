"""Processes that answer one request at a time, ended and replaced when a request takes too long.

Threads cannot be stopped and signals reach the main thread only, so whatever may hang runs in a process. Processes are
started as a command of their own, which neither copies this process's memory nor imports its main module again.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

from training_core.errors import TemporaryError
from training_core.rewards.base import Cause, no_poll
from training_core.rewards.polling import POLL_SECONDS, StoppedError, map_polled

START_SECONDS = 180.0
"""Longest wait for a new process; importing a large library on a busy machine takes a while."""
CHUNK_BYTES = 65536


class Worker:
    """One process: a JSON line in, a JSON line out.

    Args:
        command: starts it; its first line out must be `"ready"`.
        environment: all of its environment variables.
        stop: ends every wait for the process when set.

    Raises:
        TemporaryError: it did not start.
        StoppedError: `stop` is set.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], stop: Event) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self.received = b""
        try:
            first = self.receive(START_SECONDS, stop)
        except StoppedError:
            self.end()
            raise
        if first != "ready":
            self.end()
            raise TemporaryError(
                f"`{' '.join(command)}` did not start: it ended, or was not ready within {START_SECONDS:.0f} s "
                f"(status {self.process.returncode}). Run it by hand to see why"
            )

    def ask(self, request: Any, timeout_seconds: float, stop: Event) -> Any:
        """Return the reply to a request, or why there is none; after that the process must be ended.

        Returns:
            The reply; Cause.TIMEOUT, or Cause.ERROR when the process died.

        Raises:
            StoppedError: `stop` is set; the process must be ended.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            return Cause.ERROR
        return self.receive(timeout_seconds, stop)

    def receive(self, timeout_seconds: float, stop: Event) -> Any:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.received:
                if stop.is_set():
                    raise StoppedError
                rest = max(0.0, deadline - time.monotonic())
                if not selector.select(min(rest, POLL_SECONDS)):
                    if rest <= POLL_SECONDS:
                        return Cause.TIMEOUT
                    continue
                chunk = os.read(self.process.stdout.fileno(), CHUNK_BYTES)
                if not chunk:
                    return Cause.ERROR
                self.received += chunk
        line, _, self.received = self.received.partition(b"\n")
        return json.loads(line)

    def end(self) -> None:
        """End the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # What was not sent cannot be sent any more.
                stream.close()


class WorkerPool:
    """Persistent processes, started when first needed and ended with the pool or the interpreter.

    Args:
        command: starts a process.
        environment: all of a process's environment variables.
        num_workers: processes at the same time.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], num_workers: int) -> None:
        self.command = list(command)
        self.environment = environment
        self.num_workers = num_workers
        self.idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        weakref.finalize(self, end_all, self.idle)

    def map(self, requests: Sequence[Any], timeout_seconds: float, poll: Callable[[], None] = no_poll) -> list[Any]:
        """Return the reply to each request in order, or why there is none: Cause.TIMEOUT or Cause.ERROR.

        Args:
            requests: JSON-able.
            timeout_seconds: wall-clock limit on each of them. Starting a process does not count.
            poll: called between replies and about every quarter of a second. What it raises ends all processes.

        Raises:
            TemporaryError: a process did not start.
            What `poll` raises.
        """

        def one(request: Any, stop: Event) -> Any:
            return self.ask(request, timeout_seconds, stop)

        try:
            return map_polled(one, requests, self.num_workers, poll, "reward-worker")
        except BaseException:
            end_all(self.idle)
            raise

    def ask(self, request: Any, timeout_seconds: float, stop: Event) -> Any:
        try:
            worker = self.idle.get_nowait()
        except queue.Empty:
            worker = Worker(self.command, self.environment, stop)
        reply: Any = Cause.ERROR
        try:
            reply = worker.ask(request, timeout_seconds, stop)
        finally:
            # Also when a stop request arrives in between: a process that still works on this must not get the next.
            if isinstance(reply, Cause):
                worker.end()
            else:
                self.idle.put(worker)
        return reply


def end_all(workers: queue.SimpleQueue[Worker]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            workers.get_nowait().end()
