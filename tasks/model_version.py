"""What a registered model says of itself: the stage's config, the version's tags, its requirements, an example."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from pydantic import Field

from tasks.config import RegistryConfig, TrackingConfig
from tasks.promotion import GATE_TAG, WEIGHTS_TAG
from training_core.config.base import Config
from training_core.protocol.environment import git_commit

TASK = "llm/v1/chat"
"""What a server of the model offers. MLflow derives the signature from it: chat messages in, chat messages out."""
INPUT_EXAMPLE = {
    "messages": [{"role": "user", "content": "Write one sentence about the sea."}],
    "max_tokens": 16,
}


class LineageConfig(Config):
    """Where the model comes from; becomes tags of its version."""

    run_id: str | None = None
    """The pipeline run, `<root>/runs/<run id>`; null for a stage that runs alone."""
    dataset_sha256: str | None = None
    """Fingerprint of the checked preference data."""
    checkpoint_sha256: str | None = None
    """Digest of the SFT checkpoint's weights."""
    config_sha256: str | None = None
    """Digest of the resolved pipeline config."""
    spec_hashes: dict[str, str] = Field(default_factory=dict)
    """Stage name -> spec hash, of every stage before this one."""


class RegisterConfig(Config):
    """Config of the stage `register`."""

    registry: RegistryConfig
    tracking: TrackingConfig = TrackingConfig()
    lineage: LineageConfig = LineageConfig()


def version_tags(lineage: LineageConfig, gate: dict[str, Any], weights: str, gate_sha256: str) -> dict[str, str]:
    """Return the tags of a model version: what it is, who let it through, where it comes from."""
    tags: dict[str, str | None] = {
        WEIGHTS_TAG: weights,
        GATE_TAG: gate_sha256,
        "tidegate.gate_verdict": str(gate["verdict"]),
        "tidegate.gate_rule_version": str(gate.get("rule_version", "")),
        "tidegate.evaluation_digest": gate.get("evaluation_digest"),
        "tidegate.run_id": lineage.run_id,
        "tidegate.dataset_sha256": lineage.dataset_sha256,
        "tidegate.checkpoint_sha256": lineage.checkpoint_sha256,
        "tidegate.config_sha256": lineage.config_sha256,
        "tidegate.git_commit": git_commit(),
        **{f"tidegate.spec.{stage}": spec_hash for stage, spec_hash in lineage.spec_hashes.items()},
    }
    for rival, digest in gate["weights_sha256"].items():
        if rival != "candidate":
            tags[f"tidegate.judged_against.{rival}"] = digest
    return {key: value for key, value in tags.items() if value}


def requirements() -> list[str]:
    """Return what a server needs to load the model, at the versions it was evaluated with."""
    packages = ("mlflow", "torch", "transformers", "safetensors", "tokenizers", "numpy")
    return [f"{package}=={importlib.metadata.version(package).split('+')[0]}" for package in packages]
