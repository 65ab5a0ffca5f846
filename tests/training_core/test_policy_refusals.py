"""What stops a training at once: other weights or probabilities at the sampler, another policy, no finite loss."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_trainers import KLS, answers_of, build_trainer, scored_batch

from training_core.errors import ArtifactError, ConfigurationError, TrainingDivergedError, WeightVersionError
from training_core.rollout.base import WeightReport
from training_core.rollout.scripted import ScriptedEngine


def test_an_engine_with_stale_weights_stops_the_training(tiny_checkpoint: Path, rl_stage: Any) -> None:
    def stale(report: WeightReport) -> WeightReport:
        return replace(report, version=0)

    trainer = build_trainer(
        tiny_checkpoint, rl_stage.prompts, rl_stage.config(), ScriptedEngine(answers_of, [], misreport=stale)
    )
    trainer.train_step(1)
    with pytest.raises(WeightVersionError, match="trainer expects version 1"):
        trainer.train_step(2)


def test_a_sampler_with_other_probabilities_stops_the_training(tiny_checkpoint: Path, rl_stage: Any) -> None:
    engine = ScriptedEngine(lambda request: answers_of(request, logprob=-1.0), [])
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, rl_stage.config(), engine)
    with pytest.raises(WeightVersionError, match="disagree"):
        trainer.train_step(1)


def test_a_policy_that_is_not_the_reference_at_the_start_is_refused(tiny_checkpoint: Path, rl_stage: Any) -> None:
    trainer = build_trainer(
        tiny_checkpoint, rl_stage.prompts, rl_stage.config(kl=KLS["k2"]), ScriptedEngine(answers_of, [])
    )
    with torch.no_grad():
        trainer.updater.policy.lm_head.weight.mul_(1.3)
    with pytest.raises(ArtifactError, match="must be 0"):
        trainer.train_step(1)


def test_a_loss_that_is_not_finite_stops_before_any_update(tiny_checkpoint: Path, rl_stage: Any) -> None:
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, rl_stage.config(), ScriptedEngine(answers_of, []))
    trainer.updater._is_first = False
    with torch.no_grad():
        trainer.updater.policy.model.norm.weight.fill_(math.nan)
    with pytest.raises(TrainingDivergedError, match="the loss is nan; no update was made from it"):
        trainer.updater.update(1, scored_batch(trainer), 0.0)


def test_a_model_with_a_soft_cap_on_its_logits_is_refused(tiny_checkpoint: Path, rl_stage: Any) -> None:
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, rl_stage.config(), ScriptedEngine(answers_of, []))
    trainer.updater.policy.lm_head.register_forward_hook(lambda module, inputs, output: 5.0 * torch.tanh(3.0 * output))
    with pytest.raises(ConfigurationError, match="soft cap"):
        trainer.train_step(1)
