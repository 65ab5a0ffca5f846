"""GRPO on the tiny model: split invariance, exact resume, learning rate 0, KL placements, stops, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError

from training_core.config.algorithms import GrpoStageConfig
from training_core.errors import (
    ArtifactError,
    EvaluationError,
    PreemptedError,
    TrainingDivergedError,
    WeightVersionError,
)
from training_core.loop import StepAbandonedError
from training_core.metrics import MetricSums, read_metrics
from training_core.models.loading import load_causal_lm, load_tokenizer
from training_core.protocol.context import StageContext
from training_core.protocol.digests import path_digest, weights_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, Message, PromptRow, StageSpec
from training_core.registries import REWARD_RULES
from training_core.rewards.combine import RewardPart
from training_core.rollout.base import SamplingSettings, WeightReport
from training_core.rollout.scripted import ScriptedEngine
from training_core.stages import grpo
from training_core.stages.grpo import build_optimizer, load_prompts, load_reference, pad_token_id
from training_core.stages.grpo_step import GrpoTrainer
from training_core.stages.grpo_update import GrpoUpdater, ScoredBatch

TOPICS = ("the sea", "a cat and a dog", "bread", "a train", "an old book")
SEED = 3


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.fixture(scope="module")
def prompts_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "rl_prompts.parquet"
    messages = [[{"role": "user", "content": f"Write about {topic}."}] for topic in TOPICS]
    names = [f"p{i}" for i in range(len(TOPICS))]
    pq.write_table(
        pa.table({"prompt_id": names, "group_id": names, "prompt_messages": messages, "extra": ["{}"] * len(names)}),
        path,
    )
    return path


def stage_config(rewards: list[dict[str, Any]] | None = None, **algorithm: Any) -> dict[str, Any]:
    base = {
        "name": "grpo",
        "num_steps": 3,
        "prompts_per_step": 2,
        "group_size": 4,
        "micro_batch_size": 3,
        "optimizer": {"learning_rate": 1e-3},
        "autocast": "none",
        "checkpoint_every_steps": 2,
    }
    rollout = {"engine": "transformers", "dtype": "float32", "max_new_tokens": 8}
    rewards = rewards or [
        {"kind": "regex", "pattern": "[aeiou]{2}"},
        {"kind": "length", "max_tokens": 5, "weight": 0.5},
    ]
    return {"algorithm": {**base, **algorithm}, "rollout": rollout, "rewards": rewards}


def new_context(path: Path, model: Path, prompts: Path, config: dict[str, Any]) -> StageContext:
    resolved = GrpoStageConfig.model_validate(config).model_dump(mode="json")
    inputs = {
        "model": Artifact(path=str(model), sha256=path_digest(model)),
        "rl_prompts": Artifact(path=str(prompts), sha256=path_digest(prompts)),
    }
    spec = StageSpec(stage="grpo", stage_version=1, config=resolved, inputs=inputs, seed=SEED)
    directory = StageDirectory(path)
    directory.prepare(spec)
    return StageContext(spec, directory)


def run_stage(path: Path, model: Path, prompts: Path, config: dict[str, Any]) -> dict[str, Any]:
    return grpo.run(new_context(path, model, prompts, config)).summary


def build_updater(model: Path, config: dict[str, Any], **changes: Any) -> GrpoUpdater:
    algorithm = GrpoStageConfig.model_validate(config).algorithm
    policy = load_causal_lm(model)
    settings: dict[str, Any] = {"temperature": 1.0, "pad_token_id": 0, "seed": SEED, "should_stop": lambda: False}
    return GrpoUpdater(
        algorithm,
        policy,
        load_reference(algorithm, model, torch.device("cpu")),
        build_optimizer(algorithm, policy),
        **{**settings, **changes},
    )


def build_trainer(
    model: Path, prompts: Path, config: dict[str, Any], engine: ScriptedEngine, **changes: Any
) -> GrpoTrainer:
    parsed = GrpoStageConfig.model_validate(config)
    tokenizer = load_tokenizer(model)
    rewards = [RewardPart(r.part_name, r.weight, REWARD_RULES[r.kind](r)) for r in parsed.rewards]
    updater = build_updater(model, config, **changes)
    sampling = SamplingSettings(parsed.rollout.max_new_tokens)
    return GrpoTrainer(updater, engine, sampling, rewards, tokenizer, load_prompts(prompts, tokenizer), "0" * 64)


def answers_of(request: Any, logprob: float = -math.log(512)) -> tuple[list[int], list[float]]:
    """Answers of 1 to 4 tokens, different within a group, with the log-prob of an untrained model."""
    length = 1 + (request.seed % 4)
    return [300 + (request.seed * 7 + t) % 150 for t in range(length)], [logprob] * length


def scored_batch(trainer: GrpoTrainer, step: int = 1) -> ScoredBatch:
    from training_core.rollout.batch import build_batch

    requests, _ = trainer.make_requests(step)
    rollouts = trainer.sampler.generate(requests, trainer.sampling)
    generator = torch.Generator().manual_seed(step)
    scores = torch.randn(len(requests), generator=generator, dtype=torch.float64)
    everything = torch.ones(len(requests), dtype=torch.bool)
    return ScoredBatch(build_batch(requests, rollouts), scores, everything, ~everything)


KLS: dict[str, dict[str, Any]] = {
    "none": {"placement": "none"},
    "measured": {"placement": "none", "measure": True},
    "reward": {"placement": "reward", "coefficient": 0.1},
    "k2": {"placement": "loss", "coefficient": 0.1},
    "k3_ratio": {"placement": "loss", "coefficient": 0.1, "estimator": "k3_ratio"},
    "forward": {"placement": "loss", "coefficient": 0.1, "estimator": "k3", "objective": "forward"},
}
AGGREGATIONS = [
    {"kind": "token_mean"},
    {"kind": "sequence_mean_token_mean"},
    {"kind": "sequence_mean_token_sum"},
    {"kind": "constant", "num_tokens": 8},
]


def gradients_after(updater: GrpoUpdater, scored: ScoredBatch) -> dict[str, torch.Tensor]:
    """Return the gradients that one update would step with."""
    caught: dict[str, torch.Tensor] = {}

    def catch(step: int) -> Any:
        caught.update({name: p.grad.double() for name, p in updater.policy.named_parameters() if p.grad is not None})
        raise StepAbandonedError

    updater.optimizer.step = catch  # type: ignore[method-assign]
    with pytest.raises(StepAbandonedError):
        updater.update(2, scored)
    return caught


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: a["kind"])
@pytest.mark.parametrize("kl", ["none", "k2"])
def test_gradients_do_not_depend_on_how_answers_are_batched(
    tiny_checkpoint: Path, prompts_path: Path, aggregation: dict[str, Any], kl: str
) -> None:
    found = []
    for size, share_prompt in ((8, False), (3, False), (1, False), (8, True), (3, True)):
        config = stage_config(
            micro_batch_size=size,
            share_prompt=share_prompt,
            aggregation=aggregation,
            kl=KLS[kl],
            mask_truncated=True,
        )
        engine = ScriptedEngine(answers_of, [])
        trainer = build_trainer(tiny_checkpoint, prompts_path, config, engine)
        scored = scored_batch(trainer)
        truncated = torch.arange(len(scored.batch)) % 3 == 0
        # Some missing scores and some truncated answers: numerators and denominators must leave out the same ones.
        present = torch.arange(len(scored.batch)) != 4
        found.append(gradients_after(trainer.updater, replace(scored, present=present, is_truncated=truncated)))
    for other in found[1:]:
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=2e-4, atol=2e-6)


def test_answers_without_signal_change_no_gradient(
    tiny_checkpoint: Path, prompts_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipping them is exact: the same gradient as when every answer goes through the model."""
    found = []
    for skip in (True, False):
        trainer = build_trainer(tiny_checkpoint, prompts_path, stage_config(), ScriptedEngine(answers_of, []))
        scored = scored_batch(trainer)
        scores = scored.scores.clone()
        scores[:4] = 0.7
        if not skip:
            monkeypatch.setattr(GrpoUpdater, "has_signal", lambda self, signal, row: bool(signal.mask[row].any()))
        found.append(gradients_after(trainer.updater, replace(scored, scores=scores)))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=2e-4, atol=2e-6)


