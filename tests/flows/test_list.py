"""`tidegate list TABLE`: what a config can choose from."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from flows.commands.list import entry_lines
from training_core.catalogue import TABLES


def test_it_says_what_each_table_holds(here) -> None:  # type: ignore[no-untyped-def]
    code, output, _ = here("list", "tables")
    assert code == 0
    for table in TABLES.values():
        assert f"{table.name} " in output
        assert f"{table.title} (`{table.field}`)" in output
    found = json.loads(here("list", "tables", "--json")[1])["tables"]
    assert [row["table"] for row in found] == list(TABLES)


@pytest.mark.parametrize("name", list(TABLES))
def test_a_table_prints_the_same_to_people_and_machines(here, name: str) -> None:  # type: ignore[no-untyped-def]
    code, output, _ = here("list", name)
    assert code == 0
    found = json.loads(here("list", name, "--json")[1])
    assert (found["table"], found["field"]) == (name, TABLES[name].field)
    assert len(found["entries"]) >= 2
    lines = output.splitlines()
    for entry in found["entries"]:
        assert entry["name"] in lines
        for key, text in entry.items():
            assert any(line.strip().endswith(text) for line in lines), (entry["name"], key)


def test_formula_and_source_are_shown(here) -> None:  # type: ignore[no-untyped-def]
    output = here("list", "losses")[1]
    assert "  formula  loss = -A * logprobs.\n" in output
    assert "arXiv 2506.13585" in output
    assert "more weight  long answers" in here("list", "aggregations")[1]
    assert "gradient   In a loss: in expectation that of the *forward* KL" in here("list", "kl")[1]
    grpo = next(entry for entry in TABLES["algorithms"].read() if entry["name"] == "grpo")
    parts = {"advantage": "group_normalised", "loss": "clipped_surrogate", "aggregation": "token_mean"}
    assert {key: grpo[key] for key in parts} == parts
    assert grpo["source"] == "Shao et al. 2024, arXiv 2402.03300."


def test_an_unknown_table_is_a_usage_error_with_the_nearest_name(here) -> None:  # type: ignore[no-untyped-def]
    code, output, errors = here("list", "aggregation")
    assert (code, output) == (2, "")
    assert "there is no table 'aggregation'" in errors
    assert "Did you mean aggregations?" in errors
    code, output, _ = here("list", "aggregation", "--json")
    assert (code, json.loads(output)["error"]["exit_code"]) == (2, 2)


def test_the_help_names_every_table(here) -> None:  # type: ignore[no-untyped-def]
    words = " ".join(here("list", "--help")[1].split())
    assert all(name in words.replace("- ", "-") for name in TABLES)


def test_lines_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "70")
    entry = next(entry for entry in TABLES["losses"].read() if entry["name"] == "clipped_surrogate")
    lines = list(entry_lines(entry))
    assert max(map(len, lines)) <= 70
    assert " ".join(" ".join(lines).split()) == " ".join(
        ["clipped_surrogate", entry["summary"], *(f"{key} {entry[key]}" for key in ("formula", "knobs", "source"))]
    )


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys\nfrom flows.cli import app\n"
        f"for table in {['tables', *TABLES]}: app(args=['list', table], standalone_mode=False)\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'prefect', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
