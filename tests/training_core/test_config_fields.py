"""Every field of every config model is read by something: an option that nothing reads does nothing.

How the reading is found: tests/scripted/config_reads.py. What it cannot see is in `READ_OTHERWISE`, each with its
reason and, where there is one, a check.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import config_reads
import pytest
from mypy.modulefinder import BuildSource

import training_core.config
from training_core.catalogue import variants
from training_core.config.advantages import AdvantageConfig
from training_core.config.aggregation import AggregationConfig
from training_core.config.base import Config
from training_core.config.kl import KlInLoss, KlInReward
from training_core.config.policy_losses import DapoClippedSurrogate, PolicyLossConfig
from training_core.config.preference import PairLossConfig
from training_core.config.sentinels import SentinelsConfig
from training_core.config.verifiers import CodeTestsReward

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("training_core", "data_checks", "tasks", "flows")
EXAMPLE = """
from pydantic import model_validator
from training_core.config.base import Config

class Example(Config):
    read: int = 1
    by_getattr: int = 1
    by_parsing: int = 1
    by_property: int = 1
    by_unused_property: int = 1
    by_validator: int = 1
    by_another_class: int = 1
    unread: int = 1

    @property
    def used(self) -> int:
        return self.by_property

    @property
    def unused(self) -> int:
        return self.by_unused_property

    @model_validator(mode="after")
    def _check(self) -> "Example":
        assert self.by_validator
        return self

class Other:
    by_another_class: int = 2

def use(config: Example | None, other: Other) -> object:
    if config is None:
        config = Example.model_validate({})
        return Example.model_validate({}).by_parsing
    return [config.read, getattr(config, "by_getattr", 1)], {"used": config.used}, other.by_another_class