def test_a_step_without_any_signal_leaves_the_weights_alone(tiny_checkpoint: Path, prompts_path: Path) -> None:
    trainer = build_trainer(tiny_checkpoint, prompts_path, stage_config(), ScriptedEngine(answers_of, []))
    before = {name: p.detach().clone() for name, p in trainer.updater.policy.named_parameters()}
    scored = scored_batch(trainer)
    metrics = trainer.updater.update(1, replace(scored, scores=torch.full_like(scored.scores, 0.7)))
    assert metrics == {"rollout/zero_variance_group_fraction": 1.0, "train/num_updates": 0}
    for name, parameter in trainer.updater.policy.named_parameters():
        assert torch.equal(parameter, before[name])


def test_one_step_equals_a_slow_loop(tiny_checkpoint: Path, prompts_path: Path) -> None:
    """The gradient against a plain loop over answers with full logits and no tricks."""
    config = stage_config(advantage="group_centred", aggregation={"kind": "sequence_mean_token_mean"}, kl=KLS["k2"])
    trainer = build_trainer(tiny_checkpoint, prompts_path, config, ScriptedEngine(answers_of, []), temperature=0.7)
    scored = scored_batch(trainer)
    with torch.no_grad():
        trainer.updater.policy.lm_head.weight.mul_(1.1)
    found = gradients_after(trainer.updater, scored)
    model, reference = load_causal_lm(tiny_checkpoint), load_causal_lm(tiny_checkpoint)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.1)
    total = torch.zeros(())
    for row in range(len(scored.batch)):
        prompt, answer = scored.batch.prompts[row], scored.batch.answers[row]
        group = scored.scores[row // 4 * 4 : row // 4 * 4 + 4]
        advantage = float(scored.scores[row] - group.mean())
        ids = torch.tensor([[*prompt, *answer]])
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0] / 0.7, dim=-1)
        with torch.no_grad():
            reference_logprobs = torch.log_softmax(reference(input_ids=ids).logits[0] / 0.7, dim=-1)
        for t, token in enumerate(answer):
            position = len(prompt) + t - 1
            logp = logprobs[position, token]
            term = -advantage * (logp - logp.detach()).exp()
            term = term + 0.1 * 0.5 * (logp - reference_logprobs[position, token]) ** 2
            total = total + term / len(answer) / len(scored.batch)
    total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad.double(), rtol=2e-3, atol=2e-6)


