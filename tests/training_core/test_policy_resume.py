"""What a resumed training must find again: the KL coefficient, the reference, the prompts and the critic it had."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_tasks import build_small_checkpoint, small_config

from training_core.errors import ArtifactError
from training_core.metrics import read_metrics
from training_core.rl import stage
from training_core.rl.trainer import CRITIC_FOLDER, PolicyTrainer

TARGET_NATS, HORIZON_ANSWERS, NUM_ANSWERS = 0.5, 100, 32
ADAPTIVE = {
    "placement": "reward",
    "coefficient": 0.1,
    "controller": {"kind": "adaptive", "target_nats": TARGET_NATS, "horizon_answers": HORIZON_ANSWERS},
}
CRITIC = {"initialise_from": "policy", "optimizer": {"learning_rate": 1e-2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_checkpoint(tmp_path_factory.mktemp("small"))


class KilledError(BaseException):
    """What a kill looks like from inside."""


@pytest.fixture(scope="module")
def runs(model: Path, rl_stage: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """Return a whole run, what a kill in its third step left (checkpoint: step 2), and the config."""
    path = tmp_path_factory.mktemp("runs")
    config = small_config(
        rl_stage, name="ppo", kl=ADAPTIVE, critic=CRITIC, num_steps=5, checkpoint_every_steps=2, keep_last_checkpoints=9
    )
    rl_stage.run(path / "whole", model, config)
    original = PolicyTrainer.train_step

    def killing(self: PolicyTrainer, step: int) -> Any:
        record = original(self, step)
        if step == 3:
            raise KilledError
        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolicyTrainer, "train_step", killing)
        with pytest.raises(KilledError):
            rl_stage.run(path / "killed", model, config)
    return path / "whole", path / "killed", config


@pytest.fixture
def left(runs: tuple[Path, Path, Any], tmp_path: Path) -> Path:
    """Return a copy of what the kill left."""
    return Path(shutil.copytree(runs[1], tmp_path / "left"))


def test_the_coefficient_follows_the_measured_kl(runs: tuple[Path, Path, Any]) -> None:
    """Down while the policy is near the reference, up when it is too far: the formula by hand, step after step."""
    rows = read_metrics(runs[0] / "metrics.jsonl")
    expected, directions = 0.1, set()
    for row in rows:
        assert row["kl/coefficient"] == pytest.approx(expected, rel=1e-12)
        error = min(max(row["kl/policy_ref_answer_nats"] / TARGET_NATS - 1.0, -0.2), 0.2)
        directions.add(error > 0.0)
        expected *= 1.0 + error * NUM_ANSWERS / HORIZON_ANSWERS
    assert directions == {True, False}
    state = json.loads((runs[0] / "checkpoints" / "step_000005" / "state.json").read_text())
    assert state["kl_coefficient"] == pytest.approx(expected, rel=1e-12)


def test_the_coefficient_survives_a_kill(runs: tuple[Path, Path, Any], left: Path, model: Path, rl_stage: Any) -> None:
    """Fault 10."""
    rl_stage.run(left, model, runs[2])
    assert read_metrics(left / "metrics.jsonl")[2]["kl/coefficient"] != 0.1
    assert (left / "metrics.jsonl").read_bytes() == (runs[0] / "metrics.jsonl").read_bytes()


def test_a_fixed_coefficient_stays(model: Path, rl_stage: Any, tmp_path: Path) -> None:
    rl_stage.run(tmp_path, model, small_config(rl_stage, kl={"placement": "reward", "coefficient": 0.1}, num_steps=2))
    assert {row["kl/coefficient"] for row in read_metrics(tmp_path / "metrics.jsonl")} == {0.1}


def test_another_reference_is_refused(
    runs: tuple[Path, Path, Any], left: Path, model: Path, rl_stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 11: the anchor of the KL is the checkpoint that the run started from."""
    monkeypatch.setattr(stage, "weights_digest", lambda path: "1" * 64)
    with pytest.raises(ArtifactError, match=r"another checkpoint.*reference_sha256 is '.*' there and '1111"):
        rl_stage.run(left, model, runs[2])


def test_other_prompts_are_refused(
    runs: tuple[Path, Path, Any], left: Path, model: Path, rl_stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 13: step 3 of other prompts is not step 3 of these. A prompt less, and the order moves."""
    original = stage.load_prompts

    def fewer(*arguments: Any) -> Any:
        found = original(*arguments)
        return stage.Prompts(found.rows[1:], found.token_ids[1:])

    monkeypatch.setattr(stage, "load_prompts", fewer)
    with pytest.raises(ArtifactError, match=r"on other prompts.*prompts_sha256"):
        rl_stage.run(left, model, runs[2])


@pytest.mark.parametrize("name", ["", "exp_avg.safetensors", "weights.safetensors"])
def test_a_missing_critic_is_refused(
    runs: tuple[Path, Path, Any], left: Path, model: Path, rl_stage: Any, name: str
) -> None:
    """Fault 12: training would go on with a fresh critic, or fresh moments of it."""
    checkpoint = left / "checkpoints" / "step_000002"
    path = checkpoint / CRITIC_FOLDER / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ArtifactError, match="checkpoint"):
        rl_stage.run(left, model, runs[2])
    assert [row["step"] for row in read_metrics(left / "metrics.jsonl")] == [1, 2]
