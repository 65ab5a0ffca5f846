"""One file for each defect of the catalogue: the defect is found, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from defect_files import FOLDER, DefectFile, clean_files, defect_files, lines_of_files
from defect_rows import is_written

from data_checks.check import Outcome, check
from data_checks.checks import catalogue
from data_checks.config import FileCheckConfig
from data_checks.runner import InputFiles

NUMBERS = {info.name: set(info.numbers) for info in catalogue()}
LINKED = {7: {30}}
"""Defects that are also another one by nature: length is one of the features that the shortcut probe learns from."""
Run = Callable[[DefectFile], Outcome]


@pytest.fixture
def run(tmp_path: Path, tokenizer_directory: Path) -> Run:
    """Check one file of the folder whole, with the evaluation prompts beside it where there are some."""

    def run(file: DefectFile, tokenizer: Path = tokenizer_directory) -> Outcome:
        path = FOLDER / file.file_name
        beside = FOLDER / file.evaluation_name if file.evaluation_name else None
        is_prompts = file.kind == "rl_prompts"
        fields: dict[str, Any] = {file.kind: str(path) if is_prompts else [{"path": str(path), **file.of_file}]}
        fields["eval_prompts"] = str(beside) if beside else None
        files = InputFiles(**{file.kind: path if is_prompts else [path]}, eval_prompts=beside)
        config = FileCheckConfig.model_validate(fields | file.options)
        chosen = tokenizer if file.tokenizer else None
        return check(files, config, chosen, seed=0, work_folder=tmp_path / "work", num_workers=1)

    return run


def complaints(outcome: Outcome) -> dict[str, str]:
    return {item.name: item.verdict for item in outcome.checks if item.verdict not in ("pass", "skipped")}


def unused_rows(outcome: Outcome, kind: str, fate: str = "quarantined") -> dict[str, list[int]]:
    """Return reason -> numbers of the rows that are not used for it."""
    found: dict[str, list[int]] = {}
    for row in pq.read_table(outcome.data.features[kind], columns=["fate", "reason", "row"]).to_pylist():
        if row["fate"] == fate:
            found.setdefault(row["reason"], []).append(row["row"])
    return found


def test_every_defect_has_its_file() -> None:
    assert {file.number for file in defect_files() if file.found} == set(range(1, 31))
    for file in (*defect_files(), *clean_files()):
        assert (FOLDER / file.file_name).stat().st_size <= 60_000, file.file_name
        assert all(file.number in NUMBERS[name] for name in file.found), "a check of another number"
        assert all(NUMBERS[name] & LINKED[file.number] for name in file.linked), "a link that is not said above"


def test_the_files_are_what_the_script_writes() -> None:
    """`python tests/scripted/defect_files.py` writes them anew."""
    lines = lines_of_files()
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(lines)
    assert [name for name, rows in lines.items() if not is_written(FOLDER / name, rows)] == []


@pytest.mark.parametrize("file", clean_files(), ids=lambda file: file.name)
def test_nothing_is_found_where_nothing_is_wrong(file: DefectFile, run: Run) -> None:
    outcome = run(file)
    assert (complaints(outcome), outcome.report["verdict"]) == ({}, "pass")
    assert outcome.report["kept"] == outcome.report["rows"] == len(file.sheet.rows) + len(file.evaluation)
    assert unused_rows(outcome, file.kind) == {}


@pytest.mark.parametrize("file", defect_files(), ids=lambda file: file.file_name.partition(".")[0])
def test_the_defect_is_found_and_no_other(file: DefectFile, run: Run) -> None:
    outcome = run(file)
    expected = file.found | file.linked
    assert complaints(outcome) == {name: verdict for name, (verdict, _) in expected.items()}
    values = {item.name: item.value for item in outcome.checks}
    planted = {name: value for name, (_, value) in expected.items() if value is not None}
    assert {name: values[name] for name in planted} == pytest.approx(planted)
    metrics = outcome.report["metrics"]
    assert {name: metrics[name] for name in file.numbers} == pytest.approx(file.numbers)
    worst = max((verdict for verdict, _ in expected.values()), key=["warn", "fail"].index, default="pass")
    assert outcome.report["verdict"] == worst
    assert unused_rows(outcome, file.kind) == file.sheet.bad
    ledger = outcome.data.ledger(file.kind)
    assert ledger.quarantined == {reason: len(rows) for reason, rows in file.sheet.bad.items()}
    assert (ledger.rows, ledger.kept) == (len(file.sheet.rows), ledger.rows - sum(ledger.quarantined.values()))


def named(name: str) -> DefectFile:
    return next(file for file in defect_files() if file.name == name)


def test_answers_that_a_tokenizer_makes_equal_are_identical(run: Any, tmp_path: Path) -> None:
    from tokenizers import normalizers

    from training_core.models.tiny import build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer()
    steps = [normalizers.Lowercase(), normalizers.Replace("  ", " ")]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = replace(named("identical_answers"), tokenizer=True)
    outcome = run(file, tmp_path / "tokenizer")
    assert complaints(outcome) == {"identical_fraction": "fail", "quarantined_fraction": "fail"}
    assert outcome.data.ledger("preferences").quarantined == {"identical_responses": 8}


def test_ties_that_the_config_declares_are_no_defect(run: Run) -> None:
    file = replace(named("ties"), of_file={"ties": "drop"})
    outcome = run(file)
    assert (complaints(outcome), outcome.report["dropped"]) == ({}, {"tie": 6})
