"""Every algorithm that samples trains on the tiny model, and continues to the same bits after a kill."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from training_core.config.algorithms import OnlineAlgorithm
from training_core.metrics import read_metrics
from training_core.rl.trainer import PolicyTrainer

CRITIC = {"initialise_from": "policy", "optimizer": {"learning_rate": 1e-3}}
REPLAY = {"capacity_groups": 6, "groups_per_step": 2, "sampling": {"kind": "prioritised"}}
ADAPTIVE = {
    "placement": "reward",
    "coefficient": 0.1,
    "controller": {"kind": "adaptive", "target_nats": 0.5, "horizon_answers": 16},
}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "dr_grpo": {"name": "dr_grpo"},
    "rloo": {"name": "rloo", "kl": {"placement": "reward", "coefficient": 0.1}},
    "reinforce_plus_plus": {"name": "reinforce_plus_plus", "kl": {"placement": "reward", "coefficient": 0.1}},
    "reinforce_plus_plus_baseline": {"name": "reinforce_plus_plus_baseline", "num_epochs": 2},
    "remax": {"name": "remax", "group_size": 2},
    "dapo": {"name": "dapo", "num_minibatches": 2},
    "gspo": {"name": "gspo", "num_minibatches": 2},
    "gspo_token": {"name": "gspo", "loss": {"kind": "gspo_token"}, "num_minibatches": 2},
    "cispo": {"name": "cispo", "num_epochs": 2},
    "sapo": {"name": "sapo", "num_epochs": 2},
    "ppo": {"name": "ppo", "group_size": 4, "num_epochs": 2, "num_minibatches": 2, "critic": CRITIC, "kl": ADAPTIVE},
    "replay": {"name": "grpo", "replay": REPLAY},
    "corrected": {"name": "grpo", "importance_correction": {"mode": "truncate"}, "entropy_coefficient": 0.01},
    "masked": {"name": "grpo", "importance_correction": {"mode": "mask", "level": "sequence"}},
    "custom": {
        "name": "custom",
        "advantage": {"kind": "leave_one_out"},
        "loss": {"kind": "importance_weighted"},
        "aggregation": {"kind": "prompt_mean"},
    },
}


def test_every_name_is_among_the_cases() -> None:
    names = {get_args(variant.model_fields["name"].annotation)[0] for variant in get_args(OnlineAlgorithm)}
    assert {case["name"] for case in CASES.values()} == names


class KilledError(BaseException):
    """What a kill looks like from inside."""


@pytest.mark.parametrize("case", list(CASES))
def test_it_trains_and_continues_to_the_same_bits(
    tiny_checkpoint: Path, rl_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    config = rl_stage.config(**{"num_steps": 3, "checkpoint_every_steps": 1, **CASES[case]})
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    summary = rl_stage.run(whole, tiny_checkpoint, config)
    assert summary["weights_sha256"] != summary["reference_weights_sha256"]
    original = PolicyTrainer.train_step

    def killing(self: PolicyTrainer, step: int) -> Any:
        record = original(self, step)
        if step == 2:
            shutil.copytree(killed, tmp_path / "left")
            raise KilledError
        return record

    with monkeypatch.context() as patch:
        patch.setattr(PolicyTrainer, "train_step", killing)
        with pytest.raises(KilledError):
            rl_stage.run(killed, tiny_checkpoint, config)
    left = tmp_path / "left"
    assert rl_stage.run(left, tiny_checkpoint, config) == summary
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (left / name).read_bytes() == (whole / name).read_bytes()
    rows = read_metrics(whole / "metrics.jsonl")
    assert len(rows) == 3
    assert all(row["reward/mean"] is not None for row in rows)