def test_the_kl_in_the_reward_is_subtracted_from_the_score(tiny_checkpoint: Path, prompts_path: Path) -> None:
    """With equal scores, the advantage is minus the coefficient times the centred sum of k1 of the answer."""
    config = stage_config(advantage="group_centred", kl=KLS["reward"])
    trainer = build_trainer(tiny_checkpoint, prompts_path, config, ScriptedEngine(answers_of, []))
    updater = trainer.updater
    with torch.no_grad():
        updater.policy.lm_head.weight.mul_(1.2)
    scored = scored_batch(trainer)
    scored = replace(scored, scores=torch.zeros_like(scored.scores))
    old, reference = updater.logprobs_before(scored.batch)
    assert old is not None
    assert reference is not None
    answer_kl = torch.where(scored.batch.mask, old - reference, 0.0).sum(dim=1).double().reshape(2, 4)
    expected = (-0.1 * (answer_kl - answer_kl.mean(dim=1, keepdim=True))).flatten().float()
    seen = []
    original = updater.optimizer_update

    def spy(step: int, number: int, rows: Any, signal: Any, sums: MetricSums) -> Any:
        seen.append(signal.advantages)
        return original(step, number, rows, signal, sums)

    updater.optimizer_update = spy  # type: ignore[method-assign]
    updater.update(2, scored)
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kl", list(KLS))
def test_every_kl_choice_trains_and_starts_at_zero(
    tiny_checkpoint: Path, prompts_path: Path, tmp_path: Path, kl: str
) -> None:
    summary = run_stage(
        tmp_path, tiny_checkpoint, prompts_path, stage_config(kl=KLS[kl], num_steps=2, autocast="bfloat16")
    )
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert summary["weights_sha256"] != summary["reference_weights_sha256"]
    if kl == "none":
        assert not any(name.startswith("kl/") for name in rows[0])
    else:
        assert rows[0]["kl/policy_ref_nats"] == 0.0
        assert rows[1]["kl/policy_ref_nats"] > 0.0


