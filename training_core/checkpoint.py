"""Checkpoints as transactions: temporary directory, fsync, manifest, rename, prune."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_core.errors import ArtifactError, DiskFullError
from training_core.protocol.atomic import fsync_path, fsync_tree, read_json, write_json
from training_core.protocol.digests import file_digest, tree_files

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
NAME = re.compile(r"step_(\d{6,})")
TEMPORARY_PREFIX = ".tmp_"
"""Before a name: half written, or about to be removed."""
ASIDE_PREFIX = ".old_"
"""Before a name: whole, moved aside while another of the same step takes its place."""


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint: `step` steps of the loop are done (RL counts rollouts, the reward model updates)."""

    step: int
    path: Path
    score: float | None = None
    """What `save` was given: higher is better."""


class CheckpointStore:
    """Checkpoints `step_000010/` below one directory.

    A save writes into a temporary directory, flushes every file, writes the manifest of sha256 and sizes last and
    renames. Only then older ones are pruned, so a crash or a full disk at any moment leaves the last good one.

    Args:
        path: the directory.
        keep_last: how many of the newest to keep, at least 1.
        keep_best: how many of those with the highest scores to keep as well. Among equal ones the earlier is better.
    """

    def __init__(self, path: Path, keep_last: int = 2, keep_best: int = 0) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ValueError(f"keep_last must be at least 1 and keep_best at least 0, got {keep_last} and {keep_best}")
        self.path = path
        self.keep_last = keep_last
        self.keep_best = keep_best

    def save(
        self, step: int, write: Callable[[Path], None], score: float | None = None, pinned: Collection[int] = ()
    ) -> Checkpoint:
        """Save what `write(directory)` puts into the directory it is given.

        Args:
            step: steps done.
            write: writes the state.
            score: how good the state is, finite; None leaves it out of the best.
            pinned: steps whose checkpoints are not to be pruned now.

        Raises:
            DiskFullError: less space is free than the last checkpoint takes. Nothing was written.
        """
        if score is not None and not math.isfinite(score):
            raise ValueError(f"the score of a checkpoint must be finite, got {score}")
        final = self.path / f"step_{step:06d}"
        temporary = self.path / f"{TEMPORARY_PREFIX}{final.name}"
        saved = self._saved()
        self._remove_leftovers()
        self._check_space(saved)
        temporary.mkdir(parents=True)
        try:
            write(temporary)
            files = {}
            fsync_tree(temporary)
            for file in tree_files(temporary):
                name = file.relative_to(temporary).as_posix()
                files[name] = {"sha256": file_digest(file), "bytes": file.stat().st_size}
            write_json(temporary / MANIFEST, {"step": step, "score": score, "files": files})
            self._put_in_place(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune(newest=step, pinned=pinned)
        return Checkpoint(step, final, score)

    def is_empty(self) -> bool:
        """Return whether there is no checkpoint at all, whole or not: `latest` would return None."""
        return not self._saved()

    def latest(self, is_wanted: Callable[[int], bool] = lambda step: True) -> Checkpoint | None:
        """Return the newest checkpoint whose files match its manifest; damaged ones are reported and passed over.

        Args:
            is_wanted: says of a step whether its checkpoint will do.

        Returns:
            None when there is no such checkpoint at all.

        Raises:
            ArtifactError: there are such checkpoints, but none is valid. Work is not thrown away in silence.
        """
        saved = [checkpoint for checkpoint in self._saved() if is_wanted(checkpoint.step)]
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

    def best(self) -> Checkpoint | None:
        """Return the valid checkpoint with the highest score, the earlier of equal ones; None when none has a score."""
        for checkpoint in self._by_score(self._saved()):
            problem = self._problem(checkpoint)
            if problem is None:
                return checkpoint
            logger.warning("checkpoint %s has the best score and is not valid: %s", checkpoint.path, problem)
        return None

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps than `step`: they belong to a course that was given up."""
        for checkpoint in self._saved():
            if checkpoint.step > step:
                self._remove(checkpoint.path)

    def _saved(self) -> list[Checkpoint]:
        """Return the checkpoints, whole or not, by step. Other names (a copy that someone made) are none of ours."""
        self._restore_set_aside()
        names = [(NAME.fullmatch(path.name), path) for path in self.path.glob("step_*")]
        found = [Checkpoint(int(match[1]), path, _score(path)) for match, path in names if match]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

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

    def _check_space(self, saved: list[Checkpoint]) -> None:
        """Raise early when the disk cannot hold another checkpoint of the last one's size."""
        if not saved:
            return
        last = saved[-1].path
        needed = sum(file.stat().st_size for file in tree_files(last))
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise DiskFullError(
                f"no space left for a checkpoint in {self.path}: {free} bytes = {free / 1024**2:.1f} MiB are free and "
                f"the last one, {last.name}, takes {needed} bytes = {needed / 1024**2:.1f} MiB. Nothing was written; "
                "completed checkpoints are kept: free some space (or move `root`) and run the same command again"
            )

    def _put_in_place(self, temporary: Path, final: Path) -> None:
        """Rename a whole checkpoint to its name. One that has the name already is moved aside first; should the second
        rename fail, or the process die between the two, `_restore_set_aside` gives it its name back."""
        aside = final.with_name(f"{ASIDE_PREFIX}{final.name}")
        if final.exists():
            os.replace(final, aside)
        os.replace(temporary, final)
        fsync_path(self.path)
        if aside.exists():
            shutil.rmtree(aside)

    def _restore_set_aside(self) -> None:
        for aside in self.path.glob(f"{ASIDE_PREFIX}step_*"):
            final = aside.with_name(aside.name.removeprefix(ASIDE_PREFIX))
            if final.exists():
                shutil.rmtree(aside)
            else:
                os.replace(aside, final)

    def _prune(self, newest: int, pinned: Collection[int]) -> None:
        """Remove what need not be kept, oldest first. The newest one is whole by now, and never among it."""
        saved = [checkpoint for checkpoint in self._saved() if checkpoint.step <= newest]
        kept = {checkpoint.step for checkpoint in saved[-self.keep_last :]} | set(pinned)
        kept |= {checkpoint.step for checkpoint in self._by_score(saved)[: self.keep_best]}
        for checkpoint in saved:
            if checkpoint.step not in kept:
                self._remove(checkpoint.path)

    @staticmethod
    def _by_score(saved: list[Checkpoint]) -> list[Checkpoint]:
        scored = [(checkpoint.score, checkpoint) for checkpoint in saved if checkpoint.score is not None]
        return [checkpoint for _, checkpoint in sorted(scored, key=lambda pair: (-pair[0], pair[1].step))]

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint: first its name, so that a crash leaves nothing that looks like a damaged one."""
        going = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
        if going.exists():
            shutil.rmtree(going)
        os.replace(path, going)
        shutil.rmtree(going)

    def _remove_leftovers(self) -> None:
        for path in self.path.glob(f"{TEMPORARY_PREFIX}step_*"):
            shutil.rmtree(path)


def _score(path: Path) -> float | None:
    """Return the score in a checkpoint's manifest; None where there is none to read."""
    try:
        manifest: Any = read_json(path / MANIFEST)
        return None if manifest["score"] is None else float(manifest["score"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
