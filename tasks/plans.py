"""What a run would do: for each stage whether it is cached, continues, runs or waits, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from tasks.causes import explain
from tasks.config import PipelineConfig
from tasks.planning import (
    ChainState,
    FinishedStage,
    StageDefinition,
    build_spec,
    chain_of,
    is_rejected,
    needed_stages,
)
from training_core.errors import ArtifactError
from training_core.protocol import environment
from training_core.protocol.atomic import read_json
from training_core.protocol.directory import StageDirectory
from training_core.protocol.lock import is_locked, read_owner
from training_core.records import StageSpec


class PlanState(StrEnum):
    """What will happen to a stage."""

    CACHED = "cached"
    """It is complete and its outputs are unharmed."""
    CONTINUES = "continues"
    """It has a checkpoint to go on from."""
    RUNS = "runs"
    WAITS = "waits"
    """Its inputs come from a stage that is not complete."""
    SKIPPED = "skipped"
    """It will not run: the gate said no."""
    LOCKED = "locked"
    """A live process works on it at this moment."""


@dataclass(frozen=True)
class StagePlan:
    """One line of a plan."""

    name: str
    state: PlanState
    why: str
    spec: StageSpec | None = None
    directory: Path | None = None


LOST_VERSION = "the registry lost the version"

_verified: set[tuple[str, int]] = set()
"""Complete stages whose outputs this process has verified, with the time stamp of their result."""


def assess(stage: StageDefinition, state: ChainState) -> StagePlan:
    """Return what will happen to a stage whose needed stages are all in `state.finished`; a cached one is put there.

    Raises:
        ArtifactError: it is complete, but an output is missing or changed.
        ConfigurationError: the config does not fit what an earlier stage found.
    """
    spec = build_spec(stage, state)
    directory = StageDirectory.of_spec(state.root, spec)
    finished = load_finished(directory)
    if finished is not None:
        state.finished[stage.name] = finished
        why = _cached_reason(finished) + _other_code(finished, state.config)
        return StagePlan(stage.name, PlanState.CACHED, why, spec, directory.path)
    if is_locked(directory.path):
        owner = read_owner(directory.path) or {}
        why = f"process {owner.get('pid')} on {owner.get('host')} works on it"
        return StagePlan(stage.name, PlanState.LOCKED, why, spec, directory.path)
    if directory.has_started():
        newest = max(path.name for path in directory.checkpoints_path.glob("step_*"))
        why = f"from {newest}{_last_failure(directory)}"
        return StagePlan(stage.name, PlanState.CONTINUES, why, spec, directory.path)
    why = explain(state.root, spec) + _last_failure(directory)
    return StagePlan(stage.name, PlanState.RUNS, why, spec, directory.path)


def load_finished(directory: StageDirectory) -> FinishedStage | None:
    """Return a complete stage after verifying its outputs, or None when it is not complete.

    Raises:
        ArtifactError: an output is missing or changed; the message says what to delete.
    """
    result = directory.result()
    if result is None:
        return None
    stamp = (str(directory.path), directory.result_path.stat().st_mtime_ns)
    if stamp not in _verified:
        directory.verify_outputs(result)
        _verified.add(stamp)
    return FinishedStage(directory, result)


def is_complete(stage: StageDefinition, state: ChainState) -> bool:
    """Return whether a stage whose needed stages are all in `state.finished` has a result, its outputs unseen."""
    return StageDirectory.of_spec(state.root, build_spec(stage, state)).result() is not None


def make_plan(state: ChainState) -> list[StagePlan]:
    """Return one line a stage. `state.champion` must be resolved by the caller, as far as it can be.

    Raises:
        ArtifactError, ConfigurationError: as `assess`.
    """
    plans: list[StagePlan] = []
    for stage in chain_of(state.config):
        missing = [name for name in needed_stages(stage, state.config) if name not in state.finished]
        if missing:
            plans.append(StagePlan(stage.name, PlanState.WAITS, f"for {', '.join(missing)}"))
        elif stage.name == "register" and is_rejected(state):
            verdict = state.finished["gate"].result.summary.get("verdict")
            plans.append(StagePlan(stage.name, PlanState.SKIPPED, f"the gate's verdict is {verdict}"))
        else:
            plans.append(assess(stage, state))
    return plans


def require_finished(stage: StageDefinition, state: ChainState) -> None:
    """Fill `state.finished` with the stages that `stage` needs, for a stage that is run on its own.

    Raises:
        ArtifactError: one of them is not complete, or harmed.
    """
    by_name = {definition.name: definition for definition in chain_of(state.config)}
    for name in needed_stages(stage, state.config):
        if name in state.finished:
            continue
        require_finished(by_name[name], state)  # Its own spec follows from what it needs itself.
        if assess(by_name[name], state).state is not PlanState.CACHED:
            raise ArtifactError(
                f"stage {stage.name} needs {name}, which is not complete under {state.root} for this config. Run it "
                "first, or the whole pipeline with `tidegate run`"
            )


def _cached_reason(finished: FinishedStage) -> str:
    return f"same config, inputs and stage version as {finished.directory.path.name}, outputs verified"


def _other_code(finished: FinishedStage, config: PipelineConfig) -> str:
    """Return what else made the stage: recorded, not part of its hash, so it is said instead."""
    try:
        made = read_json(finished.directory.environment_path)["attempts"][-1]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ""
    commit, packages = _code_here()
    found = []
    before = made.get("git_commit")
    if before and commit and before != commit:
        found.append(f"commit {_short(before)}, now {_short(commit)}")
    # Where the stage's packages are not this process's, there is nothing to compare with.
    if config.launch.python is None and config.orchestration.mode == "local":
        then = made.get("packages") or {}
        changed = [name for name in sorted(then.keys() | packages.keys()) if then.get(name) != packages.get(name)]
        found += [f"{name} {then.get(name, 'absent')}, now {packages.get(name, 'absent')}" for name in changed]
    return f" (made by {'; '.join(found)})" if found else ""


@cache
def _code_here() -> tuple[str | None, dict[str, str]]:
    return environment.git_commit(), environment.package_versions()


def _short(commit: str) -> str:
    digits, dash, mark = commit.partition("-")
    return f"{digits[:12]}{dash}{mark}"


def _last_failure(directory: StageDirectory) -> str:
    try:
        error = read_json(directory.error_path)
    except (OSError, ValueError):
        return ""
    return f" (last attempt: {error.get('type')})"
