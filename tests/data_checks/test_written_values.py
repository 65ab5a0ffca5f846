"""Values as files write them: reasons to stop, blank cells, numbers in CSV, ones and zeros, NaN, characters unseen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data_checks.config import CheckDataConfig
from data_checks.features import Flag
from data_checks.runner import InputFiles, check_dataset


def test_answers_that_the_generator_stopped(
    good_pairs: list[dict[str, Any]], write_rows: Callable[..., Path], check: Callable[..., Any], tmp_path: Path
) -> None:
    said = ({"chosen": "length"}, {"rejected": "max_tokens"}, {"chosen": "stop", "rejected": "stop"}, {"chosen": 3}, {})
    rows = [
        row | {f"{side}_finish_reason": why for side, why in item.items()}
        for row, item in zip(good_pairs, said, strict=False)
    ]
    features = check(write_rows(rows)).features()
    found = [
        [bool(flags & Flag.TRUNCATED) for flags in features[f"{s}_flags"].to_pylist()] for s in ("chosen", "rejected")
    ]
    assert found == [[True, False, False, False, False], [False, True, False, False, False]]

    judged = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": True, "finish_reason": why}
        for row, why in zip(good_pairs, ("length", "stop"), strict=False)
    ]
    path = write_rows(judged, "judged.jsonl")
    config = CheckDataConfig.model_validate({"feedback": [{"path": str(path)}]})
    data = check_dataset(InputFiles(feedback=[path]), config, None, seed=0, work_folder=tmp_path / "work")
    flags = pq.read_table(data.features["feedback"])["chosen_flags"].to_pylist()
    assert [bool(value & Flag.TRUNCATED) for value in flags] == [True, False]


def test_a_blank_cell_is_a_blank_answer(tmp_path: Path, check: Callable[..., Any]) -> None:
    path = tmp_path / "pairs.csv"
    rows = [f"What is {number} and one?,It is {number + 1}.,It is {number}." for number in range(30)]
    path.write_text("\n".join(["prompt,chosen,rejected", *rows, "And this?,,No.", ",Yes.,No."]) + "\n")
    assert check(path).counts["preferences"].quarantined == {"empty_response": 1, "wrong_type": 1}


def test_numbers_and_truth_values_of_a_csv_file(tmp_path: Path, check: Callable[..., Any]) -> None:
    path = tmp_path / "pairs.csv"
    rows = [f"What is {n} and one?,It is {n + 1}.,It is {n}.,{n / 2},{n}" for n in range(1, 31)]
    path.write_text("\n".join(["prompt,chosen,rejected,margin,id", *rows]) + "\n")
    pairs = check(path).pairs
    assert [row["margin"] for row in pairs] == [n / 2 for n in range(1, 31)]
    assert json.loads(pairs[0]["extra"]) == {"id": "1"}

    judged = tmp_path / "judged.csv"
    lines = [f"What is {n} and one?,It is {n + 1}.,{n % 2 == 0}" for n in range(30)]
    judged.write_text("\n".join(["prompt,completion,label", *lines]) + "\n")
    config = CheckDataConfig.model_validate({"feedback": [{"path": str(judged)}]})
    data = check_dataset(InputFiles(feedback=[judged]), config, None, seed=0, work_folder=tmp_path / "work")
    assert pq.read_table(data.features["feedback"])["label"].to_pylist() == [n % 2 == 0 for n in range(30)]


def test_labels_of_ones_and_zeros(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}.", "label": n % 2} for n in range(20)]
    path = write_rows(rows)
    config = CheckDataConfig.model_validate({"feedback": [{"path": str(path)}]})
    data = check_dataset(InputFiles(feedback=[path]), config, None, seed=0, work_folder=tmp_path / "work")
    assert pq.read_table(data.features["feedback"])["label"].to_pylist() == [n % 2 == 1 for n in range(20)]


def test_what_nobody_sees_is_blank(write_rows: Callable[..., Path], check: Callable[..., Any]) -> None:
    unseen = "\u200b\ufeff \u00ad"
    rows = [
        {"prompt": "Who?", "chosen": "She.", "rejected": unseen},
        {"prompt": "Why?", "chosen": f"Tea{unseen}.", "rejected": "So."},
        {"prompt": "How?", "chosen": "Well.", "rejected": "Badly.", "source": "elsewhere"},
        {"prompt": "Where?", "chosen": unseen, "rejected": "There.", "source": "elsewhere"},
    ]
    checked = check(
        write_rows([*rows, *({"prompt": f"When {n}?", "chosen": "Now.", "rejected": "Then."} for n in range(40))])
    )
    assert checked.counts["preferences"].quarantined == {"empty_response": 2}


def test_a_missing_number_of_python_hides_no_row(tmp_path: Path, check: Callable[..., Any]) -> None:
    """`json.dumps` writes NaN where pandas has no number."""
    path = tmp_path / "pairs.jsonl"
    lines = [f'{{"prompt": "What is {n}?", "chosen": "A.", "rejected": "B {n}.", "note": NaN}}' for n in range(30)]
    path.write_text("\n".join(lines))
    checked = check(path)
    assert checked.counts["preferences"].kept == 30
    assert json.loads(checked.pairs[0]["extra"]) in ({"note": None}, {})


def test_a_negative_margin_is_the_wrong_way_round(write_rows: Callable[..., Path], check: Callable[..., Any]) -> None:
    row = {"chosen": "A.", "rejected": "B."}
    rows = [row | {"prompt": f"What is {n}?", "margin": -1.0 if n < 3 else 2.0} for n in range(30)]
    assert check(write_rows(rows)).numbers()["score_inverted_fraction"] == 0.1
