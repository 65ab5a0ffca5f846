"""Fixtures: a folder with a pipeline config whose stages are scripted."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

SCRIPTED = Path(__file__).resolve().parents[1]

CONFIG = """
name: scripted
seed: 1
checkpoint: {source: model}
data:
  preferences: [{path: pairs.jsonl}]
reward_model:
  optimizer: {learning_rate: 1e-4}
algorithm:
  name: grpo
  num_steps: 4
  optimizer: {learning_rate: 1e-5}
rollout: {engine: transformers, max_new_tokens: 32}
rewards: [{kind: reward_model}]
evaluation:
  metrics: [{kind: sentiment}]
gate:
  primary: {metric: sentiment}
registry: {model_name: scripted}
launch: {grace_seconds: 5}
"""


def write_checkpoint(folder: Path) -> None:
    """Write what passes for a checkpoint before a model is loaded: a config and a whole safetensors file."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


class Workspace:
    """A current folder with files from outside, a config, a root and a script for the stages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "pipeline.yaml"
        self.root = path / "root"
        self.script_path = path / "script.json"
        self.config.write_text(CONFIG)
        write_checkpoint(path / "model")
        (path / "pairs.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n')
        self.script({})

    def script(self, script: dict[str, Any]) -> None:
        """Tell the stages what to do; see tests/scripted/scripted_stages/stage.py."""
        self.script_path.write_text(json.dumps(script))

    @property
    def environment(self) -> dict[str, str]:
        """For processes of scripted stages and of the command."""
        return {
            **os.environ,
            "PYTHONPATH": str(SCRIPTED),
            "SCRIPTED_STAGES": str(self.script_path),
            "TIDEGATE_ROOT": str(self.root),
        }

    def stage_directories(self, stage: str) -> list[Path]:
        return sorted((self.root / "stages" / stage).glob("*"))


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.chdir(tmp_path)
    space = Workspace(tmp_path)
    for name in ("PYTHONPATH", "SCRIPTED_STAGES", "TIDEGATE_ROOT"):
        monkeypatch.setenv(name, space.environment[name])
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return space


@pytest.fixture
def scripted(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """The workspace, with this process's chain made of scripted stages that run in this process."""
    from scripted_stages.here import run_stage_process
    from scripted_stages.replace import SilentTracker, replacements

    import tasks.dispatch
    from training_core.protocol import environment

    for owner, name, value in replacements():
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(tasks.dispatch, "run_stage_process", run_stage_process)
    monkeypatch.setattr(environment, "git_commit", lambda: None)  # Asks Git, which takes longer than a stage here.
    monkeypatch.setattr(SilentTracker, "calls", [])
    return workspace
