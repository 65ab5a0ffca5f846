"""The value model: where it reads, what it starts from, and that neither padding nor company changes a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from training_core.config.optimizer import OptimizerConfig
from training_core.engines.single import SingleProcessEngine, group_of
from training_core.errors import ArtifactError, ConfigurationError
from training_core.models.critic import (
    ValueModel,
    check_reads_the_same,
    critic_from_reward_model,
    new_critic,
    probe_sequences,
)
from training_core.models.heads import load_reward_model, new_reward_model, save_reward_model, score_token_ids
from training_core.models.loading import load_causal_lm, update_json
from training_core.models.reward_ensemble import load_reward_ensemble, save_ensemble_files
from training_core.models.tiny import build_tiny_checkpoint
from training_core.ops.masking import lengths_to_mask
from training_core.rollout.batch import MicroBatch, TrajectoryBatch, build_micro_batch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1, vocab_size=300)


def save_reward(checkpoint: Path, directory: Path, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    model = new_reward_model(checkpoint, seed=seed)
    with torch.no_grad():
        model.head.weight.mul_(50.0)
    model.score_mean, model.score_std = 0.7, 2.5
    save_reward_model(model, checkpoint, directory, {}, dtype)
    return directory


@pytest.fixture(scope="module")
def reward(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward(checkpoint, tmp_path_factory.mktemp("reward"), seed=2)


def batch_of(prompts: Sequence[int] = (5, 2, 3), answers: Sequence[int] = (4, 1, 6)) -> TrajectoryBatch:
    generator = torch.Generator().manual_seed(0)

    def ids(num_tokens: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, 300, (num_tokens,), generator=generator).tolist())

    mask = lengths_to_mask(torch.tensor(list(answers)), max(answers))
    return TrajectoryBatch([ids(n) for n in prompts], [ids(n) for n in answers], mask, torch.zeros(mask.shape))


def values_of(critic: ValueModel, micro: MicroBatch) -> list[list[float]]:
    """Return the values of each row of a micro-batch, answer tokens only."""
    with torch.no_grad():
        spread = micro.scatter(critic(micro))
    return [row[mask].tolist() for row, mask in zip(spread, micro.mask, strict=True)]


def test_a_new_critic_says_nothing_and_can_learn(checkpoint: Path) -> None:
    critic, batch = new_critic(checkpoint), batch_of()
    micro = build_micro_batch(batch, [0, 1, 2], 3, CPU)
    values = critic(micro)
    assert values.shape == (11,)
    assert values.dtype == torch.float32
    assert torch.equal(values, torch.zeros(11))
    engine = SingleProcessEngine([group_of("critic", critic, 1e-2)], OptimizerConfig(learning_rate=1e-2), 60)
    for step in range(1, 41):
        loss = (critic(micro) - 1.5).square().mean()
        loss.backward()
        engine.step(step)
    assert float(loss.detach()) < 0.05


def test_it_starts_as_the_reward_model(checkpoint: Path, reward: Path) -> None:
    """Fault 47: a head of noise, or other weights, where the reward model's were meant."""
    model, batch = load_reward_model(reward), batch_of()
    plain = (0.0, 1.0)
    for normalise, weight, scale in (
        (False, 1.0, plain),
        (True, 1.0, plain),
        (True, 0.5, plain),
        (False, 2.0, plain),
        (False, 2.0, (10.0, 3.0)),
    ):
        critic = critic_from_reward_model(reward, checkpoint, normalise=normalise, weight=weight, scale=scale)
        found = values_of(critic, build_micro_batch(batch, [0, 1, 2], 3, CPU))
        for row, values in enumerate(found):
            sequence = batch.prompts[row] + batch.answers[row]
            # The value before an answer token is the score of what was written until then.
            states = [sequence[: len(batch.prompts[row]) + t] for t in range(len(batch.answers[row]))]
            scores = score_token_ids(model, states, 3)
            expected = [weight * ((s - 0.7) / 2.5 if normalise else (s - scale[0]) / scale[1]) for s in scores]
            assert values == pytest.approx(expected, abs=1e-4)
            assert max(map(abs, scores)) > 0.1


def test_a_narrow_reward_model_becomes_float32_masters(checkpoint: Path, tmp_path: Path) -> None:
    save_reward(checkpoint, tmp_path, seed=2, dtype=torch.bfloat16)
    critic = critic_from_reward_model(tmp_path, checkpoint, normalise=True)
    assert {p.dtype for p in critic.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in critic.parameters())


