"""GRPO updates on the tiny model: split invariance, a slow loop as oracle, KL in the reward, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_trainers import KLS, answers_of, build_trainer, scored_batch

from training_core.config.algorithms import PolicyStageConfig
from training_core.errors import (
    ArtifactError,
    EvaluationError,
    WeightVersionError,
)
from training_core.loop import StepAbandonedError
from training_core.metrics import MetricSums
from training_core.models.loading import load_causal_lm, load_tokenizer
from training_core.rewards.combine import RewardPart
from training_core.rl import forward as policy_forward
from training_core.rl.plugs import build_estimator
from training_core.rl.signal import BeforeUpdates, ScoredBatch, build_signal, minibatch_rows
from training_core.rl.trainer import PolicyTrainer
from training_core.rl.update import PolicyUpdater
from training_core.rollout.scripted import ScriptedEngine
from training_core.sentinels import KnobChanges

AGGREGATIONS = [
    {"kind": "token_mean"},
    {"kind": "sequence_mean_token_mean"},
    {"kind": "sequence_mean_token_sum"},
    {"kind": "constant", "num_tokens": 8},
]


def gradients_after(updater: PolicyUpdater, scored: ScoredBatch) -> dict[str, torch.Tensor]:
    """Return the gradients that one update would step with."""
    caught: dict[str, torch.Tensor] = {}

    def catch(step: int) -> Any:
        caught.update({name: p.grad.double() for name, p in updater.policy.named_parameters() if p.grad is not None})
        raise StepAbandonedError

    updater.optimizer.step = catch  # type: ignore[method-assign]
    with pytest.raises(StepAbandonedError):
        updater.update(2, scored, 0.1)
    return caught


@pytest.mark.parametrize(
    ("aggregation", "kl"),
    [(AGGREGATIONS[0], "none"), *((aggregation, "k2") for aggregation in AGGREGATIONS)],
    ids=lambda value: value if isinstance(value, str) else value["kind"],
)
def test_gradients_do_not_depend_on_how_answers_are_batched(
    tiny_checkpoint: Path, rl_stage: Any, aggregation: dict[str, Any], kl: str
) -> None:
    found = []
    for size, layout in ((8, "padded"), (3, "padded"), (1, "packed"), (8, "shared_prompt"), (3, "packed")):
        config = rl_stage.config(
            micro_batch_size=size,
            layout=layout,
            aggregation=aggregation,
            kl=KLS[kl],
            mask_truncated=True,
        )
        engine = ScriptedEngine(answers_of, [])
        trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, config, engine)
        scored = scored_batch(trainer)
        truncated = torch.arange(len(scored.batch)) % 3 == 0
        # Some missing scores and some truncated answers: numerators and denominators must leave out the same ones.
        present = torch.arange(len(scored.batch)) != 4
        found.append(gradients_after(trainer.updater, replace(scored, present=present, is_truncated=truncated)))
    for other in found[1:]:
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=2e-4, atol=2e-6)


def test_answers_without_signal_change_no_gradient(
    tiny_checkpoint: Path, rl_stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipping them is exact: the same gradient as when every answer goes through the model."""
    found = []
    for skip in (True, False):
        trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, rl_stage.config(), ScriptedEngine(answers_of, []))
        scored = scored_batch(trainer)
        scores = scored.scores.clone()
        scores[:4] = 0.7
        if not skip:
            monkeypatch.setattr(PolicyUpdater, "has_signal", lambda self, signal, row: bool(signal.mask[row].any()))
        found.append(gradients_after(trainer.updater, replace(scored, scores=scores)))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=2e-4, atol=2e-6)


def test_a_step_without_any_signal_leaves_the_weights_alone(tiny_checkpoint: Path, rl_stage: Any) -> None:
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, rl_stage.config(), ScriptedEngine(answers_of, []))
    before = {name: p.detach().clone() for name, p in trainer.updater.policy.named_parameters()}
    scored = scored_batch(trainer)
    metrics, _ = trainer.updater.update(1, replace(scored, scores=torch.full_like(scored.scores, 0.7)), 0.0)
    assert metrics["rollout/zero_variance_group_fraction"] == 1.0
    assert metrics["train/num_updates"] == 0
    assert not any(name.startswith("policy/") for name in metrics)
    for name, parameter in trainer.updater.policy.named_parameters():
        assert torch.equal(parameter, before[name])


