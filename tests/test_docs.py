"""docs/algorithms.md says what the code says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from training_core.catalogue import TABLES, Entry
from training_core.docstrings import function_docs, parse_docstring, registered_docs

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
MATHS = ("advantages", "losses", "kl", "aggregations", "preference-losses", "reward-losses")
OWN_WORDS = ("what for", "cost")
"""Columns that say what the code does not."""
COLUMNS = {
    "algorithms": {"made of", "what for", "cost", "source"},
    "advantages": {"formula", "knobs", "what for", "source"},
    "losses": {"formula", "knobs", "what for", "source"},
    "kl": {"placement", "formula", "gradient", "what for", "source"},
    "aggregations": {"formula", "more weight", "what for", "source"},
    "preference-losses": {"formula", "knobs", "what for", "source"},
    "reward-losses": {"formula", "knobs", "what for", "source"},
    "rewards": {"summary", "knobs", "source"},
    "engines": {"summary", "knobs"},
    "sentinels": {"summary", "knobs"},
}


def cells(line: str) -> list[str]:
    """Return the cells of a line of a table; `\\|` is a bar within one."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]


def sections(page: str) -> dict[str, str]:
    """Return title -> text of the page's sections."""
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def first_table(text: str) -> tuple[list[str], list[list[str]]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return cells(lines[0]), [cells(line) for line in lines[2:]]


def in_code(entry: Entry, column: str) -> str:
    if column == "made of":
        return " + ".join(f"`{entry[part]}`" for part in ("advantage", "loss", "aggregation") if part in entry) or "–"
    return entry.get(column.replace(" ", "_"), "–")


def problems(page: str) -> list[str]:
    """Return where a page differs from the code."""
    found = []
    texts = sections(page)
    for table in TABLES.values():
        text = texts.get(f"{table.name}: {table.title} (`{table.field}`)")
        if text is None:
            found.append(f"no section for {table.name}")
            continue
        header, rows = first_table(text)
        if set(header[1:]) != COLUMNS[table.name]:
            found.append(f"{table.name} has the columns {header}")
            continue
        entries = {f"`{entry['name']}`": entry for entry in table.read()}
        if [row[0] for row in rows] != list(entries):
            found.append(f"{table.name} has the rows {[row[0] for row in rows]}, the code {list(entries)}")
        if table.note not in text:
            found.append(f"{table.name} lacks its note")
        for row in rows:
            for column, cell in zip(header[1:], row[1:], strict=True):
                right = (
                    cell not in ("", "–") if column in OWN_WORDS else cell == in_code(entries.get(row[0], {}), column)
                )
                if not right:
                    found.append(f"{table.name}, {row[0]}, {column}: {cell!r}")
    return found


def test_the_page_says_what_the_code_says() -> None:
    assert problems(PAGE) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("loss = -A * logprobs.", "loss = A * logprobs."),
        ("| `prompt_mean` |", "| `promt_mean` |"),
        ("clip_low = 0.0003", "clip_low = 0.2"),
        ("`leave_one_out` + `reinforce` +", "`leave_one_out` + `clipped_surrogate` +"),
        ("## engines: what samples answers", "## engines"),
        ("| tokens of tersely answered prompts |", "| nobody |"),
        ("| The usual one: several updates a rollout, tokens that moved too far stop learning. |", "| – |"),
        (TABLES["kl"].note, ""),
    ],
)
def test_a_page_that_says_something_else_is_found(old: str, new: str) -> None:
    assert old in PAGE
    assert len(problems(PAGE.replace(old, new, 1))) >= 1


def test_rows_that_are_missing_or_unknown_are_found() -> None:
    lines = PAGE.splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if line.startswith("| `sapo` | loss = "))
    assert any("losses has the rows" in text for text in problems("".join(lines[:number] + lines[number + 1 :])))
    unknown = [*lines[: number + 1], lines[number].replace("`sapo`", "`sopa`"), *lines[number + 1 :]]
    assert any("losses has the rows" in text for text in problems("".join(unknown)))


