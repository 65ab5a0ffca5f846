"""The parts that keep row text out of messages: names, errors that nobody foresaw, damaged tables, single messages."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clean_rows import Writer
from planted import PUBLIC, STEMS, content_of, found_in, leaks, planted, write_rows
from planted_files import PAIR_DEFECTS, in_words

import data_checks.check
from data_checks.detection import detect
from data_checks.formats.base import Options, RowError
from data_checks.formats.registry import FORMATS
from data_checks.naming import is_name, is_private, name_columns, shown_names
from data_checks.reading import iter_rows
from data_checks.rows import Dropped, Finding, RawRow
from data_checks.runner import InputFiles
from data_checks.unforeseen import UnforeseenError, without_row_text
from tasks.tracking_datasets import mlflow_schema
from training_core.errors import ConfigurationError, DataError

PRIVATE = tuple(kind for kind in STEMS if kind not in PUBLIC)


def test_a_planted_string_is_found_however_it_is_written(tmp_path: Path) -> None:
    for kind in STEMS:
        text = planted(kind, 3)
        for content in (text.encode(), json.dumps(text).encode(), orjson.dumps(text), text.encode("utf-16-le")):
            assert [told.partition(":")[0] for told in found_in(b"before " + content + b" behind")] == [kind]
    pq.write_table(pa.table({"a": [planted("word", 1)] * 3}), tmp_path / "a.parquet", compression="zstd")
    (tmp_path / "b.txt").write_text("nothing")
    assert set(leaks(tmp_path)) == {"a.parquet"}
    assert leaks(tmp_path, ["*.parquet"]) == {}
    assert found_in(b"nothing at all") == []


@pytest.mark.parametrize("kind", PRIVATE)
def test_what_is_private_is_no_name(kind: str) -> None:
    text = planted(kind, 4)
    assert is_private(text)
    assert is_private(in_words(text))
    assert not is_name(text)
    assert found_in(name_columns(["prompt", text]).encode()) == []
    assert found_in(" ".join(shown_names([text, "web"]).values()).encode()) == []


@pytest.mark.parametrize(
    "name",
    [
        "prompt",
        "chosen-rating",
        "fine-grained_score",
        "openai/webgpt",
        "Stack Exchange",
        "r/AskDocs",
        "größe",
        "q1 2024",
    ],
)
def test_names_are_shown_as_they_are(name: str) -> None:
    assert name_columns([name]) == name
    assert shown_names([name]) == {name: name}


def test_sentences_are_no_names_and_stay_apart() -> None:
    sentences = ["What is a zirbelkauz?", "Where is a zirbelkauz?", "Who is this zirbelkauz", "Tell me\nabout it"]
    shown = shown_names([*sentences, "What is a zirbelkaux?"])
    assert len(set(shown.values())) == len(shown)
    assert found_in(" ".join(shown.values()).encode()) == []
    assert shown["What is a zirbelkaux?"] == "(a name of 21 characters) 2"
    assert name_columns(["b", "a", sentences[0]]) == "a, b, (a name of 21 characters)"


def test_evidence_of_a_format_counts_columns_whose_names_it_keeps_back() -> None:
    keys = [planted(kind, 5) for kind in PRIVATE]
    rows = [{**Writer(1).pair(), "note": "n", keys[number % len(keys)]: 1} for number in range(2 * len(keys))]
    evidence = detect("pairs.jsonl", rows)
    assert (evidence.format, evidence.columns["note"], "note" in evidence.unused_columns) == ("pairs", len(rows), True)
    assert len(evidence.columns) == 4 + len(keys)
    assert len(evidence.unused_columns) == 1 + len(keys)
    assert found_in(json.dumps(evidence.as_json()).encode()) == []


def test_a_schema_for_mlflow_has_only_names_that_may_be_shown() -> None:
    names = [planted(kind, 6) for kind in PRIVATE]
    struct = pa.struct([(name, pa.string()) for name in names])
    told = mlflow_schema(pa.schema([("prompt", pa.string()), *((name, pa.list_(struct)) for name in names)]))
    assert len(json.loads(told)["mlflow_colspec"]) == 1 + len(names)
    assert '"prompt"' in told
    assert found_in(told.encode()) == []


@pytest.mark.parametrize("make", [ValueError, KeyError, orjson.JSONDecodeError, UnicodeEncodeError, AssertionError])
def test_an_error_that_nobody_foresaw_says_where_and_not_what(make: Any) -> None:
    text = planted("email", 7)
    arguments = {orjson.JSONDecodeError: (text, text, 0), UnicodeEncodeError: ("utf-8", text, 0, 1, text)}

    def inner() -> None:
        try:
            raise make(*arguments.get(make, (text,)))
        except make as error:
            raise make(*arguments.get(make, (text,))) from error

    with pytest.raises(UnforeseenError, match=f"^{make.__name__} in inner, line ") as caught, without_row_text():
        inner()
    told = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert found_in(told.encode()) == []
    assert "in inner" in told


@pytest.mark.parametrize("error", [DataError("rows 1 to 3"), FileNotFoundError(2, "No such file", "x"), MemoryError()])
def test_errors_that_say_what_to_do_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, without_row_text():
        raise error
    assert caught.value is error


def test_a_bug_in_the_command_quotes_no_row(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from flows.cli import app
    from flows.commands.errors import exit_code_of

    def broken(files: InputFiles, *_: Any, **__: Any) -> None:
        raise KeyError(files.preferences[0].read_text())

    path = write_rows(tmp_path / "pairs.jsonl", [{**Writer(2).pair(), "chosen": planted("openai", 8)}])
    monkeypatch.setattr(data_checks.check, "check_dataset", broken)
    monkeypatch.setenv("TIDEGATE_ROOT", str(tmp_path))
    assert exit_code_of(app, ["check", str(path), "--json"]) == 70
    told = capsys.readouterr()
    assert "KeyError in broken" in told.err
    assert found_in((told.out + told.err).encode()) == []
    (saved,) = (tmp_path / "crashes").iterdir()
    assert b"in broken" in content_of(saved)
    assert leaks(tmp_path / "crashes") == {}


def test_what_is_said_of_damaged_tables_quotes_nothing(tmp_path: Path) -> None:
    """What Arrow and Parquet say of a broken file stands in our message."""
    rows = [{**Writer(3).pair(), "chosen": in_words(planted(kind, 9)), planted(kind, 9): kind} for kind in STEMS]
    table, draw, messages = pa.Table.from_pylist(rows), random.Random(5), set()
    whole: dict[str, bytes] = {}
    pq.write_table(table, tmp_path / "a.parquet", compression="none")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    for path in (tmp_path / "a.parquet", tmp_path / "a.arrow"):
        whole[path.name] = path.read_bytes()
    for number in range(400):
        name = ("a.parquet", "a.arrow")[number % 2]
        content = bytearray(whole[name])
        start = draw.randrange(8, len(content) - 8)
        length = draw.choice((1, 1, 2, 8, 64))
        content[start : start + length] = draw.randbytes(length)
        path = tmp_path / f"b{Path(name).suffix}"
        path.write_bytes(content)
        try:
            for chunk in iter_rows(path, path.name, path.name):
                messages |= {row.finding.detail for row in chunk if row.finding is not None}
        except DataError as error:
            messages.add(str(error))
    assert len(messages) > 10
    assert [told for message in messages for told in found_in(message.encode())] == []


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_no_format_quotes_a_value(name: str, tmp_path: Path) -> None:
    """Every column of every format, with every defect of a pair, with a planted text in the place of its value."""
    known = FORMATS[name]
    details: set[str] = set()
    options = Options("data", label=next(iter(known.labels), None), score=next(iter(known.scores), None))

    def convert(value: dict[str, Any]) -> None:
        row = RawRow("a.jsonl", 1, "", value)
        try:
            found = known.convert(row, options)
        except RowError as error:
            found = [error.finding]
        details.update(item.detail for item in found if isinstance(item, Finding | Dropped))

    wrong: tuple[Callable[[str], Any], ...] = (
        lambda text: text,
        lambda text: [text],
        lambda text: {text: text},
        lambda text: [{"role": text, "content": text}],
        lambda text: [{"role": "user", "content": [{"type": text, text: text}]}],
        lambda text: [{"from": "human", "value": text, text: text}],
        lambda text: {"text": text, "post": {text: text}},
    )
    base = dict.fromkeys(known.columns, "x")
    for kind in PRIVATE:
        text = planted(kind, 10)
        for column in known.columns:
            for make in wrong:
                convert({**base, column: make(text)})
                convert({**dict.fromkeys(known.needs, text), column: make(text)})
        for defect in PAIR_DEFECTS:
            value = defect(Writer(4).pair(), text)
            if isinstance(value, dict):
                convert(value)
    assert details
    assert [told for detail in details for told in found_in(detail.encode())] == []


def test_a_data_set_of_the_hub_that_cannot_be_read_quotes_nothing(monkeypatch: Any) -> None:
    import datasets

    def load(*_: Any, **__: Any) -> None:
        raise ValueError(f"could not convert string to float: {planted('card', 11)}")

    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda _: ["train"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ConfigurationError, match=r"cannot be loaded \(ValueError\)") as caught:
        list(iter_rows(Path("org/name"), "name", "data.preferences.0.path: org/name"))
    assert found_in(str(caught.value).encode()) == []