def test_one_step_equals_a_slow_loop(tiny_checkpoint: Path, rl_stage: Any) -> None:
    """The gradient against a plain loop over answers with full logits and no tricks."""
    config = rl_stage.config(
        advantage={"kind": "group_centred"}, aggregation={"kind": "sequence_mean_token_mean"}, kl=KLS["k2"]
    )
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, config, ScriptedEngine(answers_of, []), temperature=0.7)
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


def test_the_kl_in_the_reward_is_subtracted_from_the_score(tiny_checkpoint: Path, rl_stage: Any) -> None:
    """With equal scores, the advantage is minus the coefficient times the centred sum of k1 of the answer."""
    config = rl_stage.config(advantage={"kind": "group_centred"}, kl=KLS["reward"])
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, config, ScriptedEngine(answers_of, []))
    updater = trainer.updater
    with torch.no_grad():
        updater.policy.lm_head.weight.mul_(1.2)
    scored = scored_batch(trainer)
    scored = replace(scored, scores=torch.zeros_like(scored.scores))
    before = updater.before_updates(scored.batch)
    assert before.reference_logprobs is not None
    answer_kl = (
        torch.where(scored.batch.mask, before.logprobs - before.reference_logprobs, 0.0)
        .sum(dim=1)
        .double()
        .reshape(2, 4)
    )
    expected = (-0.1 * (answer_kl - answer_kl.mean(dim=1, keepdim=True))).flatten().float()
    seen = []
    original = updater.optimizer_update

    def spy(step: int, number: int, rows: Any, signal: Any, sums: MetricSums) -> Any:
        seen.append(signal.advantages)
        return original(step, number, rows, signal, sums)

    updater.optimizer_update = spy  # type: ignore[method-assign]
    updater.update(2, scored, 0.1)
    expected = torch.where(scored.batch.mask, expected[:, None], 0.0)
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("coefficient", [0.01, 1.0])
def test_the_kl_in_the_reward_keeps_its_coefficient_when_scores_are_normalised(
    tiny_checkpoint: Path, rl_stage: Any, coefficient: float
) -> None:
    """The first group's scores have standard deviation 2, the second's are equal: neither divides the KL."""
    config = rl_stage.config(kl={"placement": "reward", "coefficient": coefficient})
    algorithm = PolicyStageConfig.model_validate(config).algorithm
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, config, ScriptedEngine(answers_of, []))
    scores = torch.tensor([3.0, 1.0, -1.0, 1.0, *[0.7] * 4], dtype=torch.float64)
    scores[:4] *= 2.0 / scores[:4].std()
    scored = replace(scored_batch(trainer), scores=scores)
    kls = torch.tensor([0.5, 0.1, -0.2, 0.0, 0.3, 0.1, 0.0, 0.2])
    old = torch.where(scored.batch.mask, (kls / scored.batch.mask.sum(dim=1))[:, None], 0.0)
    before = BeforeUpdates(old, torch.zeros_like(old))
    signal, groups = build_signal(algorithm, build_estimator(algorithm.advantage), scored, before, coefficient)
    centred = (kls.reshape(2, 4) - kls.reshape(2, 4).mean(dim=1, keepdim=True)).flatten()
    plain = torch.cat([(scores[:4] - scores[:4].mean()) / 2.0, torch.zeros(4)]).float()
    expected = torch.where(scored.batch.mask, (plain - coefficient * centred)[:, None], 0.0)
    torch.testing.assert_close(signal.advantages, expected, rtol=1e-5, atol=1e-6)
    assert groups.num_zero_variance_groups == 1


def test_one_update_has_ratio_one_with_the_kl_in_the_reward(tiny_checkpoint: Path, rl_stage: Any) -> None:
    """Although log-probs are taken before it, by a forward pass that may round otherwise than training's."""
    config = rl_stage.config(kl=KLS["reward"])
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, config, ScriptedEngine(answers_of, []))
    updater = trainer.updater
    original = updater.forward

    def rounding(model: Any, micro: Any) -> Any:
        logprobs, entropy = original(model, micro)
        return (logprobs if torch.is_grad_enabled() else logprobs + 1e-3), entropy

    updater.forward = rounding  # type: ignore[method-assign]
    metrics, _ = updater.update(2, scored_batch(trainer), 0.1)
    assert metrics["policy/ratio_mean"] == 1.0