def test_several_updates_per_rollout_clip_and_start_at_ratio_one(
    tiny_checkpoint: Path, prompts_path: Path, tmp_path: Path
) -> None:
    config = stage_config(
        num_epochs=2, num_minibatches=2, optimizer={"learning_rate": 1e-2}, clip_low=0.01, clip_high=0.01
    )
    run_stage(tmp_path, tiny_checkpoint, prompts_path, config)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[0]["train/num_updates"] == 4
    assert rows[0]["policy/clip_fraction"] > 0
    assert rows[0]["policy/ratio_mean"] != 1.0
    assert rows[0]["rollout/sampler_trainer_kl_nats"] < 1e-6


def test_learning_rate_zero_gives_the_reference_back(tiny_checkpoint: Path, prompts_path: Path, tmp_path: Path) -> None:
    config = stage_config(optimizer={"learning_rate": 0.0, "weight_decay": 0.1}, autocast="bfloat16")
    summary = run_stage(tmp_path, tiny_checkpoint, prompts_path, config)
    assert summary["weights_sha256"] == summary["reference_weights_sha256"] == weights_digest(tiny_checkpoint)


def test_learning_rate_zero_gives_a_bfloat16_reference_back(prompts_path: Path, tmp_path: Path) -> None:
    from training_core.models.tiny import build_tiny_checkpoint

    model = build_tiny_checkpoint(tmp_path / "model", seed=1, dtype=torch.bfloat16)
    config = stage_config(optimizer={"learning_rate": 0.0}, num_steps=1)
    summary = run_stage(tmp_path / "stage", model, prompts_path, config)
    assert summary["weights_sha256"] == summary["reference_weights_sha256"]