"""

Field = tuple[type[Config], str]


def config_models() -> dict[str, type[Config]]:
    """Return full name -> class of every config model of the packages."""
    for package in ("data_checks.config", "tasks.config", "flows.config"):
        importlib.import_module(package)
    for module in pkgutil.walk_packages(training_core.config.__path__, "training_core.config."):
        importlib.import_module(module.name)

    def below(parent: type[Config]) -> Iterator[type[Config]]:
        for child in parent.__subclasses__():
            yield child
            yield from below(child)

    return {name_of(model): model for model in below(Config) if model.__module__.split(".")[0] in PACKAGES}


def name_of(model: type[Config]) -> str:
    return f"{model.__module__}.{model.__qualname__}"


def declared(model: type[Config]) -> list[str]:
    """Return the fields that a class itself declares."""
    return [name for name in model.model_fields if name in model.__annotations__]


def is_discriminator(model: type[Config], name: str) -> bool:
    """Return whether a field has one possible value: pydantic reads it to choose the class."""
    annotation = model.model_fields[name].annotation
    return get_origin(annotation) is Literal and len(get_args(annotation)) == 1


def registered() -> Iterator[tuple[type[Config], Callable[..., Any], set[str]]]:
    """Yield (config, function, parameters that the loop gives) where `model_dump` becomes keyword arguments."""
    from training_core import registries

    tokens = {"logprobs", "old_logprobs", "advantages", "mask"}
    for union, table, given in (
        (AdvantageConfig, registries.ADVANTAGE_ESTIMATORS, {"inputs"}),
        (PolicyLossConfig, registries.POLICY_LOSSES, tokens),
        (AggregationConfig, registries.AGGREGATIONS, {"mask", "group_ids", "all_sum", "num_groups"}),
        (PairLossConfig, registries.PREFERENCE_LOSSES, {"pair"}),
    ):
        for kind, config in variants(union, "kind"):
            if kind != "custom":
                yield config, table[kind], given  # type: ignore[index, misc]
    yield DapoClippedSurrogate, registries.POLICY_LOSSES["clipped_surrogate"], tokens


def read_otherwise() -> dict[Field, str]:
    """Return fields that are read in a way that types do not show, each with how."""
    from training_core.rewards.sandbox import LIMITS
    from training_core.sentinels import CHECKS

    found: dict[Field, str] = {
        (KlInLoss, "objective"): "what is meant by the KL: checked against the estimator when the config is read",
    }
    for config, function, _ in registered():
        for name in inspect.signature(function).parameters:
            found[config, name] = f"a keyword argument of {function.__name__}"
    for name in CHECKS:
        found[SentinelsConfig, name] = "the loop over the sentinels asks for it by name"
    for name in LIMITS:
        found[CodeTestsReward, name] = "the sandbox copies its limits into a job by name"
    return found


@pytest.fixture(scope="module")
def used() -> set[config_reads.Member]:
    models = config_models()
    families = {
        name: {other for other, known in models.items() if issubclass(model, known) or issubclass(known, model)}
        for name, model in models.items()
    }
    families["example.Example"] = {"example.Example"}
    sources = [*config_reads.sources_of(ROOT), BuildSource(None, "example", EXAMPLE)]
    return config_reads.used_members(config_reads.reads_in(sources, families), families)


def unread(fields: list[Field], used: set[config_reads.Member]) -> list[str]:
    """Return the fields that nothing reads."""
    otherwise = read_otherwise()
    return [
        f"{name_of(model)}.{name}"
        for model, name in fields
        if (name_of(model), name) not in used and (model, name) not in otherwise
    ]


def all_fields() -> list[Field]:
    return [
        (model, name)
        for model in config_models().values()
        for name in declared(model)
        if not is_discriminator(model, name)
    ]


def test_every_field_is_read(used: set[config_reads.Member]) -> None:
    fields = all_fields()
    assert len(fields) > 300, "the models were not found"
    assert unread(fields, used) == []


def test_a_field_that_nothing_reads_is_found(used: set[config_reads.Member]) -> None:
    """Its name may well be read of other configs: `marker` is, and so is `clip_low`, but not of these."""
    models = config_models()
    gate, online = models["training_core.config.gate.GateConfig"], models["training_core.config.online.OnlineConfig"]
    assert unread([(gate, "never_read"), (online, "marker"), (online, "clip_low")], used) == [
        "training_core.config.gate.GateConfig.never_read",
        "training_core.config.online.OnlineConfig.marker",
        "training_core.config.online.OnlineConfig.clip_low",
    ]


def test_what_counts_as_reading(used: set[config_reads.Member]) -> None:
    found = {name for owner, name in used if owner == "example.Example"}
    assert found - {"used", "model_validate"} == {"read", "by_getattr", "by_parsing", "by_property"}


def test_what_is_read_otherwise_is_needed(used: set[config_reads.Member]) -> None:
    """An exception that types see by now, or whose field is gone, has to go."""
    fields = all_fields()
    assert (KlInLoss, "objective") in fields
    assert (name_of(KlInLoss), "objective") not in used


@pytest.mark.parametrize("objective", ["forward", "penalty"])
def test_the_objective_of_the_kl_decides_what_is_allowed(objective: str) -> None:
    with pytest.raises(ValueError, match="objective"):
        KlInLoss(placement="loss", coefficient=0.1, objective=objective, estimator="k2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="objective"):
        KlInReward(placement="reward", coefficient=0.1, estimator="k3")


def test_knobs_are_the_functions_parameters() -> None:
    for config, function, given in registered():
        parameters = inspect.signature(function).parameters
        assert set(config.model_fields) - {"kind"} == set(parameters) - given, config


def choices(model: type[Config]) -> Iterator[tuple[str, str]]:
    """Yield (field, value) of every value but the default that a field of words may have."""
    for name in declared(model):
        field = model.model_fields[name]
        options = [field.annotation, *get_args(field.annotation)]
        values = [value for option in options if get_origin(option) is Literal for value in get_args(option)]
        yield from ((name, value) for value in values if isinstance(value, str) and value != field.default)


def words_of_tests() -> list[set[str]]:
    """Return the words of each test file's texts and keyword arguments, and of each example config."""
    found = [set(re.findall(r"\w+", path.read_text(encoding="utf-8"))) for path in (ROOT / "examples").rglob("*.yaml")]
    for path in (ROOT / "tests").rglob("*.py"):
        if path == Path(__file__):
            continue
        words: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words |= set(re.findall(r"\w+", node.value))
            elif isinstance(node, ast.keyword) and node.arg:
                words.add(node.arg)
        found.append(words)
    return found


def test_every_choice_occurs_in_a_test_of_its_field() -> None:
    """A new value that no test names beside its field is found; that a test runs it is that test's business."""
    files = words_of_tests()
    pairs = {pair for model in config_models().values() for pair in choices(model)}
    assert {("layout", "packed"), ("estimator", "k3_ratio"), ("kind", "gspo_token")} <= pairs
    assert sorted(pair for pair in pairs if not any(set(pair) <= words for words in files)) == []
    assert not any({"layout", "never_there"} <= words for words in files)
