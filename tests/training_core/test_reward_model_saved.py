"""What the stage `reward_model` saves, measures and hands on is one function, and no cut answer gains by it."""

from __future__ import annotations

import itertools
import json
import weakref
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch

from training_core.config.reward_model import RewardModelConfig
from training_core.config.rewards import RewardModelReward
from training_core.data.tables import build_pair_table
from training_core.models.heads import load_reward_model, score_token_ids
from training_core.models.loading import load_tokenizer
from training_core.protocol.context import StageContext
from training_core.protocol.digests import path_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageSpec, StopReason
from training_core.reward_modelling import measure, members
from training_core.rewards.base import RewardContext
from training_core.rewards.model import load_reward_part
from training_core.stages import reward_model as stage

GOOD = ("good", "happy", "warm", "wonderful")
BAD = ("bad", "sad", "cold", "terrible")
THINGS = ("sea", "rain", "train", "bread", "street", "book")


def write_pairs(path: Path, side: str, things: tuple[str, ...]) -> Path:
    """Write a pair for each thing and each word: the chosen answer has a good word."""
    rows = [
        {
            "example_id": f"{side}{i}",
            "group_id": f"{side}{i}",
            "prompt_messages": [{"role": "user", "content": f"Tell me about {side} {i}."}],
            "chosen_messages": [{"role": "assistant", "content": f"The {thing} is {good}, so {good}."}],
            "rejected_messages": [{"role": "assistant", "content": f"The {thing} is {bad}."}],
            "margin": 1.0,
        }
        for i, (thing, (good, bad)) in enumerate(itertools.product(things, zip(GOOD, BAD, strict=True)))
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="module")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    return {
        "model": tiny_checkpoint,
        "train_pairs": write_pairs(folder / "train.parquet", "train", THINGS),
        "validation_pairs": write_pairs(folder / "validation.parquet", "validation", THINGS[:3]),
    }


def make_context(path: Path, inputs: dict[str, Path], **options: object) -> StageContext:
    values = {"optimizer": {"learning_rate": 1e-3}, "batch_size": 8, "num_epochs": 2, "autocast": "none"}
    config = RewardModelConfig.model_validate({**values, **options}).model_dump(mode="json")
    artifacts = {name: Artifact(path=str(p), sha256=path_digest(p)) for name, p in inputs.items()}
    spec = StageSpec(stage="reward_model", stage_version=2, config=config, inputs=artifacts, seed=3)
    directory = StageDirectory(path)
    directory.prepare(spec)
    return StageContext(spec, directory)


@pytest.fixture(scope="module")
def finished(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "saved"
    stage.run(make_context(path, inputs))
    return path


def validation_ids(inputs: dict[str, Path], which: str) -> list[list[int]]:
    tokenizer, path = load_tokenizer(inputs["model"]), inputs["model"].parent / "validation.arrow"
    pairs = build_pair_table(inputs["validation_pairs"], tokenizer, 512, path)
    return list(getattr(pairs, which))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_reported_is_measured_with_the_function_that_gives_rewards(
    inputs: dict[str, Path], tmp_path: Path, dtype: str
) -> None:
    """Below bfloat16's resolution lies much of what a small learning rate changes."""
    options = {"optimizer": {"learning_rate": 1e-4}, "dtype": dtype, "max_tokens_per_batch": 2048}
    summary = stage.run(make_context(tmp_path, inputs, **options)).summary
    output = tmp_path / "outputs" / "reward_model"
    sequences = validation_ids(inputs, "chosen") + validation_ids(inputs, "rejected")
    rewards = load_reward_part(RewardModelReward(kind="reward_model"), output, inputs["model"], torch.device("cpu"))
    about = RewardContext([1] * 24, [StopReason.EOS] * 24, [{}] * 24, max_new_tokens=8, sequences=sequences)
    found = numpy.array(rewards([[]] * 24, [""] * 24, about))
    # The reward is in standard deviations from the mean over just these answers.
    assert (found.mean(), found.std()) == (pytest.approx(0.0, abs=1e-12), pytest.approx(1.0, abs=1e-12))
    margins = found[:12] - found[12:]
    assert summary["accuracy"] == (margins > 0).mean() + 0.5 * (margins == 0).mean()
    assert summary["margin_mean"] == pytest.approx(margins.mean() * summary["score_std"], abs=1e-12)
    model = load_reward_model(output)
    assert (model.dtype, summary["dtype"]) == (getattr(torch, dtype), dtype)
    assert json.loads((output / "config.json").read_text())["dtype"] == dtype
    stored = json.loads((output / "reward_config.json").read_text())
    outside = ("weights_sha256", "acceptance")
    assert {name: stored[name] for name in summary if name not in outside} == {
        name: value for name, value in summary.items() if name not in outside
    }


def test_the_trained_weights_are_gone_before_the_saved_ones_are_loaded(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    new, load = members.new_reward_model, measure.load_reward_model

    def remember(*arguments: Any) -> Any:
        model = new(*arguments)
        trained.extend(weakref.ref(parameter) for parameter in model.parameters())
        return model

    def count(*arguments: Any) -> Any:
        alive.append(sum(reference() is not None for reference in trained))
        return load(*arguments)

    monkeypatch.setattr(members, "new_reward_model", remember)
    monkeypatch.setattr(measure, "load_reward_model", count)
    stage.run(make_context(tmp_path, inputs, num_epochs=1))
    assert len(trained) > 10
    assert alive == [0]


def test_a_bad_answer_gains_nothing_by_not_ending(inputs: dict[str, Path], finished: Path) -> None:
    """Read at an ordinary token, a trained model says nearly the same of every answer: the bad ones would gain."""
    output = finished / "outputs" / "reward_model"
    rewards = load_reward_part(RewardModelReward(kind="reward_model"), output, inputs["model"], torch.device("cpu"))
    bad = validation_ids(inputs, "rejected")

    def scores(sequences: list[list[int]], reason: StopReason) -> list[float | None]:
        size = len(sequences)
        about = RewardContext([1] * size, [reason] * size, [{}] * size, max_new_tokens=8, sequences=sequences)
        return rewards([[]] * size, [""] * size, about)

    ended, cut = scores(bad, StopReason.EOS), scores([ids[:-1] for ids in bad], StopReason.LENGTH)
    assert cut == ended
    model = load_reward_model(output)
    elsewhere = [model.normalise(s) for s in score_token_ids(model, [ids[:-1] for ids in bad], 3)]
    assert numpy.mean(elsewhere) > numpy.mean(numpy.array(ended)) + 0.3
