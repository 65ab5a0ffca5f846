"""Every algorithm that samples learns a small verifiable task from a fixed seed, to a score that is stated here.

The task: answers of four tokens with low ids, half of which an untrained policy gives by chance. (That preference
training learns is shown on held-out pairs in test_preference_stage.py, for every loss.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
from small_tasks import build_small_checkpoint, small_config

from training_core.config.algorithms import OnlineAlgorithm
from training_core.metrics import read_metrics

CHANCE = 0.5
NOISE = 0.15
"""Over three standard errors of a step's mean at chance: 32 answers of 4 tokens."""
CRITIC = {"initialise_from": "policy", "optimizer": {"learning_rate": 1e-2}}


@dataclass(frozen=True)
class Case:
    """An algorithm with what the task asks of its knobs, and what it reaches."""

    options: dict[str, Any]
    score: float = 0.9
    """Mean reward of the last three steps. All but ReMax reach 0.95 or more."""


CASES = {
    "grpo": Case({"name": "grpo"}),
    "dr_grpo": Case({"name": "dr_grpo"}),
    "rloo": Case({"name": "rloo"}),
    "reinforce_plus_plus": Case({"name": "reinforce_plus_plus", "kl": {"placement": "reward", "coefficient": 0.01}}),
    "reinforce_plus_plus_baseline": Case({"name": "reinforce_plus_plus_baseline"}),
    # One greedy answer is a noisier baseline than seven sampled ones: it learns half as fast here.
    "remax": Case({"name": "remax", "num_steps": 16}, score=0.7),
    # Every answer of this task is cut by the token limit; DAPO's default would leave them all out.
    "dapo": Case({"name": "dapo", "mask_truncated": False}),
    "gspo": Case({"name": "gspo"}),
    "gspo_token": Case({"name": "gspo", "loss": {"kind": "gspo_token"}, "num_minibatches": 2}),
    "cispo": Case({"name": "cispo", "num_epochs": 2}),
    "sapo": Case({"name": "sapo", "num_epochs": 2}),
    "ppo": Case({"name": "ppo", "num_epochs": 2, "critic": CRITIC}),
    "custom": Case(
        {
            "name": "custom",
            "advantage": {"kind": "leave_one_out"},
            "loss": {"kind": "importance_weighted"},
            "aggregation": {"kind": "prompt_mean"},
        }
    ),
}


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_checkpoint(tmp_path_factory.mktemp("small"))


def rewards_of(path: Path, model: Path, rl_stage: Any, **options: Any) -> list[float]:
    """Train; return the mean reward of each step."""
    rl_stage.run(path, model, small_config(rl_stage, **options))
    return [row["reward/mean"] for row in read_metrics(path / "metrics.jsonl")]


def test_every_algorithm_is_among_the_cases() -> None:
    names = {get_args(variant.model_fields["name"].annotation)[0] for variant in get_args(OnlineAlgorithm)}
    assert {case.options["name"] for case in CASES.values()} == names


@pytest.mark.parametrize("name", list(CASES))
def test_it_learns(small_checkpoint: Path, rl_stage: Any, tmp_path: Path, name: str) -> None:
    rewards = rewards_of(tmp_path, small_checkpoint, rl_stage, **CASES[name].options)
    assert abs(rewards[0] - CHANCE) < NOISE
    assert sum(rewards[-3:]) / 3 >= CASES[name].score


@pytest.mark.parametrize("name", ["grpo", "ppo", "remax"])
def test_without_a_learning_rate_it_stays_at_chance(
    small_checkpoint: Path, rl_stage: Any, tmp_path: Path, name: str
) -> None:
    """The task does not solve itself: the same runs, their weights left alone, would fail the test above."""
    options = {**CASES[name].options, "optimizer": {"learning_rate": 0.0}}
    rewards = rewards_of(tmp_path, small_checkpoint, rl_stage, **options)
    assert all(abs(reward - CHANCE) < NOISE for reward in rewards)
    assert sum(rewards[-3:]) / 3 < CASES[name].score
