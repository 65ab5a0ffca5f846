"""Replay: what is kept, how it is drawn and weighed, whose ratio it has, and that it survives a kill."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tasks import build_small_checkpoint, small_config

from training_core.config.algorithms import PolicyStageConfig
from training_core.config.off_policy import PrioritisedSampling, ReplayConfig
from training_core.errors import ArtifactError
from training_core.metrics import MetricSums, read_metrics
from training_core.models.loading import load_causal_lm
from training_core.rl.losses import TokenInputs, token_losses
from training_core.rl.metrics import add_policy_metrics, effective_sample_fraction
from training_core.rl.plugs import build_policy_loss
from training_core.rl.replay import REPLAY_FILE, Drawn, KeptAnswer, KeptGroup, ReplayBuffer, preferences
from training_core.rl.trainer import PolicyTrainer
from training_core.rl.update import PolicyUpdater

NUM_SEEDS = 3000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_checkpoint(tmp_path_factory.mktemp("small"))


def group(step: int, priority: float = 1.0, name: str = "p") -> KeptGroup:
    answer = KeptAnswer(token_ids=[5, 6], logprobs=[-1.0, -2.5], stop_reason="length", score=0.5)
    return KeptGroup(step=step, prompt_id=name, prompt_ids=[1, 2], answers=[answer] * 2, priority=priority)


def buffer_of(groups: Sequence[KeptGroup], number: int = 2, **changes: Any) -> ReplayBuffer:
    values = {"capacity_groups": max(len(groups), number), "groups_per_step": number, "max_staleness_steps": 100}
    buffer = ReplayBuffer(ReplayConfig.model_validate({**values, **changes}))
    buffer.add(groups)
    return buffer


def test_the_oldest_groups_leave_when_it_is_full() -> None:
    buffer = buffer_of([], capacity_groups=3)
    for step in range(1, 4):
        buffer.add([group(step, name=f"{step}a"), group(step, name=f"{step}b")])
        assert len(buffer.groups) == min(2 * step, 3)
    assert [kept.prompt_id for kept in buffer.groups] == ["2b", "3a", "3b"]


def test_what_is_too_old_is_never_drawn_again() -> None:
    buffer = buffer_of([group(step) for step in (1, 2, 3, 4)], number=4, max_staleness_steps=2)
    drawn = buffer.draw(5, seed=0)
    assert sorted(kept.step for kept in drawn.groups) == [3, 4]
    assert buffer.metrics(5, drawn) == {
        "replay/num_kept_groups": 2,
        "replay/num_drawn_groups": 2,
        "replay/staleness_mean_steps": 1.5,
    }
    assert [kept.step for kept in buffer.groups] == [3, 4]
    nothing = buffer.draw(9, seed=0)
    assert (nothing.groups, nothing.weights) == ([], [])
    assert buffer.metrics(9, nothing) == {"replay/num_kept_groups": 0, "replay/num_drawn_groups": 0}


@pytest.mark.parametrize("sampling", [{"kind": "uniform"}, {"kind": "prioritised"}])
def test_a_draw_is_a_function_of_seed_and_step(sampling: dict[str, Any]) -> None:
    groups = [group(1, priority=1.0 + number, name=str(number)) for number in range(6)]
    buffer = buffer_of(groups, number=3, sampling=sampling)
    draws = [buffer.draw(step, seed) for step, seed in itertools.product(range(2, 10), range(4))]
    names = [tuple(kept.prompt_id for kept in drawn.groups) for drawn in draws]
    assert all([buffer.groups[place] for place in drawn.places] == drawn.groups for drawn in draws)
    # Only uniform draws take no group twice.
    assert all(len(set(found)) == 3 for found in names) == (sampling["kind"] == "uniform")
    assert len(set(names)) > 10
    again = buffer_of(groups, number=3, sampling=sampling)
    assert names[5] == tuple(kept.prompt_id for kept in again.draw(3, 1).groups)


@pytest.mark.parametrize("sampling", [{"kind": "uniform"}, {"kind": "prioritised", "correction": 0.0}])
def test_no_more_groups_than_asked_for_are_all_taken_once(sampling: dict[str, Any]) -> None:
    for number in (2, 4):
        drawn = buffer_of([group(1, 0.1, "a"), group(1, 9.0, "b")], number, sampling=sampling).draw(2, seed=0)
        assert sorted(kept.prompt_id for kept in drawn.groups) == ["a", "b"]
        assert drawn.weights == [1.0, 1.0]


def pair_probabilities(rates: Sequence[float], *, twice: bool) -> dict[tuple[int, int], float]:
    """Return how likely each ordered pair is, with or without putting back: written out."""
    total = sum(rates)
    if twice:
        return {(i, j): rates[i] * rates[j] / total**2 for i, j in itertools.product(range(len(rates)), repeat=2)}
    pairs = itertools.permutations(range(len(rates)), 2)
    return {(i, j): rates[i] / total * rates[j] / (total - rates[i]) for i, j in pairs}


@pytest.mark.parametrize("exponent", [None, 0.0, 0.6, 1.0])
def test_draws_have_the_stated_probabilities(exponent: float | None) -> None:
    """Over many seeds, each ordered pair within four standard errors. None is uniform."""
    priorities = [0.2, 1.0, 3.0, 1e-6]
    sampling = {"kind": "uniform"} if exponent is None else {"kind": "prioritised", "exponent": exponent}
    groups = [group(1, priority, name=str(number)) for number, priority in enumerate(priorities)]
    buffer = buffer_of(groups, sampling=sampling)
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(NUM_SEEDS):
        first, second = buffer.draw(2, seed).groups
        counts[int(first.prompt_id), int(second.prompt_id)] += 1
    rates = [priority ** (exponent or 0.0) for priority in priorities]
    expected = pair_probabilities(rates, twice=exponent is not None)
    assert set(counts) <= set(expected)
    for pair, probability in expected.items():
        error = math.sqrt(probability * (1 - probability) / NUM_SEEDS)
        assert abs(counts[pair] / NUM_SEEDS - probability) <= 4 * error + 1e-9, pair


PRIORITIES = [0.5, 1.0, 4.0]


@pytest.mark.parametrize(("exponent", "correction"), [(0.6, 1.0), (1.0, 0.5), (0.6, 0.0), (0.0, 1.0)])
def test_weights_take_the_preference_back(exponent: float, correction: float) -> None:
    """Schaul et al., section 3.4: (n p_i)^-correction, by hand; not over the largest."""
    sampling = {"kind": "prioritised", "exponent": exponent, "correction": correction}
    buffer = buffer_of([group(1, p, name=str(i)) for i, p in enumerate(PRIORITIES)], sampling=sampling)
    rates = [p**exponent for p in PRIORITIES]
    plain = {str(i): (3 * rate / sum(rates)) ** -correction for i, rate in enumerate(rates)}
    seen = {}
    for seed in range(40):
        drawn = buffer.draw(2, seed)
        assert drawn.weights == pytest.approx([plain[kept.prompt_id] for kept in drawn.groups], rel=1e-12)
        seen.update(zip((kept.prompt_id for kept in drawn.groups), drawn.weights, strict=True))
    assert set(seen) == set(plain)
    # The product with the advantages stays below the largest advantage: no weight needs a bound.
    assert all(seen[str(i)] * priority <= 4.0 + 1e-12 for i, priority in enumerate(PRIORITIES))
    if exponent * correction:
        assert seen["0"] > seen["1"] > seen["2"]
    else:
        assert set(seen.values()) == {1.0}


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0])
def test_full_correction_is_unbiased_by_enumeration(exponent: float) -> None:
    """All 27 ways to draw three times from three groups: the expected weighted mean is the plain mean."""
    values = torch.tensor([-1.3, 0.4, 2.2], dtype=torch.float64)
    sampling = PrioritisedSampling(kind="prioritised", exponent=exponent)
    found, weights = (torch.tensor(part, dtype=torch.float64) for part in preferences(PRIORITIES, sampling))
    places = torch.tensor(list(itertools.product(range(3), repeat=3)))
    chances = found[places].prod(dim=1)
    torch.testing.assert_close(chances.sum(), torch.ones((), dtype=torch.float64), rtol=0, atol=1e-14)
    expected = (chances * (weights * values)[places].mean(dim=1)).sum()
    torch.testing.assert_close(expected, values.mean(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["uniform", "prioritised"])
@pytest.mark.parametrize("number", [1, 3, 4])
def test_full_correction_is_unbiased_over_seeds(kind: str, number: int) -> None:
    """The mean over seeds of what a step learns: within four standard errors of the plain mean over kept groups."""
    priorities = [0.02, 0.3, 1.0, 2.5, 4.0]
    sampling = {"kind": kind} if kind == "uniform" else {"kind": kind, "exponent": 0.6, "correction": 1.0}
    groups = [group(1, p, name=str(i)) for i, p in enumerate(priorities)]
    buffer = buffer_of(groups, number, sampling=sampling)
    means = torch.empty(NUM_SEEDS, dtype=torch.float64)
    for seed in range(NUM_SEEDS):
        drawn = buffer.draw(2, seed)
        parts = [weight * kept.priority for weight, kept in zip(drawn.weights, drawn.groups, strict=True)]
        means[seed] = sum(parts) / number
    error = float(means.std()) / math.sqrt(NUM_SEEDS)
    assert 0.0 < error < 0.05
    assert abs(float(means.mean()) - sum(priorities) / 5) <= 4 * error


def test_a_small_advantage_switches_nothing_off() -> None:
    """A drawn group with hardly any advantage leaves the others' weights alone."""
    buffer = buffer_of([group(1, 1e-6, "little"), *[group(1, 1.0, "much")] * 5], sampling={"kind": "prioritised"})
    draws = [buffer.draw(2, seed) for seed in range(20_000)]
    with_little = [drawn for drawn in draws if "little" in [kept.prompt_id for kept in drawn.groups]]
    assert with_little
    for drawn in with_little:
        weights = {kept.prompt_id: weight for kept, weight in zip(drawn.groups, drawn.weights, strict=True)}
        assert weights.get("much", 1.0) == pytest.approx(5 / 6, rel=1e-3)