def test_only_passes_that_train_compute_the_entropy(
    tiny_checkpoint: Path, rl_stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, original = [], policy_forward.token_logprobs

    def spy(*arguments: Any, **keywords: Any) -> Any:
        asked.append((torch.is_grad_enabled(), keywords["with_entropy"]))
        return original(*arguments, **keywords)

    monkeypatch.setattr(policy_forward, "token_logprobs", spy)
    engine = ScriptedEngine(answers_of, [])
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, rl_stage.config(kl=KLS["reward"]), engine)
    metrics, _ = trainer.updater.update(2, scored_batch(trainer), 0.1)
    assert set(asked) == {(True, True), (False, False)}
    assert metrics["policy/entropy_nats"] == pytest.approx(math.log(512), rel=0.02)


def without_signal_first(trainer: PolicyTrainer) -> ScoredBatch:
    """Return a batch whose first update of step 1 has equal scores only."""
    scored = scored_batch(trainer)
    scores = scored.scores.clone()
    scores[minibatch_rows(trainer.config, trainer.updater.around.seed, 1, scored.group_ids)[0]] = 0.7
    return replace(scored, scores=scores)


def test_the_sampler_is_checked_before_whichever_update_comes_first(tiny_checkpoint: Path, rl_stage: Any) -> None:
    engine = ScriptedEngine(lambda request: answers_of(request, logprob=-1.0), [])
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, rl_stage.config(num_minibatches=2), engine)
    before = {name: p.detach().clone() for name, p in trainer.updater.policy.named_parameters()}
    with pytest.raises(WeightVersionError, match="disagree"):
        trainer.updater.update(1, without_signal_first(trainer), 0.0)
    for name, parameter in trainer.updater.policy.named_parameters():
        assert torch.equal(parameter, before[name])


def test_several_updates_compare_all_answers_with_the_sampler(tiny_checkpoint: Path, rl_stage: Any) -> None:
    """Those without a signal too: their log-probs are there anyway."""
    config = rl_stage.config(num_minibatches=2)
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, config, ScriptedEngine(answers_of, []))
    scored = without_signal_first(trainer)
    old = trainer.updater.before_updates(scored.batch).logprobs
    mismatch = (scored.batch.sampler_logprobs - old).double()
    expected = ((-mismatch).exp() - 1 + mismatch)[scored.batch.mask].mean()
    metrics, _ = trainer.updater.update(1, scored, 0.0)
    assert metrics["train/num_updates"] == 1
    assert metrics["rollout/sampler_trainer_kl_nats"] == pytest.approx(float(expected), rel=1e-4)


def test_prompts_and_seeds_are_functions_of_the_step(tiny_checkpoint: Path, rl_stage: Any) -> None:
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, rl_stage.config(), ScriptedEngine(answers_of, []))
    sampler = trainer.sampler
    forwards = [sampler.make_requests(step, 0, sampler.rounds(step)[0]) for step in (1, 2, 3)]
    backwards = [sampler.make_requests(step, 0, sampler.rounds(step)[0]) for step in (3, 2, 1)][::-1]
    assert forwards == backwards
    seeds = [request.seed for step in forwards for request in step]
    assert len(set(seeds)) == len(seeds)
    first_epoch = [request.prompt_id for step in forwards for request in step[::4]][: rl_stage.num_prompts]
    assert sorted(first_epoch) == sorted(f"p{i}" for i in range(rl_stage.num_prompts))


def test_answers_without_a_score_are_left_out_and_all_missing_is_an_error(tiny_checkpoint: Path, rl_stage: Any) -> None:
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, rl_stage.config(), ScriptedEngine(answers_of, []))

    def every_third(prompts: Any, answers: list[str], context: Any) -> list[float | None]:
        return [None if i % 3 == 0 else float(i) for i in range(len(answers))]

    trainer.sampler.rewards = [RewardPart("some", 1.0, every_third)]
    record = trainer.train_step(1)
    assert record.metrics["reward/missing_fraction"] == 3 / 8
    assert record.metrics["reward/mean"] == (1 + 2 + 4 + 5 + 7) / 5
    trainer.sampler.rewards = [RewardPart("none", 1.0, lambda prompts, answers, context: [None] * len(answers))]
    with pytest.raises(EvaluationError, match="none of the 8 answers has a score"):
        trainer.train_step(2)


