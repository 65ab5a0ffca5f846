"""What a running stage sees: its spec, its inputs and outputs, its metrics, and the wish that it stop."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from training_core.checkpoint import CheckpointStore
from training_core.errors import ArtifactError, PreemptedError, StopRequestedError
from training_core.metrics import MetricsWriter
from training_core.protocol.atomic import write_json
from training_core.protocol.directory import StageDirectory
from training_core.records import StageSpec

STOPPED = "stopped by SIGTERM; what had a checkpoint is saved. Run the same command again to continue"


class StopSignal:
    """Turns SIGTERM into the end of the stage: at once, or where a training loop asks for it.

    Outside of loops the signal raises `StopRequestedError` wherever the code is. A training loop wraps itself in
    `deferred()`, looks at `requested` at each step boundary, saves a checkpoint and calls `raise_preempted`.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False
        self._raised = False

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
        # Once is enough: a second one would interrupt the cleaning up after the first.
        if not self._deferred and not self._raised:
            self._raised = True
            raise StopRequestedError(STOPPED)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def raise_if_swallowed(self) -> None:
        """Stop now if some handler caught `StopRequestedError` and went on: what it made of that is not a result.

        Raises:
            PreemptedError: it did.
        """
        if self._raised:
            raise PreemptedError(STOPPED)

    def close(self) -> None:
        """Let no later SIGTERM interrupt: the stage is done but for writing its result.

        Raises:
            PreemptedError: an earlier one was swallowed.
        """
        self._deferred = True
        self.raise_if_swallowed()

    def raise_preempted(self, message: str) -> None:
        raise PreemptedError(f"{message}. Run the same command again to continue")


class StageContext:
    """Handed to a stage's `run(context)`. All paths it gives out exist or may be written."""

    def __init__(self, spec: StageSpec, directory: StageDirectory, stop: StopSignal | None = None) -> None:
        self.spec = spec
        self.directory = directory
        self.stop = stop or StopSignal()
        self.metrics = MetricsWriter(directory.metrics_path)
        """Deterministic values only: the same bytes for a stopped-and-continued run."""
        self.timings = MetricsWriter(directory.timings_path)
        """Values measured by a clock: seconds, tokens per second."""
        self._progress_written = 0.0

    def input_path(self, name: str) -> Path:
        """Return the path of an input; its digest was verified when the stage started.

        Raises:
            ArtifactError: the spec names no such input.
        """
        if name not in self.spec.inputs:
            known = ", ".join(sorted(self.spec.inputs)) or "none"
            raise ArtifactError(f"stage {self.spec.stage} needs input {name!r}; its spec has: {known}")
        return Path(self.spec.inputs[name].path)

    def has_input(self, name: str) -> bool:
        return name in self.spec.inputs

    def new_output(self, name: str) -> Path:
        """Return `outputs/<name>`, with whatever an earlier attempt left there removed; its parent exists."""
        path = self.directory.outputs_path / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def checkpoints(self, keep_last: int = 2) -> CheckpointStore:
        return CheckpointStore(self.directory.checkpoints_path, keep_last=keep_last)

    def progress(self, step: int, total: int, phase: str = "", **values: Any) -> None:
        """Tell who watches how far the stage is; at most twice a second, and always at the last step."""
        now = time.monotonic()
        if now - self._progress_written < 0.5 and step not in (0, total):
            return
        self._progress_written = now
        content = {"step": step, "total": total, "phase": phase, "time": time.time(), "values": values}
        # Someone watching must not cost a training run: a full disk shows up where it matters, in a checkpoint.
        with contextlib.suppress(OSError):
            write_json(self.directory.progress_path, content)
