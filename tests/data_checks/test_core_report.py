"""What a check says of its findings: the refusal, the report, and no row text in either."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from data_checking import files_of

from data_checks.check import Outcome
from data_checks.check import check as check_whole
from data_checks.checks import catalogue
from data_checks.config import CheckDataConfig, Contamination, FeedbackFile, NearDuplicates, PreferenceFile
from data_checks.presentation import check_lines, dataset_card, html_page
from data_checks.report import refusal, worst_reasons
from data_checks.rows import ADVICE


@pytest.fixture
def outcome(tokenizer_directory: Path, tmp_path: Path) -> Any:
    """Check one file of pairs whole; keywords are config fields."""

    def run(path: Path, folder: str = "out", **fields: Any) -> Outcome:
        values = {"preferences": [{"path": str(path)}], "min_pairs": 2, **fields}
        config = CheckDataConfig.model_validate(values)
        return check_whole(
            files_of(config), config, tokenizer_directory, seed=3, work_folder=tmp_path / folder, num_workers=1
        )

    return run


def test_refusal_names_the_three_worst_reasons_with_rows(write_rows: Any, good_pairs: Any, outcome: Any) -> None:
    blank = [{"prompt": f"b{index}", "chosen": " ", "rejected": "x"} for index in range(7)]
    same = [{"prompt": f"s{index}", "chosen": "x", "rejected": "x"} for index in range(3)]
    path = write_rows([*good_pairs, *blank, *same, b"{", b"[]", {"prompt": 1, "chosen": "a", "rejected": "b"}])
    found = outcome(path)
    message = refusal(found.data, found.checks, "the/folder")
    assert message is not None
    assert "quarantined_fraction is 24.53 % of the preference rows (13 of 53), allowed: at most 5 %" in message
    worst = [line for line in message.splitlines() if line.startswith("- preferences:")]
    assert [line.split(") ")[1].split(",")[0] for line in worst] == [
        "empty_response",
        "identical_responses",
        "malformed_json",
    ]
    blank_at = "pairs.jsonl:41 (chosen: turn 1 of the answer is blank after trimming), pairs.jsonl:42"
    assert blank_at in worst[0]
    assert "the/folder/quarantine.parquet" in message


def test_an_example_counted_under_another_reason_still_says_what_is_wrong(
    write_rows: Any, good_pairs: Any, check: Any
) -> None:
    both = {"prompt": " ", "chosen": " ", "rejected": "x"}
    data = check(write_rows([*good_pairs, both, {**both, "prompt": "b"}]))
    ledger = data.counts["preferences"]
    assert ledger.quarantined == {"empty_prompt": 1, "empty_response": 1}
    line = next(line for line in worst_reasons("preferences", ledger) if " empty_response, for example" in line)
    assert "pairs.jsonl:41 (turn 1 of the prompt is blank after trimming; also empty_response (chosen: turn 1" in line


def test_what_is_said_is_the_same_each_time_and_holds_no_text(write_rows: Any, good_pairs: Any, outcome: Any) -> None:
    word = "zanzibar-4711"
    bad = [
        {"prompt": word, "chosen": " ", "rejected": word},
        {"prompt": [{"role": word, "content": word}], "chosen": "a", "rejected": "b"},
        {"prompt": word, "chosen": word, "rejected": word},
        {"prompt": word, "chosen": word, "rejected": 5},
        f'{{"prompt": "{word}'.encode(),
    ]
    path = write_rows([*[{**row, "prompt": row["prompt"] + word} for row in good_pairs], *bad])
    told = []
    for folder in ("first", "second"):
        found = outcome(path, folder, max_quarantined_fraction=0.01)
        message = refusal(found.data, found.checks, "the folder")
        pages = [html_page(found.report), dataset_card(found.report), *check_lines(found.report, every_check=True)]
        told.append(json.dumps([found.report, found.results, message, pages]))
    assert told[0] == told[1]
    assert word not in told[0]


def test_no_advice_names_a_field_without_its_section() -> None:
    of_files = {*PreferenceFile.model_fields, *FeedbackFile.model_fields}
    of_parts = {*NearDuplicates.model_fields, *Contamination.model_fields}
    fields = set(CheckDataConfig.model_fields) - of_files - of_parts
    for text in [*(info.advice for info in catalogue()), *ADVICE.values()]:
        for field in fields:
            assert not re.search(rf"(?<!data\.)\b{field}\b", text) or "_" not in field, text
