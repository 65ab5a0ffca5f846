"""Faults that other trainers had, each made small: see docs/faults.md for the list and the numbers."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_trainers import KLS, answers_of, build_trainer, scored_batch
from tokenizers.processors import TemplateProcessing

from training_core.errors import ArtifactError
from training_core.loop import StepAbandonedError
from training_core.models.chat import encode_conversation, encode_prompt
from training_core.models.loading import load_tokenizer
from training_core.protocol.atomic import read_json, write_json
from training_core.rewards.combine import RewardPart
from training_core.rl.signal import ScoredBatch, build_signal
from training_core.rl.trainer import CRITIC_FOLDER, PolicyTrainer
from training_core.rollout.batch import build_batch
from training_core.rollout.scripted import ScriptedEngine

PPO = {"name": "ppo", "critic": {"initialise_from": "policy", "optimizer": {"learning_rate": 1e-3}}}


@pytest.fixture
def make_trainer(tiny_checkpoint: Path, rl_stage: Any) -> Any:
    def make(**algorithm: Any) -> PolicyTrainer:
        config = rl_stage.config(**algorithm)
        return build_trainer(tiny_checkpoint, rl_stage.prompts, config, ScriptedEngine(answers_of, []))

    return make


def gradients_after(trainer: PolicyTrainer, scored: ScoredBatch) -> dict[str, torch.Tensor]:
    """Return the gradients that the only update of a step would be made with."""
    updater = trainer.updater
    found: dict[str, torch.Tensor] = {}

    def catch(step: int) -> Any:
        found.update({name: p.grad.clone() for name, p in updater.policy.named_parameters() if p.grad is not None})
        updater.policy.zero_grad()
        raise StepAbandonedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updater.optimizer, "step", catch)
        with pytest.raises(StepAbandonedError):
            updater.update(2, scored, 0.1)
    return found


def rows_of(scored: ScoredBatch, keep: list[int]) -> ScoredBatch:
    """Return some answers as if no others had been sampled."""
    index, batch = torch.tensor(keep), scored.batch
    logprobs = [batch.sampler_logprobs[row][batch.mask[row]].tolist() for row in keep]
    assert scored.baseline_scores is not None
    return ScoredBatch(
        build_batch([batch.prompts[row] for row in keep], [batch.answers[row] for row in keep], logprobs),
        scored.scores[index],
        scored.present[index],
        scored.is_truncated[index],
        scored.group_ids[index],
        baseline_scores=scored.baseline_scores[index],
    )


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "prompt_mean"])
def test_a_truncated_answer_weighs_nothing_above_and_below_the_line(make_trainer: Any, kind: str) -> None:
    """Fault 2. The others' gradient is what it is without the truncated ones: in the loss and its denominator.

    The baseline is of ReMax, which compares no answers with each other.
    """
    trainer = make_trainer(
        name="custom",
        advantage={"kind": "remax"},
        loss={"kind": "reinforce"},
        aggregation={"kind": kind},
        kl=KLS["k2"],
        mask_truncated=True,
    )
    trainer.updater._is_first = False
    scored = scored_batch(trainer)
    truncated = torch.tensor([True, False, False, True, False, False, True, False])
    assert int(scored.batch.mask[truncated].sum()) > 3
    found = gradients_after(trainer, replace(scored, is_truncated=truncated))
    alone = gradients_after(trainer, rows_of(scored, [1, 2, 4, 5, 7]))
    assert max(float(gradient.abs().max()) for gradient in alone.values()) > 1e-3
    for name, gradient in alone.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_answers_that_the_correction_leaves_out_keep_their_place_below_the_line(make_trainer: Any) -> None:
    """The others' gradient is as it would be if those left out had no advantage, not as if they were not there."""
    trainer = make_trainer(
        name="custom",
        advantage={"kind": "remax"},
        loss={"kind": "reinforce"},
        aggregation={"kind": "token_mean"},
        importance_correction={"mode": "mask"},
        sentinels={"sampler_mismatch": {"limit_nats": 1000.0}},
    )
    trainer.updater._is_first = False
    scored = scored_batch(trainer)
    far = torch.tensor([True, False, False, True, False, False, True, False])
    sampled = torch.where(far[:, None], scored.batch.sampler_logprobs - 3.0, scored.batch.sampler_logprobs)
    batch = replace(scored.batch, sampler_logprobs=torch.where(scored.batch.mask, sampled, 0.0))
    found = gradients_after(trainer, replace(scored, batch=batch))
    without = gradients_after(trainer, replace(scored, scores=scored.scores * ~far))
    assert max(float(gradient.abs().max()) for gradient in without.values()) > 1e-3
    for name, gradient in without.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_each_update_of_a_step_has_the_denominator_of_its_own_answers(make_trainer: Any) -> None:
    """Fault 1: a window of sampling that is larger than that of an update."""
    trainer = make_trainer(num_minibatches=2)
    updater, scored = trainer.updater, scored_batch(trainer)
    signal, _ = build_signal(trainer.config, updater.estimate, scored, updater.before_updates(scored.batch), 0.0)
    for rows in ([0, 1, 2, 3], [4, 5, 6, 7]):
        weights = updater.step_weights(signal, rows)
        assert float(weights.sum()) == pytest.approx(1.0)
        assert float(weights[rows].sum()) == pytest.approx(1.0)


