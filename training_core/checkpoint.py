"""Checkpoints as transactions: temporary directory, fsync, manifest, rename, prune."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from training_core.errors import ArtifactError
from training_core.protocol.atomic import fsync_path, fsync_tree, read_json, write_json
from training_core.protocol.digests import file_digest, tree_files

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint: `step` optimizer steps are done."""

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

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint whose files match its manifest; damaged ones are reported and passed over.

        Returns:
            None when there is no checkpoint at all.

        Raises:
            ArtifactError: there are checkpoints, but none is valid. Work is not thrown away in silence.
        """
        paths = sorted(self.path.glob("step_*"), reverse=True)
        for path in paths:
            problem = self._problem(path)
            if problem is None:
                return Checkpoint(int(path.name.removeprefix("step_")), path)
            logger.warning("checkpoint %s is not valid (%s); trying the one before", path, problem)
        if paths:
            raise ArtifactError(
                f"{self.path} holds checkpoints, but none of them is whole (see the log). To start again from the "
                f"beginning, delete {self.path}; to go on, restore one of them"
            )
        return None

    def _problem(self, path: Path) -> str | None:
        try:
            manifest = read_json(path / MANIFEST)
        except (OSError, ValueError) as error:
            return f"no readable manifest: {error}"
        for name, entry in manifest["files"].items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["bytes"] or file_digest(file) != entry["sha256"]:
                return f"{name} differs from the manifest"
        return None

    def _prune(self, newest: int) -> None:
        steps = sorted(int(p.name.removeprefix("step_")) for p in self.path.glob("step_*"))
        for step in [s for s in steps if s <= newest][: -self.keep_last]:
            shutil.rmtree(self.path / f"step_{step:06d}")

    def _remove_leftovers(self) -> None:
        for path in self.path.glob(".tmp_step_*"):
            shutil.rmtree(path)
