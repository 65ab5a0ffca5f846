"""What is counted, and of how many: rows, pairs of ranked rows, copies, pass rates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clean_rows import Writer, as_comparison
from data_checking import files_of, load_check

from data_checks.check import check as check_whole
from data_checks.config import CheckDataConfig, FileCheckConfig
from data_checks.runner import InputFiles


def ranked(seed: int, number: int, num_answers: int = 7) -> list[dict[str, Any]]:
    writer = Writer(seed)
    return [
        {
            "prompt": f"\n\nHuman: {writer.prompt()}\n\nAssistant: ",
            "answers": [{"answer": f"{writer.answer()} {n}.", "rank": float(n + 1)} for n in range(num_answers)],
        }
        for _ in range(number)
    ]


def test_broken_rows_are_a_share_of_rows(write_rows: Callable[..., Path], check: Callable[..., Any]) -> None:
    """A row of seven answers is 21 pairs, most of them beyond the cap: they make no defect rarer."""
    rows: list[Any] = [*ranked(1, 55), *(b'{"broken": ' for _ in range(5))]
    checked = check(write_rows(rows))
    numbers = checked.numbers()
    ledger = checked.counts["preferences"]
    assert (ledger.rows, ledger.kept, ledger.dropped) == (60, 55 * 6, {"pairs_per_row": 55 * 15})
    assert numbers["malformed_fraction"] == 5 / 60
    assert numbers["quarantined_fraction"] == 5 / (55 * 6 + 5)
    dropped = checked.rows("dropped")
    assert len(dropped) == 55 * 15
    assert sum(row["raw"] != "" for row in dropped) == 55, "the text of a row is there once"


def test_too_many_answers_of_one_row(write_rows: Callable[..., Path], check: Callable[..., Any]) -> None:
    checked = check(write_rows([*ranked(2, 20), *ranked(3, 1, 101)]))
    assert checked.counts["preferences"].quarantined == {"row_too_large": 1}


def test_what_is_too_long_in_two_ways_counts_once(write_rows: Callable[..., Path], check: Callable[..., Any]) -> None:
    rows = Writer(4).pairs(40)
    rows[7] = rows[7] | {"prompt": " ".join([rows[7]["prompt"]] * 30)}
    checked = check(write_rows(rows), max_prompt_tokens=200, max_total_tokens=300)
    assert checked.numbers()["too_long_fraction"] == 1 / 40


def test_pass_rates_of_the_evaluation_are_not_those_of_rl(
    write_rows: Callable[..., Path], tokenizer_directory: Path, tmp_path: Path
) -> None:
    writer = Writer(5)
    paths = {
        "rl_prompts": write_rows([{"prompt": writer.prompt(), "pass_rate": 1.0} for _ in range(20)], "rl.jsonl"),
        "eval_prompts": write_rows([{"prompt": writer.prompt(), "pass_rate": 0.5} for _ in range(60)], "eval.jsonl"),
    }
    pairs = write_rows(writer.pairs(20))
    fields: dict[str, Any] = {
        "preferences": [{"path": str(pairs)}],
        **{name: str(path) for name, path in paths.items()},
    }
    config = CheckDataConfig.model_validate(fields | {"min_pairs": 2})
    assert load_check(files_of(config), config, None, tmp_path / "out").whole["unusable_prompts_fraction"] == 1.0


@pytest.mark.parametrize("first", ["kept", "left out"])
def test_the_sample_has_the_copy_that_is_used(first: str, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    """Two people judge alike, one of them contradicts herself: the other's row is in the sample, in any order."""
    writer = Writer(6)
    rows = []
    for _ in range(60):
        pair = writer.pair()
        other = pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]}
        copies = [as_comparison(pair, 0, "calm"), as_comparison(pair, 0, "torn")]
        rows += [*(copies if first == "kept" else copies[::-1]), as_comparison(other, 0, "torn")]
    path = write_rows(rows)
    config = FileCheckConfig.model_validate({"preferences": [{"path": str(path)}], "min_pairs": 2})
    outcome = check_whole(InputFiles([path]), config, None, seed=0, work_folder=tmp_path / "work", num_workers=1)
    assert outcome.report["kept"] == 60
    assert outcome.numbers["sample_pairs"] == 60


def test_a_repeated_key_is_seen_whatever_stands_beside_it(tmp_path: Path, check: Callable[..., Any]) -> None:
    lines = [json.dumps(pair).encode() for pair in Writer(7).pairs(60)]
    twice = b'{"prompt": "Is this one?", "chosen": "Yes.", "rejected": "No.", "chosen": "Maybe."}'
    for others in ([], [b'{"prompt": "Only two", "chosen": "members."}'], [b"{"]):
        path = tmp_path / "pairs.jsonl"
        path.write_bytes(b"\n".join([*lines, twice, *others]))
        assert check(path).counts["preferences"].quarantined["malformed_json"] == 1 + (others == [b"{"])


def test_near_duplicates_that_nobody_looked_for_are_unknown(
    write_rows: Callable[..., Path], check: Callable[..., Any]
) -> None:
    numbers = check(write_rows(Writer(8).pairs(40)), near_duplicates=None).numbers()
    assert numbers["near_duplicates_across_splits"] is None
    assert numbers["near_duplicate_prompts_fraction"] is None
