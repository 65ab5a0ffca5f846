"""A trainer with real weights, whose metrics come from a script: for tests of the loop and its sentinels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from training_core.errors import TrainingDivergedError
from training_core.loop import StepRecord
from training_core.protocol.context import StageContext
from training_core.protocol.directory import StageDirectory
from training_core.records import StageSpec
from training_core.sentinels import KnobChanges

HEALTHY = {
    "kl/policy_ref_answer_nats": 0.5,
    "kl/policy_ref_nats": 0.01,
    "policy/clip_fraction": 0.01,
    "policy/entropy_nats": 1.0,
    "policy/grad_norm": 1.0,
    "reward/error_fraction": 0.0,
    "reward/fluent_mean": 0.5,
    "reward/missing_fraction": 0.0,
    "rollout/length_mean_tokens": 20.0,
    "rollout/sampler_trainer_kl_nats": 0.001,
    "rollout/truncated_fraction": 0.1,
    "rollout/zero_variance_group_fraction": 0.2,
}

Script = Callable[[int, KnobChanges], dict[str, float]]
"""Metrics that differ from the healthy ones at a step."""


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def healthy(step: int, knobs: KnobChanges) -> dict[str, float]:
    return {}


class ScriptedTrainer:
    """Weights move by a step's gradient times the learning rate; metrics are healthy ones and the script's.

    Args:
        context: of the stage.
        script: what differs from a healthy run.
        diverges: says whether the gradient of a step is NaN.
        kill_at_call: the call of `train_step` of this process that is killed.
        stop_at_call: the call during which SIGTERM arrives.
    """

    def __init__(
        self,
        context: StageContext,
        script: Script = healthy,
        *,
        diverges: Callable[[int, KnobChanges], bool] = lambda step, knobs: False,
        kill_at_call: int = 0,
        stop_at_call: int = 0,
    ) -> None:
        self.context = context
        self.script = script
        self.diverges = diverges
        self.kill_at_call = kill_at_call
        self.stop_at_call = stop_at_call
        self.num_calls = 0
        self.knobs = KnobChanges()
        self.weights = torch.tensor([1.0, -0.5, 0.1], dtype=torch.float64)
        self.gradient = torch.zeros_like(self.weights)

    def train_step(self, step: int) -> StepRecord:
        self.num_calls += 1
        if self.num_calls == self.kill_at_call:
            raise Killed
        if self.num_calls == self.stop_at_call:
            self.context.stop.requested = True
        self.gradient += torch.sin(self.weights * step)
        if self.diverges(step, self.knobs):
            raise TrainingDivergedError(f"step {step}: the gradient is nan")
        self.weights = self.weights - 0.1 * self.knobs.learning_rate_factor * self.gradient
        self.gradient = torch.zeros_like(self.weights)
        metrics = {
            **HEALTHY,
            "reward/mean": 0.1 * step,
            "test/weight_sum": float(self.weights.sum()),
            **self.script(step, self.knobs),
        }
        return StepRecord(
            metrics, {"time/x_seconds": 0.1}, [{"text": f"step {step}", "weight": float(self.weights[0])}]
        )

    def change_knobs(self, changes: KnobChanges) -> None:
        self.knobs = changes

    def save(self, directory: Path, step: int) -> None:
        save_file({"weights": self.weights}, directory / "weights.safetensors")
        (directory / "state.json").write_text(json.dumps({"step": step, "knobs": self.knobs.model_dump()}))

    def load(self, directory: Path) -> int:
        state = json.loads((directory / "state.json").read_text())
        self.knobs = KnobChanges.model_validate(state["knobs"])
        self.weights = load_file(directory / "weights.safetensors")["weights"]
        self.gradient = torch.zeros_like(self.weights)
        return int(state["step"])


def scripted_context(path: Path) -> StageContext:
    spec = StageSpec(stage="scripted", stage_version=1, config={})
    directory = StageDirectory(path)
    directory.prepare(spec)
    return StageContext(spec, directory)


def deterministic_files(path: Path) -> dict[str, str]:
    """Return what must be the same for a run that was interrupted."""
    names = ("metrics.jsonl", "samples.jsonl", "alarms.jsonl")
    return {name: (path / name).read_text() for name in names if (path / name).exists()}