@pytest.mark.parametrize("normalise", [True, False])
def test_of_an_ensemble_it_is_the_first_member_on_the_ensembles_scale(
    checkpoint: Path, tmp_path: Path, normalise: bool
) -> None:
    for member in range(2):
        save_reward(checkpoint, tmp_path / f"member_{member}", seed=2)  # Equal members: their mean is each of them.
    save_ensemble_files(tmp_path, 2)
    update_json(tmp_path / "reward_config.json", score_mean=0.25, score_std=0.5)
    ensemble, batch = load_reward_ensemble(tmp_path), batch_of()
    critic = critic_from_reward_model(tmp_path, checkpoint, normalise=normalise)
    states = [list(batch.prompts[0]), [*batch.prompts[0], batch.answers[0][0]]]
    expected = ensemble.score(states, 3).means
    if normalise:
        expected = [ensemble.normalise(score) for score in expected]
    assert values_of(critic, build_micro_batch(batch, [0], 3, CPU))[0][:2] == pytest.approx(expected, abs=1e-4)


def test_another_tokenizer_is_refused(reward: Path, tmp_path: Path) -> None:
    other = build_tiny_checkpoint(tmp_path, seed=1, vocab_size=290)
    with pytest.raises(ConfigurationError, match="initialise_from: policy"):
        critic_from_reward_model(reward, other, normalise=True)


def test_a_critic_that_reads_otherwise_is_refused(reward: Path) -> None:
    model = load_reward_model(reward)
    critic = ValueModel(model.backbone)
    with pytest.raises(ArtifactError, match=r"reads 0\.000000 where"):
        check_reads_the_same(critic, model, 1.0, 0.0)
    with torch.no_grad():
        critic.head.weight.copy_(model.head.weight)
    check_reads_the_same(critic, model, 1.0, 0.0)
    assert [len(row) for row in probe_sequences(300)] == [3, 7]


def test_padding_and_company_change_no_value(checkpoint: Path, reward: Path) -> None:
    critic, batch = critic_from_reward_model(reward, checkpoint, normalise=True), batch_of()
    together = values_of(critic, build_micro_batch(batch, [2, 0, 1], 3, CPU))
    alone = [values_of(critic, build_micro_batch(batch, [row], 3, CPU))[0] for row in (2, 0, 1)]
    other_pad = values_of(critic, build_micro_batch(batch, [2, 0, 1], 77, CPU))
    micro = build_micro_batch(batch, [2, 0, 1], 3, CPU)
    wider = dataclasses.replace(micro, input_ids=torch.nn.functional.pad(micro.input_ids, (0, 9), value=50))
    for a, b, c, d in zip(together, alone, other_pad, values_of(critic, wider), strict=True):
        assert b == pytest.approx(a, abs=1e-5)
        assert c == a
        assert d == pytest.approx(a, abs=1e-5)
    assert len({value for row in together for value in row}) == 11


def test_the_head_is_float32_under_autocast(checkpoint: Path, reward: Path) -> None:
    critic, micro = (
        critic_from_reward_model(reward, checkpoint, normalise=True),
        build_micro_batch(batch_of(), [0], 3, CPU),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = critic(micro)
    assert narrow.dtype == torch.float32
    assert torch.allclose(narrow, critic(micro), atol=0.2)
    # More digits than bfloat16 has.
    assert not torch.equal(narrow, narrow.bfloat16().float())


def test_state_comes_back_to_the_bit_under_its_own_names(checkpoint: Path, reward: Path, tmp_path: Path) -> None:
    critic, micro = (
        critic_from_reward_model(reward, checkpoint, normalise=True),
        build_micro_batch(batch_of(), [0, 1], 3, CPU),
    )
    config = OptimizerConfig(learning_rate=1e-3)
    engine = SingleProcessEngine([group_of("critic", critic, 1e-3)], config, 3)
    critic(micro).square().mean().backward()
    engine.step(1)
    engine.save(tmp_path, 1)
    policy = {f"critic.backbone.{name}" for name, _ in load_causal_lm(checkpoint).base_model.named_parameters()}
    assert set(engine.parameters) == policy | {"critic.head.weight", "critic.head.bias"}
    other = new_critic(checkpoint)
    SingleProcessEngine([group_of("critic", other, 1e-3)], config, 3).load(tmp_path)
    assert torch.equal(other(micro), critic(micro))
    assert not torch.equal(other(micro), torch.zeros(5))


def test_no_gradient_reaches_the_policy(checkpoint: Path) -> None:
    policy = load_causal_lm(checkpoint)
    critic = new_critic(checkpoint)
    with torch.no_grad():
        critic.head.weight.fill_(1.0)
    critic(build_micro_batch(batch_of(), [0], 3, CPU)).sum().backward()
    assert all(p.grad is None for p in policy.parameters())
    assert all(p.grad is not None for p in critic.parameters())
