"""The YAML loader: layers, settings, and messages that say where and what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, field_validator, model_validator

from training_core.config.base import Config
from training_core.config.loader import json_schema, load_layer, validate_layer
from training_core.config.paths import describe_missing, nearest_file, resolved
from training_core.config.patterns import pattern_in_words
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


class Span(Config):
    low: int = 0
    high_end: int = 1

    @model_validator(mode="after")
    def _ordered(self) -> Span:
        if self.low > self.high_end:
            raise ValueError(f"low ({self.low}) must not exceed high_end ({self.high_end})")
        return self


class Top(Config):
    name: str = Field(default="n", pattern="^[a-z0-9][a-z0-9-]*$", max_length=9)
    call: str | None = Field(default=None, pattern=r"^\w+:\w+$")
    """`module:function`. More about it."""
    span: Span = Span()
    choice: Choice
    many: list[Choice] = Field(default_factory=list)
    some: list[int] = Field(default=[1], min_length=1)
    maybe: Choice | None = None
    mode: Literal["one", "two"] = "one"
    flag: bool = True
    either: int | str = 1
    table: dict[str, Alpha] = Field(default_factory=dict)
    only: Annotated[Alpha, Field(discriminator="kind")] = Alpha(kind="alpha")

    @model_validator(mode="after")
    def _fits(self) -> Top:
        if self.mode == "two":
            raise ValueError("mode is two, which needs flag: false\nchoice.rate is 1, too")
        return self


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def _write(text: str, name: str = "a.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return _write


def problems(files: list[Path], settings: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigurationError) as caught:
        validate_layer(Top, load_layer(files, settings))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_layers_merge_deeply_and_lists_are_replaced(write) -> None:  # type: ignore[no-untyped-def]
    first = write("choice: {kind: alpha, rate: 1e-6}\nmany: [{kind: alpha}, {kind: beta}]\nname: first\n")
    second = write("choice: {rate: 2}\nmany: [{kind: beta}]\n", "b.yaml")
    config = validate_layer(Top, load_layer([first, second], ["name='1'", "many.0.number=5"]))
    assert config.choice == Alpha(kind="alpha", rate=2.0)
    assert config.many == [Beta(kind="beta", number=5)]
    assert config.name == "1"


def test_an_unquoted_exponent_is_a_number(write) -> None:  # type: ignore[no-untyped-def]
    config = validate_layer(Top, load_layer([write("choice: {kind: alpha, rate: 1e-6}")]))
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
        ("choice: {kind: alhpa}", ["choice.kind: 'alhpa' is not one of alpha, beta", "Did you mean 'alpha'?"]),
        ("choice: {rate: 1}", ["says no `kind`", "alpha, beta"]),
        ("name: x", ["choice: is required", "`kind` one of alpha, beta"]),
        ("choice: {kind: alpha, number: 1}", ["choice.number: unknown key", "kind, rate"]),
        ("choice: {kind: beta, number: 2.0}", ["choice.number: 2.0: must be a whole number. Write 2"]),
        ("choice: {kind: beta, number: 4}", ["choice.number: number must be odd, got 4"]),
        ("choice: {kind: alpha, rate: -1}", ["choice.rate: -1", "greater than 0"]),
        ("choice: {kind: alpha}\nname: 3", ["name: 3", 'Write it in quotes: "3"']),
        ("choice: {kind: alpha}\nflag: yes", ["flag: 'yes'", "Write true or false"]),
        ("choice: {kind: alpha}\nmode: tow", ["mode: 'tow' is not one of one, two", "Did you mean 'two'?"]),
        ("choice: {kind: alpha}\nmany:\n- kind: alpha\n- kind: beta\n  x: 1", ["a.yaml:5: many.1.x: unknown key"]),
        ("choice: {kind: alpha}\nmaybe: {kind: beta, number: a}", ["maybe.number: 'a': must be a whole number"]),
        ("choice: {kind: alpha}\ntable: {t: {kind: alpha, rate: no}}", ["table.t.rate: 'no'"]),
        ("choice: {kind: alpha}\neither: 1.5", ["either: 1.5", " or: "]),
        (
            "choice: {kind: alpha, rate: nan}",
            ["choice.rate: 'nan': must be a number. A finite number is needed", ".nan"],
        ),
        ("choice: {kind: beta, number: inf}", ["must be a whole number. A finite number is needed"]),
        ("choice: {kind: alpha}\nsome: []", ["a.yaml:2: some: []: must have at least one entry"]),
        ("choice: {kind: alpha, rate: .inf}", ["a.yaml:1: choice.rate is .inf", "finite"]),
        ("name: a\nname: b", ["a.yaml:2: name is given twice", "first at", "a.yaml:1"]),
        ("base: &b {kind: alpha}\nchoice:\n  <<: *b", ["a.yaml:3", "not YAML 1.2"]),
        ("name: [", ["a.yaml:", "not valid YAML"]),
        ("choice: {kind: alpha}\nname: My Run!", ["name: 'My Run!'", "lower-case letters, digits and `-` only"]),
        ("choice: {kind: alpha}\ncall: 'a b'", ["call: 'a b'", "Write `module:function`"]),
        ("choice: {kind: alpha}\nname: " + "a" * 20, ["must have at most 9 characters"]),
        ("choice: {kind: alpha}\nmany: {kind: beta}", ['many: {"kind": "beta"}: must be a list. Write [a, b]']),
        ("choice: {kind: alpha}\nmany:", ["many: null: must be a list"]),
        ("choice: beta", ["choice: 'beta': must be a section", "`kind` one of alpha, beta"]),
        ("choice: {kind: alpha}\ntable: {t: true}", ["table.t: true: must be a section of `key: value` lines"]),
        ("choice: {kind: alpha, rate: [1]}", ["choice.rate: [1]: must be a number. One value is needed"]),
        ("choice: {kind: alpha}\nspan: {low: 2, high_end: 1}", ["span.low (2) must not exceed span.high_end (1)"]),
        ("choice: {kind: alpha}\nmode: two", ["a.yaml:2: mode is two, which needs flag", "a.yaml:1: choice.rate is 1"]),
        ("choice:\n\t kind: alpha", ["a.yaml:2", "spaces, not with tabs"]),
        ("name: a: b", ["must be in quotes"]),
        ("name: !mine b", ["a.yaml:1: name: the tag !mine is not read"]),
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
    settings = ["maybe.kind=beta", "maybe.number=7", "table={t: {kind: alpha}}"]
    config = validate_layer(Top, load_layer([file], settings))
    assert config.maybe == Beta(kind="beta", number=7)
    assert config.table["t"].rate == 1.0
    assert "--set choice.rate: 'x': must be a number" in problems([file], ("choice.rate=x",))
    assert "--set choice: choice.rate: 'x'" in problems([file], ("choice={kind: alpha, rate: x}",))


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("choice", "path.to.field=value"),
        ("=3", "path.to.field=value"),
        ("many.5.kind=alpha", "an index (0 to 0)"),
        ("many.first=alpha", "not 'first'"),
        ("choice.kind.x=1", "has no field 'x'"),
        ("name=[", "--set name: not valid YAML"),
        ("choice.rate=.nan", "--set choice.rate: choice.rate is .nan; a number must be finite"),
        ("many=[{rate: -.inf}]", "--set many: many.0.rate is -.inf"),
        ("many.0={a: 1, a: 2}", "many.0.a is given twice"),
        ("span.0.low=1", "span.0: unknown key"),
    ],
)
def test_bad_settings(write, setting: str, wanted: str) -> None:  # type: ignore[no-untyped-def]
    assert wanted in problems([write("choice: {kind: alpha}\nmany: [{kind: alpha}]")], (setting,))


def test_a_rule_of_a_section_is_placed_where_the_field_that_it_names_was_written(write) -> None:  # type: ignore[no-untyped-def]
    message = problems([write("choice: {kind: alpha}\nspan: {low: 0, high_end: 1}")], ("span.low=2",))
    assert "--set span.low: span.low (2) must not exceed span.high_end (1)" in message
    assert "a.yaml:2" not in message


def test_a_list_that_no_file_writes_has_no_items_to_set(write) -> None:  # type: ignore[no-untyped-def]
    message = problems([write("choice: {kind: alpha}")], ("many.0.rate=1",))
    assert "many: " in message
    assert "--set many='[…]' gives it whole" in message


def test_a_missing_file_names_the_nearest(write) -> None:  # type: ignore[no-untyped-def]
    file = write("choice: {kind: alpha}", "pipeline.yaml")
    write("", "ppo.yaml")
    for name in ("pipline.yaml", "pipeline.yml", "Pipeline.yaml"):
        assert f"{name} does not exist. Did you mean {file}?" in problems([file.with_name(name)])
    assert problems([file.with_name("other.yaml")]).endswith("other.yaml does not exist.")
    assert "is a folder. It holds: pipeline.yaml, ppo.yaml. Name a YAML file" in problems([file.parent])
    file.write_bytes(b"name: a\nname: \xff")
    assert "pipeline.yaml:2 is not UTF-8 text (byte 14)" in problems([file])


def test_what_is_missing_at_the_top_names_the_files(write) -> None:  # type: ignore[no-untyped-def]
    files = [write("flag: true"), write("mode: one", "b.yaml")]
    assert f"{files[0]}, {files[1]}: choice: is required" in problems(files)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"^[A-Za-z0-9][\w.-]*$", "letters, digits, `_`, `.` and `-` only, beginning with a letter or a digit"),
        ("^[0-9a-f]{40}$", "40 characters, each of them a digit or one of the letters a to f"),
        ("^[A-Z]+$", "capital letters only"),
        (r"^\w+:\w+$", None),
        ("^(a|b)$", None),
        ("^.*$", None),
    ],
)
def test_patterns_in_words(pattern: str, words: str | None) -> None:
    assert pattern_in_words(pattern) == words


@pytest.mark.parametrize(
    ("wanted", "there", "near"),
    [
        ("pairs.json", ["pairs.jsonl", "pears.jsonl"], "pairs.jsonl"),
        ("eva.jsonl", ["pairs.jsonl", "eval.jsonl"], "eval.jsonl"),
        ("prefs.jsonl", ["pairs.jsonl", "eval.jsonl"], None),
        ("pairs.jsonl", ["pairs.png"], None),
        (".jsonl", ["x.jsonl"], None),
    ],
)
def test_only_near_files_that_fit_are_suggested(
    tmp_path: Path, wanted: str, there: list[str], near: str | None
) -> None:
    for name in there:
        (tmp_path / name).touch()
    found = nearest_file(tmp_path / wanted, (".jsonl",))
    assert (found.name if found else None) == near


def test_missing_paths_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("gone/away")
    (tmp_path / "loop").symlink_to("loop")
    assert describe_missing(tmp_path / "link").startswith("is a link to gone/away, and that target is missing")
    assert "is a link to loop" in describe_missing(tmp_path / "loop")
    assert f"lies behind the link {tmp_path / 'link'}" in describe_missing(tmp_path / "link" / "x")
    assert "is a file, not a folder" in describe_missing(tmp_path / "file" / "x")
    assert "does not exist either" in describe_missing(tmp_path / "none" / "x")
    with pytest.raises(OSError, match="home"):
        resolved("~no-such-user/x")


def test_an_empty_file_is_an_empty_layer_and_dates_stay_text(write) -> None:  # type: ignore[no-untyped-def]
    layer = load_layer([write("# nothing\n"), write("name: 2026-01-01\n", "b.yaml")])
    assert layer.values == {"name": "2026-01-01"}
    assert layer.origin(("name",)).endswith("b.yaml:1")


def test_the_schema_holds_descriptions() -> None:
    schema = json_schema(Top)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["$defs"]["Alpha"]["properties"]["rate"]["description"] == "How fast."
