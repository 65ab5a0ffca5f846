"""The example configs are valid, and say what they claim to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.config import PipelineConfig
from training_core.config.loader import load_layer, validate_layer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def dump(name: str) -> dict[str, Any]:
    return validate_layer(PipelineConfig, load_layer([EXAMPLES / name])).model_dump(mode="json")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_valid(path: Path) -> None:
    assert validate_layer(PipelineConfig, load_layer([path])).name == path.stem


def test_hacked_is_the_demo_without_kl_term_and_penalty() -> None:
    demo, hacked = dump("demo.yaml"), dump("hacked.yaml")
    assert demo["algorithm"]["kl"]["placement"] == "loss"
    assert hacked["algorithm"]["kl"]["placement"] == "none"
    assert [reward["kind"] for reward in demo["rewards"]] == ["reward_model", "soft_overlong"]
    assert [reward["kind"] for reward in hacked["rewards"]] == ["reward_model"]
    hacked["algorithm"]["kl"], hacked["rewards"] = demo["algorithm"]["kl"], demo["rewards"]
    assert {**hacked, "name": "demo"} == demo
