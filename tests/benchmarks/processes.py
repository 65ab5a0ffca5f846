"""Runs a process and samples the memory of its tree."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Sample:
    """Memory of a process tree at one moment, bytes."""

    time: float
    """Monotonic."""
    pss: int
    """Pages that several processes share count in parts, also those of libraries that neighbours on the machine use."""
    rss: int
    """Shared pages count in full in each process: no neighbour changes it."""


@dataclass(frozen=True)
class Measured:
    """How a process ended and what it held."""

    exit_code: int
    seconds: float
    samples: list[Sample]

    def peak_bytes(self, kind: str, start: float = float("-inf"), end: float = float("inf")) -> int:
        """Return the most "pss" or "rss" that was seen between two moments; 0 without a sample there."""
        return max((getattr(sample, kind) for sample in self.samples if start <= sample.time <= end), default=0)


def measure(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, interval_seconds: float = 0.1
) -> Measured:
    """Run a command to its end, its output in `log`; sample the memory of it and all its descendants."""
    start = time.monotonic()
    samples: list[Sample] = []
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
        try:
            while process.poll() is None:
                begin = time.monotonic()
                samples.append(tree_sample(process.pid))
                # Counting pages holds up who asks for new ones: never more than a tenth of the time.
                time.sleep(max(interval_seconds, 10 * (time.monotonic() - begin)))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return Measured(process.returncode, time.monotonic() - start, samples)


def tree_sample(process_id: int) -> Sample:
    """Return what a process and all its descendants hold now; those that end meanwhile count as nothing."""
    pss = rss = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process_id)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(OSError):
                sizes = rollup(process.pid)
                pss += sizes.get("Pss", 0)
                rss += sizes.get("Rss", 0)
    return Sample(time.monotonic(), pss, rss)


def rollup(process_id: int) -> dict[str, int]:
    """Return the sizes of a process from /proc, bytes.

    Raises:
        OSError: it has ended.
    """
    lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()[1:]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in map(str.split, lines)}
