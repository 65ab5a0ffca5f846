"""What tests of MLflow runs share: a config, stages on disk, a look into the store."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tasks.mlflow_store import connect, locate_store
from tasks.tracking import PipelineTracker
from training_core.protocol.atomic import write_json
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageResult, StageSpec


def make_config(uri: str | None = None) -> Any:
    return SimpleNamespace(
        name="demo",
        seed=3,
        identity=lambda: {
            "name": "demo",
            "seed": 3,
            "algorithm": {"name": "grpo", "kl": {"coefficient": 0.5}, "unset": None},
            "rewards": [{"kind": "truncation"}],
        },
        tracking=SimpleNamespace(uri=uri, experiment="test"),
    )


def make_tracker(run_id: str, config: Any, root: Path, **limits: float) -> PipelineTracker:
    return PipelineTracker(run_id, config, root, config_sha256="cc" * 32, **limits)


def write_rows(path: Path, steps: range, name: str = "reward/mean") -> None:
    with path.open("a") as stream:
        stream.writelines(json.dumps({"step": step, name: step / 10}) + "\n" for step in steps)


def make_stage(root: Path, stage: str, data: Path | None = None, **config: Any) -> StageDirectory:
    inputs = {"rl_prompts": Artifact(path=str(data), sha256="ab" * 32)} if data else {}
    spec = StageSpec(stage=stage, stage_version=1, config=config, inputs=inputs, seed=7)
    directory = StageDirectory.of_spec(root, spec)
    directory.prepare(spec)
    write_json(directory.environment_path, {"attempts": [{"git_commit": "abc"}, {"git_commit": "def"}]})
    return directory


def finish(directory: StageDirectory, **summary: Any) -> StageResult:
    (directory.outputs_path).mkdir(exist_ok=True)
    write_json(directory.outputs_path / "gate.json", {"verdict": "pass"})
    result = StageResult(
        stage=directory.path.parent.name,
        spec_hash=directory.path.name,
        outputs={"gate.json": Artifact(path="outputs/gate.json", sha256="cd" * 32)},
        summary=summary,
        seconds=2.5,
        peak_rss_bytes=100,
        attempts=2,
    )
    write_json(directory.result_path, result.model_dump(mode="json"))
    return result


class Store:
    """Looks into the store that a config names."""

    def __init__(self, config: Any, root: Path) -> None:
        self.client = connect(locate_store(config.tracking, root))
        self.experiment = self.client.get_experiment_by_name("test")
        assert self.experiment is not None

    def runs(self, stage: str) -> list[Any]:
        return list(self.client.search_runs([self.experiment.experiment_id], f"tags.`tidegate.stage` = '{stage}'"))

    def run(self, stage: str) -> Any:
        (run,) = self.runs(stage)
        return run

    def steps(self, stage: str, key: str = "reward/mean") -> list[int]:
        (run,) = self.runs(stage)
        return [metric.step for metric in self.client.get_metric_history(run.info.run_id, key)]
