"""Dynamic sampling in real training: bounded, on mixed groups alone, whole without any, the same bits after a kill."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_tasks import build_small_checkpoint, reward, small_config, write_numbered_prompts

from training_core.metrics import read_metrics
from training_core.records import Message, PromptRow
from training_core.rl.sampling import Sampler, ScoredGroup
from training_core.rl.signal import ScoredBatch
from training_core.rl.trainer import PolicyTrainer
from training_core.rl.update import PolicyUpdater

NUM_PROMPTS = 20
WANTED = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def numbered(rl_stage: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A stage on 20 numbered prompts."""
    path = write_numbered_prompts(tmp_path_factory.mktemp("numbered") / "prompts.parquet", NUM_PROMPTS)
    return replace(rl_stage, prompts=path, num_prompts=NUM_PROMPTS)


@pytest.fixture
def learned_from(monkeypatch: pytest.MonkeyPatch) -> list[ScoredBatch]:
    """What each step's update was given."""
    seen: list[ScoredBatch] = []
    original = PolicyUpdater.update

    def spy(self: PolicyUpdater, step: int, scored: ScoredBatch, coefficient: float) -> Any:
        seen.append(scored)
        return original(self, step, scored, coefficient)

    monkeypatch.setattr(PolicyUpdater, "update", spy)
    return seen


def config_of(stage: Any, every: int, max_rounds: int | None = 3, **others: Any) -> dict[str, Any]:
    """Return a run in which one prompt in `every` has answers with different scores."""
    some = reward("low_ids_for_some", parameters={"every": every})
    dynamic = None if max_rounds is None else {"max_rounds": max_rounds}
    values = {"num_steps": 4, "prompts_per_step": WANTED, "dynamic_sampling": dynamic, **others}
    return small_config(stage, some, **values)


def num_groups(scored: ScoredBatch) -> int:
    return int(scored.group_ids.max()) + 1


def test_few_mixed_groups_end_within_the_bound_and_are_trained_on(
    model: Path, numbered: Any, tmp_path: Path, learned_from: list[ScoredBatch]
) -> None:
    """Faults 40 and 41: nine prompts in ten teach nothing. Two of 20 do, so a step can never fill its four."""
    rows = run(numbered, tmp_path, model, config_of(numbered, every=10))
    mixed = [step for step, row in enumerate(rows) if row["rollout/kept_group_fraction"] > 0.0]
    assert len(mixed) >= 2
    for step, (row, scored) in enumerate(zip(rows, learned_from, strict=True)):
        assert row["rollout/num_rounds"] == 3
        assert row["reward/missing_fraction"] == 0.0
        if step in mixed:
            assert row["train/num_updates"] == 1
            assert row["rollout/zero_variance_group_fraction"] == 0.0
            assert row["rollout/kept_group_fraction"] == num_groups(scored) / (3 * WANTED)
            assert row["policy/grad_norm"] < 10.0  # No spike: nothing is divided by a spread of rounding errors.
            assert len(scored.batch) == 8 * num_groups(scored)
            assert 1 <= num_groups(scored) <= 2
    # The mean is over all that was sampled, left-out groups too: mostly the constant.
    assert all(abs(row["reward/mean"] - 0.7) < 0.1 for row in rows)


