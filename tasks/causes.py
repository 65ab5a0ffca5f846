"""Why a stage is not cached: what differs from the most similar complete one under the same root."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tasks.showing import flatten
from training_core.config.intake import INPUT
from training_core.records import StageSpec

MAX_SHOWN = 3
MAX_VALUE_CHARACTERS = 60
ABSENT = object()
NONE_FINISHED = "no complete one under this root"
"""Never run to its end, or removed since."""
SECTIONS = {"sft_intake": "checkpoint", "check_data": "data", "reward_model": "reward_model", "gate": "gate"}
"""Stages whose config is one section of the pipeline's: fields are named by their path there."""


@dataclass(frozen=True)
class Difference:
    """One field or input that differs."""

    what: str
    before: Any
    now: Any

    def __str__(self) -> str:
        if self.what.startswith("input "):
            if self.before is ABSENT:
                return f"{self.what} is new"
            return f"{self.what} {'is gone' if self.now is ABSENT else 'changed'}"
        return f"{self.what}: {_shown(self.before)} -> {_shown(self.now)}"


def explain(root: Path, spec: StageSpec) -> str:
    """Return in words what differs between `spec` and the most similar complete stage of its kind."""
    candidates = finished_specs(root, spec.stage)
    if not candidates:
        return NONE_FINISHED
    found = min((differences(before, spec) for before in candidates), key=len)
    shown = "; ".join(str(difference) for difference in found[:MAX_SHOWN])
    more = f"; and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
    return shown + more


def finished_specs(root: Path, stage: str) -> list[StageSpec]:
    """Return the specs of all complete stages of one kind, the newest first."""
    results = (root / "stages" / stage).glob("*/result.json")
    specs = []
    for result in sorted(results, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            specs.append(StageSpec.load(result.with_name("spec.json")))
        except (OSError, ValueError, ValidationError):
            continue  # Written by another version of Tidegate: nothing to compare with.
    return specs


def differences(before: StageSpec, now: StageSpec) -> list[Difference]:
    """Return what differs in all that the spec hash covers: versions, seed, inputs, config."""
    found = []
    if before.schema_version != now.schema_version:
        found.append(Difference("schema version", before.schema_version, now.schema_version))
    if before.stage_version != now.stage_version:
        found.append(Difference("stage version", before.stage_version, now.stage_version))
    if before.seed != now.seed:
        found.append(Difference("seed", before.seed, now.seed))
    for name in sorted(before.inputs.keys() | now.inputs.keys()):
        old = before.inputs[name].sha256 if name in before.inputs else ABSENT
        new = now.inputs[name].sha256 if name in now.inputs else ABSENT
        if old != new:
            found.append(Difference(f"input {name}", old, new))
    section = SECTIONS.get(now.stage, "")
    old_leaves, new_leaves = (flatten(spec.config, section, lists=True) for spec in (before, now))
    for path in sorted(old_leaves.keys() | new_leaves.keys()):
        old, new = old_leaves.get(path, ABSENT), new_leaves.get(path, ABSENT)
        if INPUT in (old, new):
            continue  # A file stands there: its input is listed above.
        if old != new or type(old) is not type(new):
            found.append(Difference(path, old, new))
    return found


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 1] + "…"
