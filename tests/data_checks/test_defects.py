"""One file for each defect of the catalogue: the defect is found, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
from defect_files import FOLDER, DefectFile, all_files, clean_files, content, written_files

from data_checks.check import Outcome, check
from data_checks.checks import catalogue
from data_checks.config import FileCheckConfig
from data_checks.runner import InputFiles

NUMBERS = {info.name: set(info.numbers) for info in catalogue()}
ALSO = {7: {30}}
"""What one defect is by nature beside itself: length is one of the features that the shortcut probe learns from."""


def outcome_of(defect: DefectFile, path: Path, folder: Path, tokenizer: Path | None) -> Outcome:
    """Check one file, with its evaluation prompts where it has some."""
    is_pairs = defect.kind == "preferences"
    fields = {**defect.fields, defect.kind: [{"path": str(path)}] if is_pairs else str(path)}
    beside = None
    if defect.beside is not None:
        beside = folder / "evaluation_prompts.jsonl"
        beside.write_bytes(content(defect.beside))
        fields["eval_prompts"] = str(beside)
    files = InputFiles([path] if is_pairs else [], None if is_pairs else path, beside)
    config = FileCheckConfig.model_validate(fields)
    return check(files, config, tokenizer, seed=0, work_folder=folder / "work", num_workers=1)


def complaints(outcome: Outcome) -> list[str]:
    return [item.name for item in outcome.checks if item.verdict not in ("pass", "skipped")]


def test_every_defect_has_its_file() -> None:
    assert sorted(defect.number for defect in all_files()) == list(range(1, 31))


def test_the_files_are_those_that_are_described() -> None:
    """`python tests/scripted/defect_files.py` writes them anew."""
    assert {path.name: path.read_bytes() for path in FOLDER.iterdir()} == written_files()


@pytest.mark.parametrize("layout", clean_files(), ids=lambda layout: layout.name.replace(" ", "_"))
def test_nothing_is_found_where_nothing_is_wrong(layout: DefectFile, tmp_path: Path, tokenizer_directory: Path) -> None:
    path = tmp_path / "clean.jsonl"
    path.write_bytes(content(layout.lines))
    outcome = outcome_of(layout, path, tmp_path, tokenizer_directory if layout.needs_tokenizer else None)
    assert (complaints(outcome), outcome.report["quarantined"], outcome.report["verdict"]) == ([], {}, "pass")
    assert outcome.report["kept"] == len(layout.lines)


@pytest.mark.parametrize("defect", all_files(), ids=lambda defect: f"{defect.number:02}_{defect.name}")
def test_the_defect_is_found_and_no_other(defect: DefectFile, tmp_path: Path, tokenizer_directory: Path) -> None:
    tokenizer = tokenizer_directory if defect.needs_tokenizer else None
    outcome = outcome_of(defect, FOLDER / defect.file_name, tmp_path, tokenizer)
    allowed = {defect.number} | ALSO.get(defect.number, set())
    named = [name for name in complaints(outcome) if NUMBERS[name]]
    assert any(defect.number in NUMBERS[name] for name in named), "not found"
    assert [name for name in named if not NUMBERS[name] & allowed] == [], "something else is found"
    # The share of rows put aside has no number: it follows from the defect.
    assert {name for name in complaints(outcome) if not NUMBERS[name]} <= {"quarantined_fraction"}
    report = outcome.report
    assert (report["verdict"], report["quarantined"]) == (defect.verdict, defect.quarantined)
    beside = len(defect.beside or ())
    assert report["kept"] + sum(report["quarantined"].values()) == len(defect.lines) + beside == report["rows"]