def test_a_checkpoint_without_the_critics_optimizer_is_refused(make_trainer: Any, tmp_path: Path) -> None:
    """Fault 12: training went on with fresh moments."""
    trainer = make_trainer(**PPO)
    trainer.train_step(1)
    trainer.save(tmp_path, 1)
    assert make_trainer(**PPO).load(tmp_path) == 1
    for path in sorted((tmp_path / CRITIC_FOLDER).iterdir()):
        hidden = path.rename(tmp_path / "hidden")
        with pytest.raises(ArtifactError, match=path.name):
            make_trainer(**PPO).load(tmp_path)
        hidden.rename(path)
    (tmp_path / CRITIC_FOLDER).rename(tmp_path / "hidden")
    with pytest.raises(ArtifactError, match=CRITIC_FOLDER):
        make_trainer(**PPO).load(tmp_path)


@pytest.mark.parametrize("name", ["state.json", "engine.json", "critic/engine.json"])
def test_state_of_another_version_is_refused(make_trainer: Any, tmp_path: Path, name: str) -> None:
    """Fault 15. Whatever else is the same: this code cannot know what the other one meant by it."""
    trainer = make_trainer(**PPO)
    trainer.train_step(1)
    trainer.save(tmp_path, 1)
    state = read_json(tmp_path / name)
    write_json(tmp_path / name, {**state, "version": state["version"] + 1})
    with pytest.raises(ArtifactError, match="version"):
        make_trainer(**PPO).load(tmp_path)
    write_json(tmp_path / name, state)
    assert make_trainer(**PPO).load(tmp_path) == 1


def test_a_checkpoint_of_other_prompts_is_refused(make_trainer: Any, tmp_path: Path) -> None:
    """Fault 13: a position in one set of prompts means nothing in another."""
    trainer = make_trainer()
    trainer.prompts_sha256 = "1" * 64
    trainer.save(tmp_path, 1)
    with pytest.raises(ArtifactError, match="prompts_sha256"):
        make_trainer().load(tmp_path)


