"""Plain records that cross a process or package boundary. No torch, no pyarrow at import."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from training_core.protocol.atomic import read_json, write_json
from training_core.protocol.digests import config_digest

SPEC_SCHEMA_VERSION = 1
SPEC_HASH_LENGTH = 16


class Record(BaseModel):
    """A frozen record that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Artifact(Record):
    """A file or directory and the digest of its content."""

    path: str
    """Absolute path, or relative to the stage directory inside result.json."""
    sha256: str
    """Digest of the file, or of the tree (protocol.digests.path_digest)."""


class StageSpec(Record):
    """Everything that decides what a stage computes, and where its inputs lie."""

    schema_version: int = SPEC_SCHEMA_VERSION
    stage: str
    stage_version: int
    """Bumped when the stage's code changes what it computes."""
    config: dict[str, Any]
    """The stage's resolved config as JSON."""
    inputs: dict[str, Artifact] = Field(default_factory=dict)
    seed: int = 0
    execution: dict[str, Any] = Field(default_factory=dict)
    """How to run (threads, device): recorded, not part of the hash."""

    @property
    def spec_hash(self) -> str:
        """Sixteen hex digits over config, input digests (not their paths), seed and stage version."""
        content = {
            "schema_version": self.schema_version,
            "stage": self.stage,
            "stage_version": self.stage_version,
            "config": self.config,
            "inputs": {name: artifact.sha256 for name, artifact in self.inputs.items()},
            "seed": self.seed,
        }
        return config_digest(content)[:SPEC_HASH_LENGTH]

    def save(self, path: Path) -> None:
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def load(cls, path: Path) -> StageSpec:
        return cls.model_validate(read_json(path))


class StageOutcome(Record):
    """What a stage's `run(context)` returns: names of its outputs and a few numbers."""

    outputs: dict[str, str] = Field(default_factory=dict)
    """Output name -> path relative to the stage directory."""
    summary: dict[str, Any] = Field(default_factory=dict)
    """Scalars and short lists for people, MLflow and later stages. JSON."""


class StageResult(Record):
    """result.json: exists = the stage is complete."""

    schema_version: int = 1
    stage: str
    spec_hash: str
    outputs: dict[str, Artifact]
    summary: dict[str, Any]
    seconds: float
    """Wall time of the last attempt."""
    peak_rss_bytes: int
    """Largest resident set of the stage process in the last attempt."""
    attempts: int = 1


class Message(Record):
    """One chat turn."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class PromptRow(Record):
    """A prompt for rollouts or evaluation."""

    prompt_id: str
    prompt: list[Message]
    extra: dict[str, Any] = Field(default_factory=dict)


class StopReason(StrEnum):
    """Why a rollout ended."""

    EOS = "eos"
    LENGTH = "length"
    """The token limit cut the answer: it is truncated."""


class Verdict(StrEnum):
    """What the gate says."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"
