"""Programs of a policy, run where they can do no harm. sandbox_process.py is the other half.

Linux only. What a program may do is bounded by resource limits, by a watcher that counts its processes and memory, and
by namespaces: no network, no other processes, no file that it could change but its own in memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Literal

from training_core.config.verifiers import CodeTestsReward
from training_core.errors import ConfigurationError
from training_core.rewards.polling import POLL_SECONDS, StoppedError

logger = logging.getLogger(__name__)

PROCESS = Path(__file__).with_name("sandbox_process.py")
PROBE = "import decimal, random, re"
"""Needs files of the standard library that are read only then."""
GRACE_SECONDS = 20.0
"""What starting and ending a test may take besides its own limit, on a busy machine."""
LIMITS = (
    "timeout_seconds",
    "max_cpu_seconds",
    "max_memory_bytes",
    "max_disk_bytes",
    "max_output_bytes",
    "max_processes",
    "max_open_files",
    "num_workers",
)
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class SandboxOutcome:
    """How a program ended."""

    status: Literal["ended", "timeout", "limit", "refused", "error"]
    """`ended`: by itself. `timeout`: out of wall-clock or processor time. `limit`: more output, memory or processes
    than allowed. `refused`: the kernel does not isolate. `error`: the sandbox failed."""
    output: str = ""
    """Standard output, as far as it fits."""
    proved: bool = False
    """The check came to its end without an exception."""
    detail: str = ""
    """The exit status (negative: the signal), the limit, or what went wrong."""


class Sandbox:
    """Runs programs with the limits of a config.

    Args:
        config: the limits.
        python: runs them.

    Raises:
        ConfigurationError: this is not Linux, the kernel refuses isolation and the config requires it, or nothing runs
            within these limits.
    """

    def __init__(self, config: CodeTestsReward, python: str = sys.executable) -> None:
        if sys.platform != "linux":
            raise ConfigurationError(f"code_tests needs Linux for its sandbox; this is {sys.platform}")
        self.config = config
        self.python = python
        self.isolated = True
        found = self.run(PROBE, check="")
        if found.status == "refused":
            self.isolated = False
            if config.network == "require_isolation":
                raise ConfigurationError(
                    f"the kernel does not isolate the answers' code: {found.detail}. Allow user namespaces (sysctl "
                    "user.max_user_namespaces; on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; for Docker "
                    "--security-opt seccomp=unconfined --security-opt systempaths=unconfined), or write `network: "
                    "allow` in the code_tests reward: answers' code then reaches the network and this user's files"
                )
            logger.warning("answers' code runs with the network and with write access: %s", found.detail)
            found = self.run(PROBE, check="")
        if not found.proved:
            raise ConfigurationError(
                f"a program of one line does not run in the sandbox of code_tests ({found.status} {found.detail}). "
                f"Raise its limits, and make {sys.base_prefix} readable for all: for root the code runs as another user"
            )

    def run(self, code: str, *, stdin: str = "", check: str | None = None, stop: Event | None = None) -> SandboxOutcome:
        """Run a program to its end or its limits; nothing of it is left afterwards.

        Args:
            code: Python, run as a program, or as a module when there is a check.
            stdin: its standard input.
            check: Python that runs after it in the same module.
            stop: ends it when set.

        Raises:
            StoppedError: `stop` is set.
        """
        with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as directory:
            job: dict[str, Any] = {name: getattr(self.config, name) for name in LIMITS}
            job |= {"code": code, "stdin": stdin, "check": check, "directory": directory, "isolated": self.isolated}
            return self.communicate(json.dumps(job).encode(), directory, Event() if stop is None else stop)

    def communicate(self, job: bytes, directory: str, stop: Event) -> SandboxOutcome:
        # -P: the folder of the script is not where the code's imports are looked up.
        options = ["-s", "-P", "-B", "-X", "utf8", *([] if self.config.packages else ["-S"])]
        process = subprocess.Popen(
            [self.python, *options, str(PROCESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**ENVIRONMENT, "HOME": directory, "TMPDIR": directory},
            cwd="/",
            start_new_session=True,
        )
        try:
            limit = self.config.timeout_seconds + GRACE_SECONDS
            output, errors = wait_for(process, job, limit, stop)
        except subprocess.TimeoutExpired:
            return SandboxOutcome("error", detail=f"the sandbox itself did not end within {limit:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            return SandboxOutcome(**json.loads(output))
        except (ValueError, TypeError):
            return SandboxOutcome("error", detail=errors.decode("utf-8", "replace").strip()[-500:] or "no report")


def wait_for(process: subprocess.Popen[bytes], given: bytes, limit_seconds: float, stop: Event) -> tuple[bytes, bytes]:
    """Return what a process wrote until it ended.

    Raises:
        StoppedError: `stop` is set.
        subprocess.TimeoutExpired: it did not end in time.
    """
    deadline = time.monotonic() + limit_seconds
    rest: bytes | None = given
    while not stop.is_set():
        try:
            return process.communicate(rest, timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise
            rest = None  # The first call's input is still being sent; it may not be given again.
    raise StoppedError
