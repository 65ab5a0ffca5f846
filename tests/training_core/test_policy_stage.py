"""The policy stage on the tiny model: exact resume, stops, learning rate 0, every KL choice, bad configs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_trainers import KLS
from pydantic import ValidationError

from training_core.config.algorithms import PolicyStageConfig
from training_core.errors import PreemptedError
from training_core.metrics import read_metrics
from training_core.models.loading import load_tokenizer, pad_token_id
from training_core.protocol.digests import weights_digest
from training_core.records import Message, PromptRow
from training_core.rl.sampling import Sampler
from training_core.rl.stage import load_prompts
from training_core.rl.trainer import PolicyTrainer
from training_core.rl.update import PolicyUpdater
from training_core.rollout.transformers import TransformersEngine
from training_core.stages import policy as policy_stage


@pytest.mark.parametrize("kl", list(KLS))
def test_every_kl_choice_trains_and_starts_at_zero(
    tiny_checkpoint: Path, rl_stage: Any, tmp_path: Path, kl: str
) -> None:
    summary = rl_stage.run(tmp_path, tiny_checkpoint, rl_stage.config(kl=KLS[kl], num_steps=2, autocast="bfloat16"))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert summary["weights_sha256"] != summary["reference_weights_sha256"]
    if kl == "none":
        assert not any(name.startswith("kl/") for name in rows[0])
    else:
        assert rows[0]["kl/policy_ref_nats"] == 0.0
        assert rows[1]["kl/policy_ref_nats"] > 0.0


def test_several_updates_per_rollout_clip_and_start_at_ratio_one(
    tiny_checkpoint: Path, rl_stage: Any, tmp_path: Path
) -> None:
    config = rl_stage.config(
        num_epochs=2, num_minibatches=2, optimizer={"learning_rate": 1e-2}, loss={"clip_low": 0.01, "clip_high": 0.01}
    )
    rl_stage.run(tmp_path, tiny_checkpoint, config)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[0]["train/num_updates"] == 4
    assert rows[0]["policy/clip_fraction"] > 0
    assert rows[0]["policy/ratio_mean"] != 1.0
    assert rows[0]["rollout/sampler_trainer_kl_nats"] < 1e-6


def test_learning_rate_zero_gives_the_reference_back(tiny_checkpoint: Path, rl_stage: Any, tmp_path: Path) -> None:
    config = rl_stage.config(optimizer={"learning_rate": 0.0, "weight_decay": 0.1}, autocast="bfloat16")
    summary = rl_stage.run(tmp_path, tiny_checkpoint, config)
    assert summary["weights_sha256"] == summary["reference_weights_sha256"] == weights_digest(tiny_checkpoint)


def test_learning_rate_zero_gives_a_bfloat16_reference_back(rl_stage: Any, tmp_path: Path) -> None:
    from training_core.models.tiny import build_tiny_checkpoint

    model = build_tiny_checkpoint(tmp_path / "model", seed=1, dtype=torch.bfloat16)
    config = rl_stage.config(optimizer={"learning_rate": 0.0}, num_steps=1)
    summary = rl_stage.run(tmp_path / "stage", model, config)
    assert summary["weights_sha256"] == summary["reference_weights_sha256"]


REPLAY = {"capacity_groups": 4, "groups_per_step": 1}
CRITIC = {"initialise_from": "policy", "optimizer": {"learning_rate": 1e-3}}
ADAPTIVE: dict[str, Any] = {
    "placement": "reward",
    "coefficient": 0.1,
    "controller": {"kind": "adaptive", "target_nats": 1.0, "horizon_answers": 7},
}
KILL_POINTS = {
    "first step": ("score", 1),
    "after a checkpoint": ("score", 4),
    "while saving": ("save", 2),
    "within an update": ("micro_loss", 9),
}
"""Name -> (method, number of its call) within the training of `whole_run`."""


@dataclass(frozen=True)
class WholeRun:
    """A training that nothing stopped."""

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    kills: Path
    """Holds, for each kill point, the stage directory as it was on the disk at that moment."""


@pytest.fixture(scope="module")
def whole_run(tiny_checkpoint: Path, rl_stage: Any, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    path, kills = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("kills")
    config = rl_stage.config(num_steps=4, num_epochs=2, kl=KLS["k3_ratio"], autocast="bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        for method in ("score", "save", "micro_loss"):
            copy_at_kill_points(patch, method, path, kills)
        summary = rl_stage.run(path, tiny_checkpoint, config)
    return WholeRun(path, config, summary, kills)


def copy_at_kill_points(patch: pytest.MonkeyPatch, method: str, path: Path, kills: Path) -> None:
    """Copy directory `path` whenever a call of `method` is a kill point: this is what a SIGKILL there would leave."""
    owner: Any = next(owner for owner in (Sampler, PolicyTrainer, PolicyUpdater) if hasattr(owner, method))
    original, calls = getattr(owner, method), []

    def copying(self: Any, *arguments: Any, **keywords: Any) -> Any:
        calls.append(None)
        result = original(self, *arguments, **keywords)
        for name, point in KILL_POINTS.items():
            if point == (method, len(calls)):
                shutil.copytree(path, kills / name)
        return result

    patch.setattr(owner, method, copying)


@pytest.mark.parametrize("kill_point", list(KILL_POINTS))
def test_killed_and_continued_equals_never_killed(
    tiny_checkpoint: Path, rl_stage: Any, whole_run: WholeRun, kill_point: str
) -> None:
    killed = whole_run.kills / kill_point
    assert not (killed / "outputs" / "policy").exists()
    assert rl_stage.run(killed, tiny_checkpoint, whole_run.config) == whole_run.summary
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (killed / name).read_bytes() == (whole_run.path / name).read_bytes()


@pytest.mark.parametrize("phase", ["generate", "score", "micro_loss"])
def test_a_stop_gives_up_the_step_and_the_next_run_does_it_again(
    tiny_checkpoint: Path, rl_stage: Any, tmp_path: Path, whole_run: WholeRun, phase: str
) -> None:
    context = rl_stage.context(tmp_path, tiny_checkpoint, whole_run.config)
    owner: Any = {"generate": TransformersEngine, "score": Sampler, "micro_loss": PolicyUpdater}[phase]
    original = getattr(owner, phase)

    def stopping(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if len(read_metrics(context.directory.metrics_path)) == 1:
            context.stop.requested = True
        return original(self, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, phase, stopping)
        with pytest.raises(PreemptedError, match="after step 1"):
            policy_stage.run(context)
    latest = context.checkpoints().latest()
    assert latest is not None
    assert latest.step == 1
    assert rl_stage.run(tmp_path, tiny_checkpoint, whole_run.config) == whole_run.summary
    assert (tmp_path / "metrics.jsonl").read_bytes() == (whole_run.path / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"kl": {"placement": "loss", "coefficient": 0.1, "estimator": "k1"}}, "expected gradient of zero"),
        ({"kl": {"placement": "loss", "coefficient": 0.1, "estimator": "k3"}}, "forward KL"),
        ({"kl": {"placement": "loss", "coefficient": 0.1, "objective": "forward"}}, "takes k3"),
        ({"kl": {"placement": "none", "coefficient": 0.1}}, "Extra inputs"),
        ({"num_minibatches": 3}, "groups are not split"),
        ({"num_minibatches": 2, "kl": {"placement": "loss", "coefficient": 0.1}}, "estimator: k3_ratio"),
        ({"num_epochs": 2, "kl": {"placement": "loss", "coefficient": 0.1, "estimator": "k2"}}, "makes 2"),
        ({"group_size": 1}, "Write at least 2"),
        ({"optimizer": {"learning_rate": "1e-6"}}, "valid number"),
        ({"value_loss_coefficient": 0.1}, "Extra inputs"),
        ({"replay": REPLAY, "kl": {"placement": "loss", "coefficient": 0.1}}, "replay brings answers of older weights"),
        ({"name": "rloo", "replay": REPLAY}, "replay brings answers of older weights"),
        ({"name": "ppo", "critic": CRITIC, "replay": REPLAY}, "leave replay out"),
        ({"name": "remax", "group_size": 2, "dynamic_sampling": {}}, "they teach something"),
        ({"name": "dapo", "kl": {"placement": "reward", "coefficient": 0.1}}, "KL in the reward would still count"),
        ({"kl": {**ADAPTIVE, "controller": {**ADAPTIVE["controller"], "horizon_answers": 1}}}, "could reach 0"),
        ({"name": "gspo", "importance_correction": {"mode": "truncate"}}, "level: sequence"),
        ({"name": "ppo", "critic": {**CRITIC, "warmup_steps": 3}}, "would never learn"),
        ({"name": "ppo", "critic": CRITIC, "kl": KLS["reward"], "advantage": {"discount": 0.9}}, "discount: 1.0"),
        ({"name": "reinforce_plus_plus", "group_size": 1, "prompts_per_step": 1}, "whitened alone is 0"),
        ({"name": "custom", "advantage": {"kind": "gae"}, "loss": {"kind": "reinforce"}}, "give `critic`"),
        (
            {
                "name": "custom",
                "advantage": {"kind": "leave_one_out"},
                "loss": {"kind": "reinforce"},
                "critic": CRITIC,
            },
            "reads no values",
        ),
        (
            {
                "name": "custom",
                "advantage": {"kind": "gae"},
                "loss": {"kind": "gspo"},
                "critic": CRITIC,
            },
            "one ratio for an answer",
        ),
        ({"lora": {}, "experts": {}}, "take no adapter"),
        ({"sentinels": {"kl_budget": {"limit_nats_per_token": 1.0}}}, "no KL is measured"),
        ({"sentinels": {"proxy_up_gold_down": {"gold": "nosuch"}}}, "none of the rewards"),
        (
            {
                "sentinels": {
                    "grad_norm": {"action": "roll_back"},
                    "roll_back": {"learning_rate_factor": 1.0},
                }
            },
            "there is no KL",
        ),
    ],
)
def test_bad_configs_are_refused(rl_stage: Any, algorithm: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PolicyStageConfig.model_validate(rl_stage.config(**algorithm))


def test_several_updates_take_the_kl_terms_that_say_what_they_do(rl_stage: Any) -> None:
    for kl in ("none", "reward", "k3_ratio", "forward"):
        config = rl_stage.config(num_epochs=2, num_minibatches=2, kl=KLS[kl])
        assert PolicyStageConfig.model_validate(config).algorithm.updates_per_step == 4
    assert PolicyStageConfig.model_validate(rl_stage.config(kl=KLS["k2"])).algorithm.updates_per_step == 1


def test_tokenizers_without_a_pad_token_are_padded_with_zero(tiny_checkpoint: Path) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    assert pad_token_id(tokenizer) == tokenizer.pad_token_id
    tokenizer.pad_token = None
    assert pad_token_id(tokenizer) == 0


def test_samples_hold_prompt_answer_and_scores(tiny_checkpoint: Path, rl_stage: Any, tmp_path: Path) -> None:
    rl_stage.run(tmp_path, tiny_checkpoint, rl_stage.config(samples_every_steps=2))
    rows = read_metrics(tmp_path / "samples.jsonl")
    assert [row["step"] for row in rows] == [1, 1, 2, 2]
    assert rows[0]["prompt"].startswith("Write about")
    assert {"answer", "num_tokens", "stop_reason", "reward", "reward_regex", "reward_length"} <= set(rows[0])


def test_message_records_are_what_prompts_hold(tiny_checkpoint: Path, rl_stage: Any) -> None:
    prompts = load_prompts(rl_stage.prompts, load_tokenizer(tiny_checkpoint))
    assert isinstance(prompts.rows[0], PromptRow)
    assert prompts.rows[0].prompt == [Message(role="user", content="Write about the sea.")]
