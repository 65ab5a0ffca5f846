"""What a row says of how its answers ended, and blank cells of a CSV file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    import pyarrow.parquet as pq

    flags = pq.read_table(data.features["feedback"])["chosen_flags"].to_pylist()
    assert [bool(value & Flag.TRUNCATED) for value in flags] == [True, False]


def test_a_blank_cell_is_a_blank_answer(tmp_path: Path, check: Callable[..., Any]) -> None:
    path = tmp_path / "pairs.csv"
    rows = [f"What is {number} and one?,It is {number + 1}.,It is {number}." for number in range(30)]
    path.write_text("\n".join(["prompt,chosen,rejected", *rows, "And this?,,No.", ",Yes.,No."]) + "\n")
    assert check(path).counts["preferences"].quarantined == {"empty_response": 1, "wrong_type": 1}