def run(stage: Any, path: Path, model: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    stage.run(path, model, config)
    return read_metrics(path / "metrics.jsonl")


def test_enough_mixed_groups_take_one_round(
    model: Path, numbered: Any, tmp_path: Path, learned_from: list[ScoredBatch]
) -> None:
    rows = run(numbered, tmp_path, model, config_of(numbered, every=1, num_steps=2))
    assert [row["rollout/num_rounds"] for row in rows] == [1, 1]
    assert [row["rollout/kept_group_fraction"] for row in rows] == [1.0, 1.0]
    assert [num_groups(scored) for scored in learned_from] == [WANTED, WANTED]


def test_a_refill_stops_as_soon_as_the_step_is_full(
    model: Path, numbered: Any, tmp_path: Path, learned_from: list[ScoredBatch]
) -> None:
    """Half of the prompts teach: more than one round, seldom all five, and never more groups than asked for."""
    rows = run(numbered, tmp_path, model, config_of(numbered, every=2, max_rounds=5, num_steps=6))
    rounds = [row["rollout/num_rounds"] for row in rows]
    assert min(rounds) >= 2
    assert max(rounds) <= 5
    assert sum(rounds) < 5 * 6
    assert {num_groups(scored) for scored in learned_from} == {WANTED}
    for row, number in zip(rows, rounds, strict=True):
        assert row["rollout/kept_group_fraction"] == WANTED / (number * WANTED)


def test_without_any_mixed_group_the_step_is_whole_and_changes_nothing(
    model: Path, numbered: Any, tmp_path: Path, learned_from: list[ScoredBatch]
) -> None:
    config = config_of(numbered, every=1000, num_steps=2)
    config["rewards"] = [reward("equal")]
    summary = numbered.run(tmp_path, model, config)
    for row, scored in zip(read_metrics(tmp_path / "metrics.jsonl"), learned_from, strict=True):
        assert row["train/num_updates"] == 0
        assert row["rollout/num_rounds"] == 3
        assert row["rollout/kept_group_fraction"] == 0.0
        assert row["rollout/zero_variance_group_fraction"] == 1.0
        assert row["reward/mean"] == pytest.approx(0.7, rel=1e-15)
        assert num_groups(scored) == WANTED
    assert summary["weights_sha256"] == summary["reference_weights_sha256"]


def test_prompts_run_out_before_the_rounds_do(model: Path, rl_stage: Any, tmp_path: Path) -> None:
    """Five prompts: a round of four, one of the fifth alone, and no third."""
    config = small_config(
        rl_stage, reward("equal"), num_steps=1, prompts_per_step=4, dynamic_sampling={"max_rounds": 9}
    )
    (row,) = run(rl_stage, tmp_path, model, config)
    assert row["rollout/num_rounds"] == 2


def test_one_round_is_no_refill(model: Path, numbered: Any, tmp_path: Path) -> None:
    rows = run(numbered, tmp_path, model, config_of(numbered, every=2, max_rounds=1))
    assert {row["rollout/num_rounds"] for row in rows} == {1}
    plain = run(numbered, tmp_path / "plain", model, config_of(numbered, every=2, max_rounds=None))
    assert "rollout/num_rounds" not in plain[0]


def test_a_step_asks_no_prompt_twice_and_no_answer_with_the_seed_of_another(
    model: Path, numbered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, list[Any]] = {}
    original = Sampler.make_requests

    def spy(self: Sampler, step: int, *arguments: Any) -> Any:
        found = original(self, step, *arguments)
        seen.setdefault(step, []).extend(found)
        return found

    monkeypatch.setattr(Sampler, "make_requests", spy)
    run(numbered, tmp_path, model, config_of(numbered, every=10, num_steps=3))
    refills = []
    for requests in seen.values():
        prompts = [request.prompt_id for request in requests[::8]]
        assert len(set(prompts)) == len(prompts) == 3 * WANTED
        refills.append(prompts[WANTED:])
    assert refills[0] != refills[1]
    seeds = [request.seed for requests in seen.values() for request in requests]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(
    ("scores", "is_mixed"),
    [
        ([0.7] * 8, False),
        ([0.7] * 7 + [0.7 + 1e-9], True),
        ([0.0, None, 1.0], True),
        ([0.5, None, 0.5], False),
        ([None, 0.5, None], False),
        ([None, None], False),
    ],
)
def test_a_group_is_mixed_where_two_scores_differ(scores: Sequence[float | None], is_mixed: bool) -> None:
    row = PromptRow(prompt_id="p", prompt=[Message(role="user", content="x")], extra={})
    group = ScoredGroup(row, [], [], [], list(scores), {})
    assert group.is_mixed is is_mixed


class KilledError(BaseException):
    """What a kill looks like from inside."""


@pytest.mark.parametrize("point", ["in a refill", "after a step"])
def test_killed_and_continued_gives_the_same_bits(
    model: Path, numbered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    config = config_of(numbered, every=3, name="dapo", mask_truncated=False, checkpoint_every_steps=2)
    whole, left = tmp_path / "whole", tmp_path / "left"
    summary = numbered.run(whole, model, config)
    owner, method = (Sampler, "sample_groups") if point == "in a refill" else (PolicyTrainer, "train_step")
    original: Any = getattr(owner, method)

    def killing(self: Any, step: int, *arguments: Any) -> Any:
        found = original(self, step, *arguments)
        if step == 3 and (point == "after a step" or arguments[0] > 0):
            shutil.copytree(tmp_path / "killed", left)
            raise KilledError
        return found

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, killing)
        with pytest.raises(KilledError):
            numbered.run(tmp_path / "killed", model, config)
    assert numbered.run(left, model, config) == summary
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (left / name).read_bytes() == (whole / name).read_bytes()
