"""The example configs are valid, and say what they claim to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from tasks.config import PipelineConfig
from training_core.config.algorithms import AlgorithmConfig
from training_core.config.loader import load_layer, validate_layer
from training_core.config.preference import CustomPairLoss, PairLossConfig

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
COMMON = EXAMPLES / "algorithms" / "common.yaml"
ALGORITHMS = sorted(path for path in COMMON.parent.glob("*.yaml") if path != COMMON)


def dump(name: str) -> dict[str, Any]:
    return validate_layer(PipelineConfig, load_layer([EXAMPLES / name])).model_dump(mode="json")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_valid(path: Path) -> None:
    assert validate_layer(PipelineConfig, load_layer([path])).name == path.stem


def algorithm_example(path: Path) -> PipelineConfig:
    return validate_layer(PipelineConfig, load_layer([COMMON, path]))


def variants(union: Any, field: str) -> set[str]:
    """Return the names of a discriminated union."""
    models = get_args(get_args(union)[0])
    return {get_args(model.model_fields[field].annotation)[0] for model in models if model is not CustomPairLoss}


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.name)
def test_every_example_of_an_algorithm_is_valid_over_the_common_part(path: Path) -> None:
    config = algorithm_example(path)
    assert config.name == path.stem.replace("_", "-")
    # A model of its own: the verdict does not depend on which example ran before and became champion.
    assert config.registry.model_name == f"example-{config.name}"
    # What is there is what it is about: the rest is common, so that twenty files cannot drift apart.
    assert set(load_layer([path]).values) <= {"name", "registry", "algorithm", "reward_model", "rewards"}


def test_every_algorithm_and_loss_has_an_example() -> None:
    algorithms = [algorithm_example(path).algorithm for path in ALGORITHMS]
    assert {algorithm.name for algorithm in algorithms} == variants(AlgorithmConfig, "name")
    losses = {algorithm.loss.kind for algorithm in algorithms if algorithm.name == "dpo"}
    assert losses == variants(PairLossConfig, "kind")
    assert {algorithm.loss.kind for algorithm in algorithms if algorithm.name == "gspo"} == {"gspo", "gspo_token"}


def test_algorithm_examples_share_the_demos_first_stages() -> None:
    demo = dump("demo.yaml")
    for path in ALGORITHMS:
        config = algorithm_example(path).model_dump(mode="json")
        assert (config["seed"], config["checkpoint"], config["data"]) == tuple(
            demo[name] for name in ("seed", "checkpoint", "data")
        )
        assert config["reward_model"] in (None, demo["reward_model"])


def test_hacked_is_the_demo_without_kl_term_and_penalty() -> None:
    demo, hacked = dump("demo.yaml"), dump("hacked.yaml")
    assert demo["algorithm"]["kl"]["placement"] == "loss"
    assert hacked["algorithm"]["kl"]["placement"] == "none"
    assert [reward["kind"] for reward in demo["rewards"]] == ["reward_model", "soft_overlong"]
    assert [reward["kind"] for reward in hacked["rewards"]] == ["reward_model"]
    hacked["algorithm"]["kl"], hacked["rewards"] = demo["algorithm"]["kl"], demo["rewards"]
    assert {**hacked, "name": "demo"} == demo
