"""Checkpoints as transactions: temporary directory, fsync, manifest, rename, prune."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from training_core.errors import ArtifactError
from training_core.protocol.atomic import fsync_path, fsync_tree, read_json, write_json
from training_core.protocol.digests import file_digest, tree_files

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint: `step` steps of the loop are done (GRPO counts rollouts, the reward model updates)."""

    step: int
    path: Path


class CheckpointStore:
    """Checkpoints `step_000010/` below one directory.

    A save writes into a temporary directory, flushes every file, writes the manifest of sha256 and sizes last and
    renames. Only then older ones are pruned, so a crash or a full disk at any moment leaves the last good one.

    Args:
        path: the directory.
        keep_last: how many to keep, at least 1.
    """

    def __init__(self, path: Path, keep_last: int = 2) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        self.path = path
        self.keep_last = keep_last

    def save(self, step: int, write: Callable[[Path], None]) -> Checkpoint:
        """Save what `write(directory)` puts into the directory it is given."""
        final = self.path / f"step_{step:06d}"
        temporary = self.path / f".tmp_step_{step:06d}"
        self._remove_leftovers()
        temporary.mkdir(parents=True)
        try:
            write(temporary)
            files = {}
            fsync_tree(temporary)
            for file in tree_files(temporary):
                name = file.relative_to(temporary).as_posix()
                files[name] = {"sha256": file_digest(file), "bytes": file.stat().st_size}
            write_json(temporary / MANIFEST, {"step": step, "files": files})
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if final.exists():  # A damaged one of the same step, or the step was done again after a resume.
            shutil.rmtree(final)
        os.replace(temporary, final)
        fsync_path(self.path)
        self._prune(newest=step)
        return Checkpoint(step, final)

    def is_empty(self) -> bool:
        """Return whether there is no checkpoint at all, whole or not: `latest` would return None."""
        return not self._saved()

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint whose files match its manifest; damaged ones are reported and passed over.

        Returns:
            None when there is no checkpoint at all.

        Raises:
            ArtifactError: there are checkpoints, but none is valid. Work is not thrown away in silence.
        """
        saved = self._saved()
        for checkpoint in reversed(saved):
            problem = self._problem(checkpoint)
            if problem is None:
                return checkpoint
            logger.warning("checkpoint %s is not valid (%s); trying the one before", checkpoint.path, problem)
        if saved:
            raise ArtifactError(
                f"{self.path} holds checkpoints, but none of them is whole (see the log). To start again from the "
                f"beginning, delete {self.path}; to go on, restore one of them"
            )
        return None

    def _saved(self) -> list[Checkpoint]:
        """Return the checkpoints, whole or not, by step. Other names (a copy that someone made) are none of ours."""
        names = [(NAME.fullmatch(path.name), path) for path in self.path.glob("step_*")]
        return sorted((Checkpoint(int(m[1]), path) for m, path in names if m), key=lambda checkpoint: checkpoint.step)

    def _problem(self, checkpoint: Checkpoint) -> str | None:
        try:
            manifest = read_json(checkpoint.path / MANIFEST)
            step, files = manifest["step"], manifest["files"].items()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"no readable manifest: {error!r}"
        if step != checkpoint.step:
            return f"it was saved after step {step}"
        for name, entry in files:
            file = checkpoint.path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["bytes"] or file_digest(file) != entry["sha256"]:
                return f"{name} differs from the manifest"
        return None

    def _prune(self, newest: int) -> None:
        for checkpoint in [c for c in self._saved() if c.step <= newest][: -self.keep_last]:
            shutil.rmtree(checkpoint.path)

    def _remove_leftovers(self) -> None:
        for path in self.path.glob(".tmp_step_*"):
            shutil.rmtree(path)