def run_until_killed(path: Path, model: Path, prompts: Path, config: dict[str, Any], kill: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill(patch)
        with pytest.raises(Killed):
            run_stage(path, model, prompts, config)
    assert not (path / "outputs" / "policy").exists()


def kill_at_step(step: int, method: str) -> Any:
    """Return a patch under which call `step` of a trainer's method raises in place of a kill."""

    def patch_it(patch: pytest.MonkeyPatch) -> None:
        owner = GrpoTrainer if hasattr(GrpoTrainer, method) else GrpoUpdater
        original, calls = getattr(owner, method), []

        def killing(self: Any, *arguments: Any, **keywords: Any) -> Any:
            calls.append(None)
            if len(calls) == step:
                raise Killed
            return original(self, *arguments, **keywords)

        patch.setattr(owner, method, killing)

    return patch_it


@pytest.mark.parametrize(
    "kill",
    [kill_at_step(1, "score"), kill_at_step(4, "score"), kill_at_step(3, "save"), kill_at_step(9, "micro_loss")],
    ids=["first step", "after a checkpoint", "while saving", "within an update"],
)
def test_killed_and_continued_equals_never_killed(
    tiny_checkpoint: Path, prompts_path: Path, tmp_path: Path, kill: Any
) -> None:
    config = stage_config(num_steps=5, num_epochs=2, kl=KLS["k2"], autocast="bfloat16")
    whole = run_stage(tmp_path / "whole", tiny_checkpoint, prompts_path, config)
    run_until_killed(tmp_path / "killed", tiny_checkpoint, prompts_path, config, kill)
    continued = run_stage(tmp_path / "killed", tiny_checkpoint, prompts_path, config)
    assert continued == whole
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("phase", ["generate", "score", "micro_loss"])
def test_a_stop_gives_up_the_step_and_the_next_run_does_it_again(
    tiny_checkpoint: Path, prompts_path: Path, tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from training_core.rollout.transformers import TransformersEngine

    config = stage_config(num_steps=3)
    whole = run_stage(tmp_path / "whole", tiny_checkpoint, prompts_path, config)
    context = new_context(tmp_path / "stopped", tiny_checkpoint, prompts_path, config)
    owner: Any = {"generate": TransformersEngine, "score": GrpoTrainer, "micro_loss": GrpoUpdater}[phase]
    original, calls = getattr(owner, phase), []

    def stopping(self: Any, *arguments: Any, **keywords: Any) -> Any:
        calls.append(None)
        if (
            len(
                context.directory.metrics_path.read_text().splitlines()
                if context.directory.metrics_path.exists()
                else []
            )
            == 1
        ):
            context.stop.requested = True
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(owner, phase, stopping)
    with pytest.raises(PreemptedError, match="after step 1"):
        grpo.run(context)
    monkeypatch.undo()
    latest = context.checkpoints().latest()
    assert latest is not None
    assert latest.step == 1
    assert run_stage(tmp_path / "stopped", tiny_checkpoint, prompts_path, config) == whole


def test_prompts_and_seeds_are_functions_of_the_step(tiny_checkpoint: Path, prompts_path: Path) -> None:
    trainer = build_trainer(tiny_checkpoint, prompts_path, stage_config(), ScriptedEngine(answers_of, []))
    forwards = [trainer.make_requests(step)[0] for step in (1, 2, 3)]
    backwards = [trainer.make_requests(step)[0] for step in (3, 2, 1)][::-1]
    assert forwards == backwards
    seeds = [request.seed for step in forwards for request in step]
    assert len(set(seeds)) == len(seeds)
    first_epoch = [request.prompt_id for step in forwards for request in step[::4]][: len(TOPICS)]
    assert sorted(first_epoch) == sorted(f"p{i}" for i in range(len(TOPICS)))


def test_an_engine_with_stale_weights_stops_the_training(tiny_checkpoint: Path, prompts_path: Path) -> None:
    def stale(report: WeightReport) -> WeightReport:
        return replace(report, version=0)

    trainer = build_trainer(
        tiny_checkpoint, prompts_path, stage_config(), ScriptedEngine(answers_of, [], misreport=stale)
    )
    trainer.train_step(1)
    with pytest.raises(WeightVersionError, match="trainer expects version 1"):
        trainer.train_step(2)


def test_a_sampler_with_other_probabilities_stops_the_training(tiny_checkpoint: Path, prompts_path: Path) -> None:
    engine = ScriptedEngine(lambda request: answers_of(request, logprob=-1.0), [])
    trainer = build_trainer(tiny_checkpoint, prompts_path, stage_config(), engine)
    with pytest.raises(WeightVersionError, match="disagree"):
        trainer.train_step(1)


def test_a_policy_that_is_not_the_reference_at_the_start_is_refused(tiny_checkpoint: Path, prompts_path: Path) -> None:
    trainer = build_trainer(tiny_checkpoint, prompts_path, stage_config(kl=KLS["k2"]), ScriptedEngine(answers_of, []))
    with torch.no_grad():
        trainer.updater.policy.lm_head.weight.mul_(1.3)
    with pytest.raises(ArtifactError, match="must be 0"):
        trainer.train_step(1)


def test_a_loss_that_is_not_finite_stops_before_any_update(tiny_checkpoint: Path, prompts_path: Path) -> None:
    trainer = build_trainer(tiny_checkpoint, prompts_path, stage_config(), ScriptedEngine(answers_of, []))
    trainer.updater._head_checked = True
    with torch.no_grad():
        trainer.updater.policy.model.norm.weight.fill_(math.nan)
    with pytest.raises(TrainingDivergedError, match="weights were left"):
        trainer.updater.update(1, scored_batch(trainer))


def test_a_model_with_a_soft_cap_on_its_logits_is_refused(tiny_checkpoint: Path, prompts_path: Path) -> None:
    from training_core.errors import ConfigurationError

    trainer = build_trainer(tiny_checkpoint, prompts_path, stage_config(), ScriptedEngine(answers_of, []))
    trainer.updater.policy.lm_head.register_forward_hook(lambda module, inputs, output: 5.0 * torch.tanh(3.0 * output))
    with pytest.raises(ConfigurationError, match="soft cap"):
        trainer.train_step(1)


def test_answers_without_a_score_are_left_out_and_all_missing_is_an_error(
    tiny_checkpoint: Path, prompts_path: Path
) -> None:
    trainer = build_trainer(tiny_checkpoint, prompts_path, stage_config(), ScriptedEngine(answers_of, []))

    def every_third(prompts: Any, answers: list[str], context: Any) -> list[float | None]:
        return [None if i % 3 == 0 else float(i) for i in range(len(answers))]

    trainer.rewards = [RewardPart("some", 1.0, every_third)]
    record = trainer.train_step(1)
    assert record.metrics["reward/missing_fraction"] == 3 / 8
    assert record.metrics["reward/mean"] == (1 + 2 + 4 + 5 + 7) / 5
    trainer.rewards = [RewardPart("none", 1.0, lambda prompts, answers, context: [None] * len(answers))]
    with pytest.raises(EvaluationError, match="none of the 8 answers has a score"):
        trainer.train_step(2)


def test_a_checkpoint_of_another_training_is_refused(tiny_checkpoint: Path, prompts_path: Path, tmp_path: Path) -> None:
    trainer = build_trainer(tiny_checkpoint, prompts_path, stage_config(), ScriptedEngine(answers_of, []))
    trainer.save(tmp_path, 2)
    assert trainer.load(tmp_path) == 2
    trainer.reference_sha256 = "1" * 64
    with pytest.raises(ArtifactError, match="another checkpoint"):
        trainer.load(tmp_path)
    (tmp_path / "state.json").write_text('{"version": 2}')
    with pytest.raises(ArtifactError, match=r"state\.json"):
        trainer.load(tmp_path)
    (tmp_path / "state.json").unlink()
    with pytest.raises(ArtifactError, match=r"state\.json"):
        trainer.load(tmp_path)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"kl": {"placement": "loss", "coefficient": 0.1, "estimator": "k1"}}, "expected gradient of zero"),
        ({"kl": {"placement": "loss", "coefficient": 0.1, "estimator": "k3"}}, "forward KL"),
        ({"kl": {"placement": "loss", "coefficient": 0.1, "objective": "forward"}}, "forward objective needs k3"),
        ({"kl": {"placement": "none", "coefficient": 0.1}}, "Extra inputs"),
        ({"num_minibatches": 3}, "groups are not split"),
        ({"group_size": 1}, "greater than or equal to 2"),
        ({"optimizer": {"learning_rate": "1e-6"}}, "valid number"),
        ({"value_loss_coefficient": 0.1}, "Extra inputs"),
    ],
)
def test_bad_configs_are_refused(algorithm: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        GrpoStageConfig.model_validate(stage_config(**algorithm))


def test_tokenizers_without_a_pad_token_are_padded_with_zero(tiny_checkpoint: Path) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    assert pad_token_id(tokenizer) == tokenizer.pad_token_id
    tokenizer.pad_token = None
    assert pad_token_id(tokenizer) == 0


def test_samples_hold_prompt_answer_and_scores(tiny_checkpoint: Path, prompts_path: Path, tmp_path: Path) -> None:
    run_stage(tmp_path, tiny_checkpoint, prompts_path, stage_config(samples_every_steps=2))
    rows = read_metrics(tmp_path / "samples.jsonl")
    assert [row["step"] for row in rows] == [1, 1, 2, 2]
    assert rows[0]["prompt"].startswith("Write about")
    assert {"answer", "num_tokens", "stop_reason", "reward", "reward_regex", "reward_length"} <= set(rows[0])


def test_message_records_are_what_prompts_hold(tiny_checkpoint: Path, prompts_path: Path) -> None:
    prompts = load_prompts(prompts_path, load_tokenizer(tiny_checkpoint))
    assert isinstance(prompts.rows[0], PromptRow)
    assert prompts.rows[0].prompt == [Message(role="user", content="Write about the sea.")]
