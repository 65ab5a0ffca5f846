"""`<root>/runs/<run id>/run.json`: which stage directories a run used, their states, the verdict, the champion."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from training_core.errors import ArtifactError, ConfigurationError
from training_core.protocol.atomic import read_json, write_json
from training_core.records import Artifact
from training_core.registry import nearest_name

RUN_FILE = "run.json"
NO_LONGER_WRITTEN = ("prefect",)
"""Fields of a run.json of an earlier version: read over."""
MAX_REASONS = 3
"""Problems of a damaged run.json that are named."""

Seconds = Annotated[float, Field(ge=0, le=253_402_300_799)]
"""Since 1970, up to the year 9999: what a calendar can show."""


class RunState(StrEnum):
    """How a run stands."""

    RUNNING = "Running"
    COMPLETED = "Completed"
    REJECTED = "Rejected"
    """Complete; the gate said fail or inconclusive."""
    GATE_ERROR = "GateError"
    """Every stage is done, but the evaluation gives no answer: the gate's verdict is error."""
    FAILED = "Failed"
    PREEMPTED = "Pre-empted"
    CANCELLED = "Cancelled"
    INTERRUPTED = "Interrupted"
    """By Ctrl-C."""
    INCOMPLETE = "Incomplete"
    """Stages were run on their own; some are still to do."""

    @property
    def is_complete(self) -> bool:
        return self in (RunState.COMPLETED, RunState.REJECTED)


class StageState(StrEnum):
    """How a stage stands within a run."""

    PENDING = "Pending"
    RUNNING = "Running"
    COMPLETED = "Completed"
    CACHED = "Cached"
    SKIPPED = "Skipped"
    FAILED = "Failed"
    PREEMPTED = "Pre-empted"
    CANCELLED = "Cancelled"
    INTERRUPTED = "Interrupted"


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class RunStage(_Stored):
    """One stage of a run."""

    state: StageState = StageState.PENDING
    spec_hash: str | None = None
    directory: str | None = None
    """Relative to the root, so that a root can be moved."""
    seconds: float | None = None
    """Wall time of the stage's last attempt, as its result tells; for a cached stage that of the run that did it."""
    peak_rss_bytes: int | None = None
    attempts: int | None = None
    why: str | None = None
    """Why it ran or was cached."""
    error: str | None = None
    """Type and message of its last failure."""


class ChampionEntry(_Stored):
    """The registered model that the candidate is compared with."""

    version: str
    weights_sha256: str
    path: str
    sha256: str
    """Digest of the downloaded folder."""


class RunRecord(_Stored):
    """run.json."""

    schema_version: int = 1
    run_id: str
    state: RunState = RunState.RUNNING
    config: dict[str, Any]
    inputs: dict[str, Artifact]
    """Files from outside with the digests that they had when the run was planned."""
    stages: dict[str, RunStage] = Field(default_factory=dict)
    champion: ChampionEntry | None = None
    champion_known: bool = False
    """False until the registry was asked; then `champion` null means that there was none."""
    gate: dict[str, Any] | None = None
    """Summary of the gate: verdict, reasons, primary, guards."""
    model: dict[str, Any] | None = None
    """Summary of the registration: model_name, version, weights_sha256, and the aliases that it had then."""
    mlflow: dict[str, Any] = Field(default_factory=dict)
    created: Seconds = Field(default_factory=time.time)
    updated: Seconds = Field(default_factory=time.time)
    attempts: int = 0
    """How often `tidegate run` was called for it."""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_older_versions_wrote(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if name not in NO_LONGER_WRITTEN}
        return values

    @field_validator("gate")
    @classmethod
    def _gate_can_be_shown(cls, gate: dict[str, Any] | None) -> dict[str, Any] | None:
        rules = [(gate or {}).get(name) or {} for name in ("primary", "champion")]
        guards = (gate or {}).get("guards") or []
        if not isinstance(guards, list) or not all(isinstance(rule, dict) for rule in (*rules, *guards)):
            raise ValueError("primary, champion and each of the guards must be objects")
        return gate

    @field_validator("model")
    @classmethod
    def _model_can_be_shown(cls, model: dict[str, Any] | None) -> dict[str, Any] | None:
        if model is not None and (missing := {"model_name", "version"} - model.keys()):
            raise ValueError(f"{', '.join(sorted(missing))} is missing")
        return model

    def save(self, root: Path) -> None:
        self.updated = time.time()
        write_json(run_directory(root, self.run_id) / RUN_FILE, self.model_dump(mode="json"))