def test_a_checkpoint_of_another_training_is_refused(tiny_checkpoint: Path, rl_stage: Any, tmp_path: Path) -> None:
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, rl_stage.config(), ScriptedEngine(answers_of, []))
    trainer.save(tmp_path, 2)
    assert trainer.load(tmp_path) == 2
    trainer.reference_sha256 = "1" * 64
    with pytest.raises(ArtifactError, match="another checkpoint"):
        trainer.load(tmp_path)
    (tmp_path / "state.json").write_text('{"version": 1}')
    with pytest.raises(ArtifactError, match=r"state\.json"):
        trainer.load(tmp_path)
    (tmp_path / "state.json").unlink()
    with pytest.raises(ArtifactError, match=r"state\.json"):
        trainer.load(tmp_path)


def test_rewards_see_the_answer_as_it_was_generated(tiny_checkpoint: Path, rl_stage: Any) -> None:
    """The text with its spaces, whatever the tokenizer's config would tidy up, and the sampled ids."""
    ids = load_tokenizer(tiny_checkpoint)(" a cat , and a dog .", add_special_tokens=False)["input_ids"]
    engine = ScriptedEngine(lambda request: (ids, [-math.log(512)] * len(ids)), [])
    config = rl_stage.config(rollout={"engine": "transformers", "max_new_tokens": len(ids)})
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, config, engine)
    trainer.sampler.tokenizer.clean_up_tokenization_spaces = True
    trainer.sampler.tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    seen: dict[str, Any] = {}

    def reward(prompts: Any, answers: list[str], context: Any) -> list[float | None]:
        seen.update(answers=answers, sequences=context.sequences)
        return [1.0] * len(answers)

    trainer.sampler.rewards = [RewardPart("spy", 1.0, reward)]
    trainer.train_step(1)
    requests = trainer.sampler.make_requests(1, 0, trainer.sampler.rounds(1)[0])
    assert seen["answers"] == [" a cat , and a dog ."] * len(requests)
    assert seen["sequences"] == [(*request.prompt_ids, *ids) for request in requests]


def test_a_step_that_is_done_again_after_a_roll_back_samples_other_answers(
    tiny_checkpoint: Path, rl_stage: Any
) -> None:
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, rl_stage.config(), ScriptedEngine(answers_of, []))
    sampler = trainer.sampler

    def seeds() -> list[int]:
        return [request.seed for request in sampler.make_requests(3, 0, sampler.rounds(3)[0])]

    first = seeds()
    trainer.change_knobs(KnobChanges(num_roll_backs=1, learning_rate_factor=0.5))
    assert set(seeds()).isdisjoint(first)
    trainer.change_knobs(KnobChanges())
    assert seeds() == first


def test_the_schedule_waits_while_the_critic_warms_up(tiny_checkpoint: Path, rl_stage: Any) -> None:
    critic = {"initialise_from": "policy", "optimizer": {"learning_rate": 1e-3}, "warmup_steps": 2}
    schedule = {"learning_rate": 1e-3, "schedule": {"kind": "linear"}}
    config = rl_stage.config(name="ppo", num_steps=4, critic=critic, optimizer=schedule)
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, config, ScriptedEngine(answers_of, []))
    found = [trainer.updater.update(step, scored_batch(trainer, step), 0.0)[0] for step in (1, 2, 3, 4)]
    assert [metrics.get("train/learning_rate") for metrics in found] == [None, None, 1e-3, 5e-4]
    assert [metrics["train/num_updates"] for metrics in found] == [0, 0, 1, 1]


def test_baselines_that_are_all_missing_stop_the_training(tiny_checkpoint: Path, rl_stage: Any) -> None:
    config = rl_stage.config(name="remax", group_size=2)
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, config, ScriptedEngine(answers_of, []))
    calls: list[int] = []

    def every_second_call(prompts: Any, answers: list[str], context: Any) -> list[float | None]:
        calls.append(len(answers))
        return [1.0 * index if len(calls) % 2 else None for index in range(len(answers))]

    trainer.sampler.rewards = [RewardPart("some", 1.0, every_second_call)]
    with pytest.raises(EvaluationError, match="none of the 2 most probable answers"):
        trainer.train_step(1)
    assert calls == [4, 2]
