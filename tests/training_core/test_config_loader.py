"""The YAML loader: layers, settings, and messages that say where and what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, field_validator

from training_core.config.base import Config
from training_core.config.loader import json_schema, load_config, load_layer
from training_core.errors import ConfigurationError


class Alpha(Config):
    kind: Literal["alpha"]
    rate: float = Field(default=1.0, gt=0)
    """How fast."""


class Beta(Config):
    kind: Literal["beta"]
    number: int = 3

    @field_validator("number")
    @classmethod
    def _odd(cls, number: int) -> int:
        if number % 2 == 0:
            raise ValueError(f"number must be odd, got {number}")
        return number


Choice = Annotated[Alpha | Beta, Field(discriminator="kind")]


class Top(Config):
    name: str = "n"
    choice: Choice
    many: list[Choice] = Field(default_factory=list)
    maybe: Choice | None = None
    mode: Literal["one", "two"] = "one"
    flag: bool = True
    either: int | str = 1
    table: dict[str, Alpha] = Field(default_factory=dict)
    only: Annotated[Alpha, Field(discriminator="kind")] = Alpha(kind="alpha")


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def _write(text: str, name: str = "a.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return _write


def problems(files: list[Path], settings: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_config(Top, files, settings)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_layers_merge_deeply_and_lists_are_replaced(write) -> None:  # type: ignore[no-untyped-def]
    first = write("choice: {kind: alpha, rate: 1e-6}\nmany: [{kind: alpha}, {kind: beta}]\nname: first\n")
    second = write("choice: {rate: 2}\nmany: [{kind: beta}]\n", "b.yaml")
    config = load_config(Top, [first, second], ["name='1'", "many.0.number=5"])
    assert config.choice == Alpha(kind="alpha", rate=2.0)
    assert config.many == [Beta(kind="beta", number=5)]
    assert config.name == "1"


def test_an_unquoted_exponent_is_a_number(write) -> None:  # type: ignore[no-untyped-def]
    config = load_config(Top, [write("choice: {kind: alpha, rate: 1e-6}")])
    assert isinstance(config.choice, Alpha)
    assert config.choice.rate == 1e-6


def test_a_number_written_as_text_is_refused_with_advice(write) -> None:  # type: ignore[no-untyped-def]
    text = problems([write('choice:\n  kind: alpha\n  rate: "1e-6"\n')])
    assert "a.yaml:3: choice.rate" in text
    assert "write 1e-6 without quotes" in text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("choice: {kind: alpha}\nonly: {kind: alpha, rat: 1}", ["a.yaml:2: only.rat", "Did you mean 'rate'"]),
        ("choice: {kind: alpha}\nnmae: x", ["a.yaml:2: nmae: unknown key", "Did you mean 'name'?"]),
        ("choice: {kind: alhpa}", ["choice: 'alhpa'", "alpha, beta", "Did you mean 'alpha'?"]),
        ("choice: {rate: 1}", ["says no `kind`", "alpha, beta"]),
        ("name: x", ["choice: is required", "`kind` one of alpha, beta"]),
        ("choice: {kind: alpha, number: 1}", ["choice.number: unknown key", "kind, rate"]),
        ("choice: {kind: beta, number: 2.0}", ["choice.number: 2.0", "write 2"]),
        ("choice: {kind: beta, number: 4}", ["choice.number: number must be odd, got 4"]),
        ("choice: {kind: alpha, rate: -1}", ["choice.rate: -1", "greater than 0"]),
        ("choice: {kind: alpha}\nname: 3", ["name: 3", 'Write it in quotes: "3"']),
        ("choice: {kind: alpha}\nflag: yes", ["flag: 'yes'", "Write true or false"]),
        ("choice: {kind: alpha}\nmode: tow", ["mode: 'tow' is not one of one, two", "Did you mean 'two'?"]),
        ("choice: {kind: alpha}\nmany:\n- kind: alpha\n- kind: beta\n  x: 1", ["a.yaml:5: many.1.x: unknown key"]),
        ("choice: {kind: alpha}\nmaybe: {kind: beta, number: a}", ["maybe.number: 'a'", "Write a number"]),
        ("choice: {kind: alpha}\ntable: {t: {kind: alpha, rate: no}}", ["table.t.rate: 'no'"]),
        ("choice: {kind: alpha}\neither: 1.5", ["either: 1.5", " or: "]),
        ("choice: {kind: alpha, rate: .inf}", ["a.yaml:1: choice.rate is .inf", "finite"]),
        ("name: a\nname: b", ["a.yaml:2: name is given twice", "first at", "a.yaml:1"]),
        ("base: &b {kind: alpha}\nchoice:\n  <<: *b", ["a.yaml:3", "not YAML 1.2"]),
        ("name: [", ["a.yaml:", "not valid YAML"]),
        ("- 1", ["top level must be"]),
        ("1: 2", ["a key must be plain text"]),
        ("a: &x [*x]", ["contains itself"]),
        ("name: !!python/object:os.system x", ["a.yaml:1: name"]),
    ],
)
def test_messages(write, text: str, wanted: list[str]) -> None:  # type: ignore[no-untyped-def]
    message = problems([write(text)])
    assert all(part in message for part in wanted), message


def test_all_problems_come_at_once_with_the_file_that_caused_each(write) -> None:  # type: ignore[no-untyped-def]
    first = write("choice: {kind: alpha, rate: 0}\nmode: three\n")
    second = write("flag: maybe\n", "b.yaml")
    message = problems([first, second])
    assert "3 problems" in message
    assert "a.yaml:1: choice.rate" in message
    assert "a.yaml:2: mode" in message
    assert "b.yaml:1: flag" in message


def test_settings_create_sections_and_name_themselves_in_errors(write) -> None:  # type: ignore[no-untyped-def]
    file = write("choice: {kind: alpha}\nmaybe: null\nmany: [{kind: alpha}]")
    config = load_config(Top, [file], ["maybe.kind=beta", "maybe.number=7", "table={t: {kind: alpha}}"])
    assert config.maybe == Beta(kind="beta", number=7)
    assert config.table["t"].rate == 1.0
    assert "--set choice.rate: choice.rate: 'x'" in problems([file], ("choice.rate=x",))


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("choice", "path.to.field=value"),
        ("=3", "path.to.field=value"),
        ("many.5.kind=alpha", "an index (0 to 0)"),
        ("many.first=alpha", "not 'first'"),
        ("choice.kind.x=1", "has no field 'x'"),
        ("name=[", "--set name: not valid YAML"),
    ],
)
def test_bad_settings(write, setting: str, wanted: str) -> None:  # type: ignore[no-untyped-def]
    assert wanted in problems([write("choice: {kind: alpha}\nmany: [{kind: alpha}]")], (setting,))


def test_a_missing_file_names_the_nearest(write) -> None:  # type: ignore[no-untyped-def]
    file = write("choice: {kind: alpha}", "pipeline.yaml")
    assert "Did you mean" in problems([file.with_name("pipline.yaml")])


def test_an_empty_file_is_an_empty_layer_and_dates_stay_text(write) -> None:  # type: ignore[no-untyped-def]
    layer = load_layer([write("# nothing\n"), write("name: 2026-01-01\n", "b.yaml")])
    assert layer.values == {"name": "2026-01-01"}
    assert layer.origin(("name",)).endswith("b.yaml:1")


def test_the_schema_holds_descriptions() -> None:
    schema = json_schema(Top)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["$defs"]["Alpha"]["properties"]["rate"]["description"] == "How fast."