def test_the_choice_names_algorithms_that_exist() -> None:
    names = {entry["name"] for entry in TABLES["algorithms"].read()}
    _, rows = first_table(sections(PAGE)["Which one should I take?"])
    taken = [name for row in rows for name in re.findall(r"`(\w+)`", row[1])]
    assert len(rows) >= 6
    assert set(taken) <= names


def test_ktos_formula_stands_below_the_table() -> None:
    kto = next(entry for entry in TABLES["algorithms"].read() if entry["name"] == "kto")
    assert kto["formula"] == function_docs("training_core.ops.preference_losses", "kto").formula
    assert kto["formula"] in " ".join(PAGE.split())


@pytest.mark.parametrize("name", MATHS)
def test_every_formula_has_a_source(name: str) -> None:
    """A docstring without a formula or a source has no place in a registry."""
    for entry in TABLES[name].read():
        if entry["name"] == "custom":
            continue
        assert " = " in entry["formula"], entry
        assert len(entry["source"]) > 10, entry
        assert entry["summary"].endswith("."), entry
        if name == "kl":
            assert "In a loss" in entry["gradient"], entry
        if name == "aggregations":
            assert entry["more_weight"], entry


def test_every_algorithm_has_a_source() -> None:
    without = [entry["name"] for entry in TABLES["algorithms"].read() if "source" not in entry]
    assert without == ["custom"]


def registries() -> dict[str, Any]:
    from training_core import registries
    from training_core.registry import Registry

    return {name: value for name, value in vars(registries).items() if isinstance(value, Registry)}


def test_what_is_read_without_importing_is_what_is_registered() -> None:
    tables = {"ADVANTAGE_ESTIMATORS", "POLICY_LOSSES", "KL_LOSSES", "KL_REWARDS", "AGGREGATIONS", "PREFERENCE_LOSSES"}
    found = registries()
    assert set(found) - tables == {"REWARD_RULES", "ROLLOUT_ENGINES"}, "a new registry: has it a table to list?"
    for name in tables:
        docs = registered_docs(name)
        assert list(docs) == list(found[name])
        for key, function in found[name].items():
            imported = parse_docstring(inspect.getdoc(function) or "")
            assert (docs[key].summary, docs[key].formula) == (imported.summary, imported.formula), (name, key)
            assert docs[key].sections == imported.sections
            assert docs[key].function == function.__name__


def test_every_registered_name_is_in_a_table() -> None:
    tables = {
        "ADVANTAGE_ESTIMATORS": "advantages",
        "POLICY_LOSSES": "losses",
        "KL_LOSSES": "kl",
        "KL_REWARDS": "kl",
        "AGGREGATIONS": "aggregations",
        "PREFERENCE_LOSSES": "preference-losses",
        "REWARD_RULES": "rewards",
        "ROLLOUT_ENGINES": "engines",
    }
    listed: dict[str, set[str]] = {}
    for variable, registry in registries().items():
        listed.setdefault(tables[variable], set()).update(registry)
    for name, registered in listed.items():
        others = {"custom", "reward_model"} if name in ("rewards",) else {"custom"}
        assert {entry["name"] for entry in TABLES[name].read()} - others == registered - others, name


def test_sentinels_are_those_that_watch() -> None:
    from training_core.sentinels import CHECKS, NON_FINITE

    assert {entry["name"] for entry in TABLES["sentinels"].read()} == {*CHECKS, NON_FINITE}


@pytest.mark.parametrize(
    ("module", "name", "match"),
    [
        ("training_core.ops.kl", "k9", "neither defines nor imports k9"),
        ("training_core.ops.none", "k1", "is no module of this package"),
    ],
)
def test_what_cannot_be_found_is_named(module: str, name: str, match: str) -> None:
    with pytest.raises(LookupError, match=match):
        function_docs(module, name)
    with pytest.raises(LookupError, match="adds nothing to NO_TABLE"):
        registered_docs("NO_TABLE")
