"""Files of formats without pairs: each is told from all others by its columns, and converts without a defect."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pyarrow.parquet as pq
import pytest

from data_checks.config import FeedbackFormat, PromptFormat, StepwiseFormat
from data_checks.detection import detect
from data_checks.formats import FORMATS
from data_checks.formats.base import Format, Kind, Options
from data_checks.formats.other_formats import OTHER_FORMATS
from data_checks.gold import gold_findings
from data_checks.rows import FeedbackRow, Finding, PromptItem, RawRow, StepwiseRow
from data_checks.rules import feedback_findings, prompt_findings, stepwise_findings

FIXTURES = Path(__file__).parent / "fixtures" / "formats"
OTHERS = sorted(FIXTURES.glob("other_*"))
ANY_KIND: tuple[Kind, ...] = ("pairs", "feedback", "prompts", "stepwise")
READABLE = sorted(path for path in FIXTURES.iterdir() if path.suffix in (".json", ".jsonl", ".parquet"))
DEMO = Path(__file__).parents[3] / "shared" / "data" / "llama-factory-kto-en-demo.json"
KINDS: dict[str, type] = {"feedback": FeedbackRow, "prompts": PromptItem, "stepwise": StepwiseRow}
NAMES = sorted((known.name for known in OTHER_FORMATS), key=len, reverse=True)


def named_after(path: Path) -> str:
    """Return the format that a file of fixtures is called after, `other_FORMAT[_VARIANT].KIND`."""
    return next(name for name in NAMES if path.name.removeprefix("other_").startswith(name))


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
    else:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    return [{key: item for key, item in row.items() if item is not None} for row in rows]


def told(value: dict[str, Any], kinds: set[str]) -> set[str]:
    """Return the formats that a row fits, without those that another one of them refines."""
    fitting = {name for name, known in FORMATS.items() if known.kind in kinds and known.fits(value)}
    return fitting - {general for name in fitting for general in FORMATS[name].refines}


def findings(example: Any) -> list[Finding]:
    rules: dict[type, Any] = {
        FeedbackRow: feedback_findings,
        PromptItem: prompt_findings,
        StepwiseRow: stepwise_findings,
    }
    found: list[Finding] = example.findings + rules[type(example)](example)
    return found


def test_every_format_has_a_file_and_a_name_in_the_config() -> None:
    literals = (FeedbackFormat, PromptFormat, StepwiseFormat)
    assert [known.name for known in OTHER_FORMATS] == [name for one in literals for name in get_args(one)]
    assert {named_after(path) for path in OTHERS} == set(NAMES)
    assert all(FORMATS[known.name] is known for known in OTHER_FORMATS)


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_a_file_is_told_from_all_others(path: Path) -> None:
    name = named_after(path)
    for value in read(path):
        assert told(value, {"pairs", *KINDS}) == {name}
        assert told(value, {FORMATS[name].kind}) == {name}
    evidence = detect(path.name, read(path), ANY_KIND)
    assert (evidence.format, evidence.kind, evidence.decided_by) == (name, FORMATS[name].kind, "columns")


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_a_file_converts_without_a_defect(path: Path) -> None:
    known = FORMATS[named_after(path)]
    examples: list[Any] = []
    for number, value in enumerate(read(path), start=1):
        assert set(known.needs) <= set(value)
        examples += known.convert(RawRow(path.name, number, "", value), Options(path.name))
    assert {type(example) for example in examples} == {KINDS[known.kind]}
    assert [finding for example in examples for finding in findings(example)] == []
    if known.kind == "prompts":
        assert not any(gold_findings(examples))
    # Nothing is lost: every column is read by the format or stands in `extra`.
    for value, example in zip(read(path), examples, strict=True):
        assert set(value) <= known.columns | set(json.loads(example.extra))


@pytest.mark.parametrize("path", READABLE, ids=lambda path: path.name)
def test_no_two_formats_claim_a_row(path: Path) -> None:
    assert {len(told(value, {"pairs", *KINDS})) for value in read(path)} == {1}


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"prompt": "q", "answer": "42"}, "prompts"),
        ({"prompt": "q", "answer": "42", "thumb": "up"}, "feedback"),
        ({"prompt": "q", "response": "a"}, "feedback"),
        ({"prompt": "q", "reference": "a", "label": "easy"}, "prompts"),
        ({"prompt": "q", "completions": ["a"], "labels": [True]}, "stepwise"),
        ({"prompt": "q", "completions": ["a"], "pass_rate": 0.5}, "prompts"),
        ({"prompt": "q", "messages": [{"role": "user", "content": "q"}], "label": True}, "llama_factory_kto"),
        ({"prompt": "q", "completion": "a", "messages": [{"role": "user", "content": "q"}], "label": True}, "feedback"),
        ({"instruction": "i", "input": "x", "output": "o", "kto_tag": False}, "llama_factory_alpaca_kto"),
    ],
)
def test_rows_near_a_border(value: dict[str, Any], name: str) -> None:
    assert told(value, {"pairs", *KINDS}) == {name}


@pytest.mark.parametrize(
    "value",
    [
        {"instruction": "i", "input": "x", "output": "o"},
        {"messages": [{"role": "user", "content": "q"}]},
        {"messages": [{"role": "user", "content": "q"}], "label": 1},
        {"input": "x", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a"},
        {"prompt": 3},
        {},
    ],
)
def test_rows_of_no_such_format(value: dict[str, Any]) -> None:
    assert told(value, set(KINDS)) == set()


@pytest.mark.parametrize("known", OTHER_FORMATS, ids=lambda known: known.name)
def test_what_a_format_refines_is_there(known: Format) -> None:
    assert known.refines <= set(FORMATS)


def test_a_real_file_of_llama_factory_is_unpaired() -> None:
    if not DEMO.exists():
        pytest.skip(f"{DEMO.name} is not here")
    rows = read(DEMO)
    assert len(rows) == 300
    assert {name for value in rows for name in told(value, {"pairs", *KINDS})} == {"llama_factory_kto"}
    assert detect(DEMO.name, rows, ANY_KIND).format == "llama_factory_kto"
    assert detect(DEMO.name, rows, ANY_KIND[1:2]).format == "llama_factory_kto"
    known = FORMATS["llama_factory_kto"]
    examples = [example for value in rows for example in known.convert(RawRow("f", 1, "", value), Options("f"))]
    labels = Counter(example.label for example in examples if isinstance(example, FeedbackRow))
    assert labels == {True: 150, False: 150}
    assert [finding for example in examples for finding in findings(example)] == []