def test_priorities_follow_what_was_learned() -> None:
    buffer = buffer_of([group(1, 1.0, name) for name in "abc"])
    buffer.learned(Drawn([], [], []), [])
    assert [kept.priority for kept in buffer.groups] == [1.0] * 3
    buffer.learned(Drawn([buffer.groups[2], buffer.groups[0]], [1.0, 1.0], [2, 0]), [0.25, 3.0])
    assert [(kept.prompt_id, kept.priority) for kept in buffer.groups] == [("a", 3.0), ("b", 1.0), ("c", 0.25)]
    # One that came twice and taught nothing is no longer kept.
    buffer.learned(Drawn([buffer.groups[1]] * 2, [1.0] * 2, [1, 1]), [0.0, 0.0])
    assert [kept.prompt_id for kept in buffer.groups] == ["a", "c"]


def test_it_comes_back_from_its_file_and_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    buffer = buffer_of([group(1, 0.3), group(2, 1e-17)])
    buffer.save(tmp_path)
    other = buffer_of([], capacity_groups=2)
    other.load(tmp_path)
    assert other.groups == buffer.groups
    saved = json.loads((tmp_path / REPLAY_FILE).read_text())
    no_advantage = {"version": 1, "groups": [{**saved["groups"][0], "priority": 0.0}]}
    for broken in ({**saved, "version": 2}, {"version": 1}, no_advantage):
        (tmp_path / REPLAY_FILE).write_text(json.dumps(broken))
        with pytest.raises(ArtifactError, match=REPLAY_FILE):
            other.load(tmp_path)
    (tmp_path / REPLAY_FILE).unlink()
    with pytest.raises(ArtifactError, match=f"holds no readable {REPLAY_FILE}"):
        other.load(tmp_path)


