"""Aliases that somebody else moves at the same moment: below another root, where no lock of ours reaches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.mlflow_store import StoreLocation
from tasks.promotion import DEMOTED_BY_TAG, GATE_TAG, PROMOTED_FROM_TAG, WEIGHTS_TAG, promote
from training_core.errors import NotPromotableError

NAME = "policy"


class Registry:
    """The few calls of an MLflow client that a promotion makes; `before` is called before each."""

    def __init__(self, champion: str | None, before: Callable[[Registry, str, tuple[Any, ...]], None]) -> None:
        self.aliases = {"champion": champion} if champion else {}
        self.versions = {
            number: SimpleNamespace(name=NAME, version=number, tags={WEIGHTS_TAG: f"weights-{number}", GATE_TAG: "g"})
            for number in ("1", "2", "3")
        }
        self._before = before

    def get_registered_model(self, name: str) -> Any:
        self._before(self, "read", ())
        return SimpleNamespace(aliases=dict(self.aliases))

    def get_model_version(self, name: str, number: str) -> Any:
        return self.versions[number]

    def set_registered_model_alias(self, name: str, alias: str, number: str) -> None:
        self.aliases[alias] = number
        self._before(self, "after alias", (alias,))

    def set_model_version_tag(self, name: str, number: str, key: str, value: str) -> None:
        self._before(self, "tag", (key,))
        self.versions[number].tags[key] = value


def promote_second(registry: Any, tmp_path: Path, judged: str | None) -> list[str]:
    location = StoreLocation("http://127.0.0.1:9", None, tmp_path / "mlflow.lock")
    return promote(registry, location, registry.versions["2"], judged_sha256=judged, scratch=tmp_path)


def test_an_undisturbed_promotion(tmp_path: Path) -> None:
    registry = Registry("1", lambda *_arguments: None)
    assert promote_second(registry, tmp_path, "weights-1") == ["challenger", "champion"]
    assert registry.aliases == {"challenger": "2", "champion": "2", "previous": "1"}
    assert registry.versions["2"].tags[PROMOTED_FROM_TAG] == "1"


def test_a_champion_of_the_same_weights_does_not_become_the_previous_one(tmp_path: Path) -> None:
    registry = Registry("1", lambda *_arguments: None)
    registry.aliases["previous"] = "3"
    registry.versions["1"].tags[WEIGHTS_TAG] = "weights-2"
    assert promote_second(registry, tmp_path, "weights-3") == ["challenger", "champion"]
    assert registry.aliases == {"challenger": "2", "champion": "2", "previous": "3"}
    assert registry.versions["2"].tags[PROMOTED_FROM_TAG] == "1"
    assert DEMOTED_BY_TAG not in registry.versions["1"].tags


@pytest.mark.parametrize("champion", ["1", None])
def test_a_champion_that_moves_after_the_comparison_is_left_alone(tmp_path: Path, champion: str | None) -> None:
    def intrude(registry: Registry, what: str, arguments: tuple[Any, ...]) -> None:
        if (what, *arguments) == ("tag", PROMOTED_FROM_TAG):  # The comparison is over, the alias not yet moved.
            registry.aliases["champion"] = "3"

    registry = Registry(champion, intrude)
    with pytest.raises(NotPromotableError, match="someone else moved it"):
        promote_second(registry, tmp_path, f"weights-{champion}" if champion else None)
    assert registry.aliases["champion"] == "3"


def test_a_champion_that_is_replaced_at_once_is_not_reported_as_ours(tmp_path: Path) -> None:
    reads_since = [-1]

    def intrude(registry: Registry, what: str, arguments: tuple[Any, ...]) -> None:
        if (what, *arguments) == ("after alias", "champion"):
            reads_since[0] = 0
        elif what == "read" and reads_since[0] >= 0:
            reads_since[0] += 1
            if reads_since[0] == 2:  # After the alias was set and read back once.
                registry.aliases["champion"] = "3"

    with pytest.raises(NotPromotableError, match="reads 3"):
        promote_second(Registry("1", intrude), tmp_path, "weights-1")