def run_directory(root: Path, run_id: str) -> Path:
    return root / "runs" / run_id


def report_path(root: Path, run_id: str) -> Path:
    """Return where a run's report is written at its end."""
    return run_directory(root, run_id) / "report.html"


@dataclass(frozen=True)
class DamagedRun:
    """A run whose run.json cannot be read."""

    run_id: str
    path: Path
    updated: float
    error: ArtifactError


def load_run(root: Path, run_id: str) -> RunRecord | None:
    """Return the record of a run, or None when there is none.

    Raises:
        ArtifactError: run.json is damaged.
    """
    path = run_directory(root, run_id) / RUN_FILE
    try:
        record = RunRecord.model_validate(read_json(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}. Its owner has to allow it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, _reason(error)) from None
    if record.run_id != run_id:
        raise _damaged(path, f"it says that it is of run {record.run_id!r}")
    return record


def load_runs(root: Path) -> list[RunRecord | DamagedRun]:
    """Return all runs, the one that changed last first; a damaged one hides no other."""
    found: list[RunRecord | DamagedRun] = []
    for run_id in list_run_ids(root):
        try:
            record = load_run(root, run_id)
        except ArtifactError as error:
            path = run_directory(root, run_id) / RUN_FILE
            found.append(DamagedRun(run_id, path, _changed(path), error))
            continue
        if record is not None:
            found.append(record)
    return found


def find_run(root: Path, name: str) -> RunRecord:
    """Return the run with this id, or whose id starts with `name`; `latest` is the one that changed last.

    Raises:
        ConfigurationError: there is no such run, or more than one.
        ArtifactError: its run.json is damaged.
    """
    if not name.strip():
        raise ConfigurationError("the name of the run is empty. Write a run id, the start of one, or `latest`")
    if not root.exists():
        raise ConfigurationError(missing_root(root))
    known = list_run_ids(root)
    if not known:
        raise ConfigurationError(f"no runs under {root}. Start one with `tidegate run CONFIG`, or name another --root")
    if name == "latest":
        name = known[0]
    matches = [run_id for run_id in known if run_id == name] or [run_id for run_id in known if run_id.startswith(name)]
    if len(matches) > 1:
        raise ConfigurationError(f"{name!r} could be any of {', '.join(matches)}. Write more of the id")
    if not matches:
        near = nearest_name(name, known)
        raise ConfigurationError(
            f"no run {name!r} under {root}. Known: {', '.join(known[:10])}.{f' Did you mean {near!r}?' if near else ''}"
        )
    record = load_run(root, matches[0])
    if record is None:
        raise ConfigurationError(f"run {matches[0]!r} under {root} vanished")
    return record


def missing_root(root: Path) -> str:
    """Return what to say about a root that does not exist."""
    return (
        f"root {root} does not exist, so there are no runs under it. Name the root of a run (--root or TIDEGATE_ROOT), "
        "or start one with `tidegate run CONFIG`"
    )


def list_run_ids(root: Path) -> list[str]:
    """Return the ids of all runs, the one that changed last first."""
    return [path.parent.name for path in sorted((root / "runs").glob(f"*/{RUN_FILE}"), key=_changed, reverse=True)]


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # It vanished since it was found.
        return 0.0


def _damaged(path: Path, reason: str) -> ArtifactError:
    return ArtifactError(
        f"{path} is damaged: {reason}. Delete it: the same `tidegate run` command writes it again and finds every "
        "complete stage"
    )


def _reason(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    problems = error.errors(include_url=False, include_input=False)
    named = [f"{'.'.join(map(str, problem['loc'])) or 'the top level'}: {problem['msg']}" for problem in problems]
    return "; ".join(named[:MAX_REASONS]) + (f"; {len(named) - MAX_REASONS} more" if named[MAX_REASONS:] else "")
