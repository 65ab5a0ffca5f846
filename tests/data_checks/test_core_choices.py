"""Each way to say how a file is read, and what becomes of its ties, through a whole check."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from data_checking import files_of, load_check

from data_checks.check import check as check_whole
from data_checks.config import CheckDataConfig
from training_core.errors import ConfigurationError, DataError

PROMPT_ROWS: dict[str, list[dict[str, Any]]] = {
    "prompts": [{"prompt": f"How far is star {number * number}?", "reference": "4"} for number in range(1, 5)],
    "verl": [
        {
            "data_source": "stars",
            "prompt": [{"role": "user", "content": f"How far is star {number * number}?"}],
            "ability": "maths",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number},
        }
        for number in range(1, 5)
    ],
    "openrlhf_prompts": [{"input": f"How far is star {n * n}?", "label": str(n)} for n in range(1, 5)],
}


FORMAT_FIELDS = {"rl_prompts": "rl_prompts_format", "eval_prompts": "eval_prompts_format"}


@pytest.mark.parametrize("layout", PROMPT_ROWS)
@pytest.mark.parametrize("table", ["rl_prompts", "eval_prompts"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "told"])
def test_files_of_prompts(
    table: str, layout: str, named: bool, good_pairs: Any, write_rows: Any, tokenizer_directory: Path, tmp_path: Path
) -> None:
    pairs, prompts = write_rows(good_pairs), write_rows(PROMPT_ROWS[layout], "prompts.jsonl")
    fields = {table: str(prompts)} | ({FORMAT_FIELDS[table]: layout} if named else {})
    config = CheckDataConfig.model_validate({"preferences": [{"path": str(pairs)}], "min_pairs": 2, **fields})
    loaded = load_check(files_of(config), config, tokenizer_directory, tmp_path / "out")
    assert [evidence.format for evidence in loaded.formats] == ["pairs", layout]
    rows = loaded.rows(table)
    assert [row["prompt"][0].content for row in rows] == [f"How far is star {n * n}?" for n in range(1, 5)]
    wanted = {"prompts": '"4"', "verl": '"1"', "openrlhf_prompts": '"1"'}
    assert json.loads(rows[0]["extra"])["reference" if layout == "prompts" else "ground_truth"] == json.loads(
        wanted[layout]
    )
    assert rows[0]["ground_truth"] == wanted[layout]


@pytest.mark.parametrize(
    ("ties", "kept", "quarantined", "dropped"),
    [(None, 40, {"undeclared_tie": 3}, {}), ("drop", 40, {}, {"tie": 3}), ("keep", 43, {}, {})],
)
def test_ties(
    ties: str | None, kept: int, quarantined: Any, dropped: Any, good_pairs: Any, write_rows: Any, tmp_path: Path
) -> None:
    same = {"prompt": "Which?", "chosen": "This one.", "rejected": "That one."}
    rows = [
        {**same, "margin": 0.0},
        {**same, "prompt": "Where?", "chosen_score": 2, "rejected_score": 2},
        {**same, "prompt": "When?", "margin": 0},
    ]
    path = write_rows([*good_pairs, *rows])
    config = CheckDataConfig.model_validate({"preferences": [{"path": str(path), "ties": ties}], "min_pairs": 2})
    loaded = load_check(files_of(config), config, None, tmp_path / "out")
    ledger = loaded.counts["preferences"]
    assert (ledger.kept, ledger.quarantined, ledger.dropped) == (kept, quarantined, dropped)
    if ties == "keep":
        tied = [row for row in loaded.pairs if row["prompt_text"] in ("Which?", "Where?", "When?")]
        assert [row["margin"] for row in tied] == [0.0, 0.0, 0.0]
    if ties == "drop":
        assert [row["policy"] for row in loaded.rows("dropped")] == ["tie"] * 3


def test_spark_is_refused_with_the_reason_or_counts_the_same(good_pairs: Any, write_rows: Any, tmp_path: Path) -> None:
    path = write_rows(good_pairs)

    def numbers(engine: str) -> dict[str, Any]:
        config = CheckDataConfig.model_validate(
            {"preferences": [{"path": str(path)}], "min_pairs": 2, "metric_engine": engine}
        )
        outcome = check_whole(files_of(config), config, None, seed=1, work_folder=tmp_path / engine, num_workers=1)
        return outcome.numbers

    counted = numbers("duckdb")
    assert counted["rows"] == 40
    if importlib.util.find_spec("pyspark") is None:
        with pytest.raises(ConfigurationError, match=r"tidegate\[spark\]"):
            numbers("spark")
    else:
        assert numbers("spark") == counted


def test_a_file_in_the_wrong_place_is_sent_to_the_right_one(write_rows: Any, tmp_path: Path) -> None:
    path = write_rows([{"prompt": f"Is {n} even?", "completion": "Yes.", "label": n % 2 == 0} for n in range(9)])
    config = CheckDataConfig.model_validate({"preferences": [{"path": str(path)}]})
    with pytest.raises(DataError, match=r"data\.feedback"):
        load_check(files_of(config), config, None, tmp_path / "out")
