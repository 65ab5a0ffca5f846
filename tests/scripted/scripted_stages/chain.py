"""The chain of scripted stages, planned and run in this process, without Prefect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.config import load_pipeline
from tasks.pipeline import PipelineRun
from tasks.planning import CHAIN, ChainState, chain_of
from tasks.plans import StagePlan, make_plan

NAMES = [stage.name for stage in CHAIN]


def config_of(space: Any, *settings: str) -> Any:
    return load_pipeline([space.config], settings)


def plan(space: Any, *settings: str) -> dict[str, StagePlan]:
    return {line.name: line for line in make_plan(ChainState.begin(config_of(space, *settings)))}


def run(space: Any, *settings: str) -> PipelineRun:
    """Run the whole chain in this process, without Prefect."""
    with PipelineRun(config_of(space, *settings)) as pipeline:
        for stage in chain_of(pipeline.config):
            pipeline.run_stage(stage.name)
    return pipeline


def states(pipeline: PipelineRun) -> dict[str, str]:
    return {name: entry.state.value for name, entry in pipeline.record.stages.items()}


def champion(folder: Path, text: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_text(text)
    return {"version": "7", "weights_sha256": "b" * 64, "path": str(folder), "gate_sha256": None}