def test_activations_of_a_micro_batch_are_gone_before_the_next(make_trainer: Any) -> None:
    """Fault 36: metrics that hold on to the graph keep every micro-batch's activations."""
    trainer = make_trainer(**PPO, micro_batch_size=1, entropy_coefficient=0.01)
    scored = scored_batch(trainer)
    alive: list[weakref.ref[torch.Tensor]] = []
    counts = []

    def watched(forward: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if torch.is_grad_enabled():
                counts.append(sum(reference() is not None for reference in alive))
            result = forward(*arguments)
            if torch.is_grad_enabled():
                alive.extend(weakref.ref(x) for x in (result if isinstance(result, tuple) else (result,)))
            return result

        return call

    updater = trainer.updater
    assert updater.critic is not None
    updater.forward = watched(updater.forward)  # type: ignore[method-assign]
    updater.critic.values = watched(updater.critic.values)  # type: ignore[method-assign]
    gc.disable()
    try:
        updater.update(2, scored, 0.1)
    finally:
        gc.enable()
    assert len(counts) == 2 * len(scored.batch)
    assert set(counts) == {0}
    assert not any(reference() is not None for reference in alive)


def test_a_run_that_ends_with_an_epoch_goes_on_with_the_next(
    tiny_checkpoint: Path, rl_stage: Any, tmp_path: Path
) -> None:
    """Fault 9: a loader that had come to its end gave a resumed run no step at all, and the run called that success."""
    config = rl_stage.config(num_steps=2, prompts_per_step=rl_stage.num_prompts, group_size=2, checkpoint_every_steps=1)
    engine = ScriptedEngine(answers_of, [])
    first = build_trainer(tiny_checkpoint, rl_stage.prompts, config, engine)
    first.train_step(1)
    first.save(tmp_path, 1)
    later = build_trainer(tiny_checkpoint, rl_stage.prompts, config, ScriptedEngine(answers_of, []))
    assert later.load(tmp_path) == 1
    assert later.train_step(2).metrics == first.train_step(2).metrics
    asked = [row.prompt_id for row in (later.sampler.prompts.rows[i] for i in later.sampler.rounds(2)[0])]
    assert sorted(asked) == sorted(row.prompt_id for row in later.sampler.prompts.rows)


def test_answers_of_a_prompt_stay_together_and_share_their_group(make_trainer: Any) -> None:
    """Fault 43: with ids that differed within a group, no answer was compared with any other."""
    trainer = make_trainer()
    seen: list[ScoredBatch] = []
    original = trainer.updater.update

    def spy(step: int, scored: ScoredBatch, coefficient: float) -> Any:
        seen.append(scored)
        return original(step, scored, coefficient)

    trainer.updater.update = spy  # type: ignore[method-assign]
    trainer.train_step(1)
    (scored,) = seen
    assert scored.group_ids.bincount().tolist() == [trainer.config.group_size] * trainer.config.prompts_per_step
    for group in scored.group_ids.unique().tolist():
        rows = (scored.group_ids == group).nonzero().flatten().tolist()
        assert len({scored.batch.prompts[row] for row in rows}) == 1


@pytest.mark.parametrize("placement", ["k2", "reward"])
def test_the_distance_to_the_reference_is_told_by_an_estimate_that_is_never_negative(
    make_trainer: Any, placement: str
) -> None:
    """Fault 42: single samples of a log-ratio are negative half of the time. Both are logged, and told apart."""
    trainer = make_trainer(kl=KLS[placement])
    updater = trainer.updater
    updater._is_first = False
    scored = scored_batch(trainer)
    with torch.no_grad():
        updater.policy.lm_head.weight.mul_(1.5)
    before = updater.before_updates(scored.batch)
    assert before.reference_logprobs is not None
    log_ratio = (before.logprobs - before.reference_logprobs)[scored.batch.mask].double()
    metrics, _ = updater.update(2, scored, 0.1)
    assert metrics["kl/policy_ref_nats"] == pytest.approx(float((torch.expm1(-log_ratio) + log_ratio).mean()), rel=1e-3)
    assert metrics["kl/policy_ref_nats"] > 0.0
    assert metrics["kl/policy_ref_k1_nats"] == pytest.approx(float(log_ratio.mean()), rel=1e-3)
    assert metrics["kl/policy_ref_k1_nats"] != pytest.approx(metrics["kl/policy_ref_nats"], rel=1e-3)
    answers = torch.where(scored.batch.mask, before.logprobs - before.reference_logprobs, 0.0).double().sum(dim=1)
    assert metrics["kl/policy_ref_answer_nats"] == pytest.approx(float(answers.mean()), rel=1e-3)
    error = float(answers.std()) / len(answers) ** 0.5
    assert metrics["kl/policy_ref_answer_stderr_nats"] == pytest.approx(error, rel=1e-3)
    assert error > 0.0


@pytest.mark.parametrize("num_mixed", [0, 1])
def test_a_step_without_enough_mixed_groups_ends_and_trains_on_what_there_is(make_trainer: Any, num_mixed: int) -> None:
    """Fault 40: a run that died at its limit of rounds, and one that went on sampling for ever."""
    trainer = make_trainer(dynamic_sampling={"max_rounds": 2})
    mixed = {row.prompt_id for row in trainer.sampler.prompts.rows[:num_mixed]}
    asked: list[str] = []
    original = trainer.sampler.engine.generate

    def generate(requests: Any, *arguments: Any, **keywords: Any) -> Any:
        asked.extend(request.prompt_id for request in requests)
        return original(requests, *arguments, **keywords)

    def reward(prompts: Any, answers: list[str], context: Any) -> list[float | None]:
        of_prompt = asked[-len(answers) :]
        return [float(i) if prompt in mixed else 0.5 for i, prompt in enumerate(of_prompt)]

    trainer.sampler.engine.generate = generate
    trainer.sampler.rewards = [RewardPart("some", 1.0, reward)]
    metrics = [trainer.train_step(step).metrics for step in (1, 2)]
    per_round = trainer.config.prompts_per_step * trainer.config.group_size
    assert len(asked) == 2 * 2 * per_round
    assert [row["rollout/num_rounds"] for row in metrics] == [2, 2]
    met = [num_mixed > 0 and bool(mixed & set(asked[i * 2 * per_round : (i + 1) * 2 * per_round])) for i in range(2)]
    assert any(met) == (num_mixed > 0)
    assert [row["train/num_updates"] for row in metrics] == [int(x) for x in met]


def test_a_tokenizer_that_adds_bos_by_itself_adds_none_to_what_a_template_wrote(tiny_checkpoint: Path) -> None:
    """Fault 23. Prompts, and conversations in which they must be found again, come from one renderer."""
    tokenizer = load_tokenizer(tiny_checkpoint)
    bos = "<|endoftext|>"
    tokenizer.bos_token = bos
    special = [(bos, tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=special)
    assert tokenizer("text")["input_ids"][0] == tokenizer.bos_token_id
    prompt, answer = [{"role": "user", "content": "Hello"}], [{"role": "assistant", "content": "Good day"}]
    body = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for template, count in (("{{ bos_token }}" + body, 1), (body, 0)):
        tokenizer.chat_template = template
        ids = encode_prompt(tokenizer, prompt)
        assert ids.count(tokenizer.bos_token_id) == count
        conversation, num_prompt_tokens = encode_conversation(tokenizer, prompt, answer)
        assert conversation[:num_prompt_tokens] == ids
        assert conversation.count(tokenizer.bos_token_id) == count