REPLAY = {"capacity_groups": 6, "groups_per_step": 2, "max_staleness_steps": 2, "sampling": {"kind": "prioritised"}}


def config_of(rl_stage: Any, **others: Any) -> dict[str, Any]:
    return small_config(rl_stage, **{"num_steps": 5, "replay": REPLAY, **others})


def test_a_replayed_answer_is_compared_with_the_policy_that_sampled_it(
    model: Path, rl_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the checkpoint itself, which sampled step 1: not with the policy of step 2, as fresh answers are."""
    seen: dict[int, tuple[Any, Any]] = {}
    original = PolicyUpdater.optimizer_update

    def spy(self: PolicyUpdater, step: int, number: int, rows: Any, signal: Any, sums: Any) -> Any:
        seen[step] = (signal, self.before_updates(signal.batch).logprobs)
        return original(self, step, number, rows, signal, sums)

    monkeypatch.setattr(PolicyUpdater, "optimizer_update", spy)
    rl_stage.run(tmp_path, model, config_of(rl_stage, num_steps=2))
    signal, now = seen[2]
    assert signal.is_fresh.tolist() == [True] * 32 + [False] * 16
    mask = signal.mask
    fresh, replayed = mask & signal.is_fresh[:, None], mask & ~signal.is_fresh[:, None]
    torch.testing.assert_close(signal.old_logprobs[fresh], now[fresh], rtol=0, atol=0)
    assert torch.equal(signal.old_logprobs[replayed], signal.batch.sampler_logprobs[replayed])
    assert float((signal.old_logprobs - now)[replayed].abs().max()) > 0.01
    of_groups = signal.row_weights.reshape(6, 8)
    assert torch.equal(of_groups, of_groups[:, :1].expand(6, 8))
    assert of_groups[:4].unique().tolist() == [1.0]
    # By hand, of the advantages of step 1: none of the four groups was without.
    learned = seen[1][0].advantages.double().abs().reshape(4, -1).sum(dim=1)
    rates = (learned / seen[1][0].batch.mask.reshape(4, -1).sum(dim=1)) ** 0.6
    likely = (rates.sum() / (4 * rates)).float().tolist()
    assert all(any(weight == pytest.approx(w, rel=1e-6) for w in likely) for weight in of_groups[4:, 0].tolist())
    start = load_causal_lm(model)
    with torch.no_grad():
        for row in range(32, 48):
            prompt, answer = signal.batch.prompts[row], signal.batch.answers[row]
            logits = start(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
            torch.testing.assert_close(signal.old_logprobs[row, : len(answer)], expected, rtol=0, atol=1e-4)


def test_a_drawn_groups_weight_multiplies_its_policy_loss_and_no_other_term(rl_stage: Any) -> None:
    kl = {"placement": "loss", "coefficient": 0.1, "estimator": "k3_ratio"}
    config = PolicyStageConfig.model_validate(config_of(rl_stage, kl=kl)).algorithm
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(6)]
    mask, weights = torch.ones(3, 4, dtype=torch.bool), torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)

    def losses(row_weights: Any, coefficient: float) -> torch.Tensor:
        logprobs, entropy, old, sampler, reference, advantages = values
        inputs = TokenInputs(logprobs, entropy, old, sampler, reference, advantages, mask, row_weights)
        return token_losses(config, build_policy_loss(config.loss), coefficient, inputs).losses

    torch.testing.assert_close(losses(weights, 0.0), losses(None, 0.0) * weights[:, None])
    kl_alone = losses(None, 0.1) - losses(None, 0.0)
    torch.testing.assert_close(losses(weights, 0.1), losses(weights, 0.0) + kl_alone)


def test_metrics_and_learning_with_replay(model: Path, rl_stage: Any, tmp_path: Path) -> None:
    rl_stage.run(tmp_path, model, config_of(rl_stage, num_steps=10))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["replay/num_drawn_groups"] for row in rows] == [0, *[2] * 9]
    # Six kept of the eight of two steps.
    assert [row["replay/num_kept_groups"] for row in rows] == [0, 4, *[6] * 8]
    assert "replay/staleness_mean_steps" not in rows[0]
    assert all(1.0 <= row["replay/staleness_mean_steps"] <= 2.0 for row in rows[1:])
    # Replayed answers are no business of the engine's: of other weights, they would look like a mismatch.
    assert max(row["rollout/sampler_trainer_kl_nats"] for row in rows) < 1e-6
    assert max(abs(row["policy/ratio_mean"] - 1.0) for row in rows) > 0.01
    assert sum(row["reward/mean"] for row in rows[-3:]) / 3 > 0.85


def test_a_kept_groups_priority_is_its_mean_absolute_advantage(model: Path, rl_stage: Any, tmp_path: Path) -> None:
    config = config_of(rl_stage, num_steps=1, advantage={"kind": "group_centred"})
    rl_stage.run(tmp_path, model, config)
    saved = json.loads((tmp_path / "checkpoints" / "step_000001" / REPLAY_FILE).read_text())
    assert len(saved["groups"]) == 4
    for kept in saved["groups"]:
        scores = [answer["score"] for answer in kept["answers"]]
        lengths = [len(answer["token_ids"]) for answer in kept["answers"]]
        mean = sum(scores) / len(scores)
        total = sum(abs(score - mean) * length for score, length in zip(scores, lengths, strict=True))
        assert kept["priority"] == pytest.approx(total / sum(lengths), rel=1e-5)
        assert kept["step"] == 1


def test_effective_sample_counts_fresh_tokens_only(rl_stage: Any) -> None:
    """Two fresh tokens with weights 0.5 and 1.5: 4 / (2 * 2.5), whatever was replayed beside them."""
    config = PolicyStageConfig.model_validate(config_of(rl_stage, importance_correction={"mode": "truncate"})).algorithm
    logprobs = torch.zeros(2, 2, dtype=torch.float64)
    sampler = -torch.tensor([[0.5, 1.5], [0.25, 1.75]], dtype=torch.float64).log()
    mask, is_fresh = torch.ones(2, 2, dtype=torch.bool), torch.tensor([True, False])
    inputs = TokenInputs(logprobs, logprobs, logprobs, sampler, None, logprobs, mask, is_fresh=is_fresh)
    sums = MetricSums()
    add_policy_metrics(sums, inputs, token_losses(config, build_policy_loss(config.loss), 0.0, inputs))
    means = sums.means()
    assert means["importance/weight_mean"] == pytest.approx(1.0, rel=1e-12)
    fraction = effective_sample_fraction(means)["importance/effective_sample_fraction"]
    assert fraction == pytest.approx(0.8, rel=1e-12)


class KilledError(BaseException):
    """What a kill looks like from inside."""


@pytest.mark.parametrize("kind", ["uniform", "prioritised"])
def test_killed_and_continued_gives_the_same_bits(
    model: Path, rl_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    replay = {**REPLAY, "sampling": {"kind": kind}}
    # Its advantages depend on the whole step's: priorities change.
    config = config_of(rl_stage, name="reinforce_plus_plus", replay=replay, checkpoint_every_steps=2)
    whole, left, original = tmp_path / "whole", tmp_path / "left", PolicyTrainer.train_step
    summary = rl_stage.run(whole, model, config)

    def killing(self: PolicyTrainer, step: int) -> Any:
        record = original(self, step)
        if step == 3:
            shutil.copytree(tmp_path / "killed", left)
            raise KilledError
        return record

    with monkeypatch.context() as patch:
        patch.setattr(PolicyTrainer, "train_step", killing)
        with pytest.raises(KilledError):
            rl_stage.run(tmp_path / "killed", model, config)
        lost = tmp_path / "lost"
        shutil.copytree(left, lost)
    assert rl_stage.run(left, model, config) == summary
    assert (left / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    (checkpoint,) = (lost / "checkpoints").iterdir()
    (checkpoint / REPLAY_FILE).unlink()
    with pytest.raises(ArtifactError):
        rl_stage.run(lost, model, config)
