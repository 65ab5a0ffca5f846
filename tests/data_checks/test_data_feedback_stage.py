"""The check_data stage with feedback: outputs, summary, thresholds, and the files as inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from data_checks import STAGES
from data_checks.config import CheckDataConfig
from data_checks.table_files import FEEDBACK_SCHEMA
from tasks.inputs import _data_files
from training_core.data.tables import build_feedback_table
from training_core.errors import DataError, DigestMismatchError
from training_core.metrics import read_metrics
from training_core.protocol.child import run_stage_here
from training_core.protocol.digests import file_digest, path_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageResult, StageSpec

FEEDBACK_OUTPUTS = {"train_feedback.parquet", "validation_feedback.parquet"}
PAIR_OUTPUTS = {"train_pairs.parquet", "validation_pairs.parquet"}


def feedback(number: int = 40) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Tell me about {i}.", "completion": f"It is {i}.", "label": i % 2 == 0, "rating": i}
        for i in range(number)
    ]


@pytest.fixture
def run_stage(tmp_path: Path, tokenizer_directory: Path) -> Any:
    """(pairs files, feedback files, **config fields) -> result and directory."""

    def run(pairs: list[Path], judged: list[Path], **fields: Any) -> tuple[StageResult, StageDirectory]:
        lists = {"preferences": pairs, "feedback": judged}
        config = {name: [{"path": file.name} for file in files] for name, files in lists.items()}
        config |= {"min_pairs": 2, "min_feedback": 2, "validation_fraction": 0.3, **fields}
        inputs = {f"{name}_{i}": file for name, files in lists.items() for i, file in enumerate(files)}
        artifacts = {
            name: Artifact(path=str(path), sha256=path_digest(path))
            for name, path in {"tokenizer": tokenizer_directory, **inputs}.items()
        }
        spec = StageSpec(
            stage="check_data", stage_version=STAGES["check_data"].version, config=config, inputs=artifacts, seed=5
        )
        directory = StageDirectory.of_spec(tmp_path / "root", spec)
        directory.prepare(spec)
        return run_stage_here(spec, directory, STAGES), directory

    return run


def table(directory: StageDirectory, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(directory.outputs_path / name).to_pylist()
    return rows


def test_pairs_and_feedback(good_pairs: Any, write_rows: Any, run_stage: Any) -> None:
    judged = [*feedback(), {"prompt": "?", "completion": " ", "label": True}, {"prompt": "?", "completion": "!"}]
    result, directory = run_stage([write_rows(good_pairs)], [write_rows(judged, "f.parquet")])
    summary = result.summary
    assert set(result.outputs) > FEEDBACK_OUTPUTS | PAIR_OUTPUTS
    for name in FEEDBACK_OUTPUTS:
        assert pq.read_schema(directory.outputs_path / name).equals(FEEDBACK_SCHEMA)
    train, validation = (table(directory, name) for name in sorted(FEEDBACK_OUTPUTS))
    assert (len(train), len(validation)) == (summary["num_train_feedback"], summary["num_validation_feedback"])
    assert len(train) + len(validation) == summary["feedback_kept"] == 40
    assert (summary["feedback_rows"], summary["rows"], summary["kept"]) == (42, 40, 40)
    assert summary["feedback_quarantined"] == {"empty_response": 1, "missing_judgement": 1}
    assert [row["reason_code"] for row in table(directory, "quarantine.parquet")] == [
        "empty_response",
        "missing_judgement",
    ]
    written = sorted(train + validation, key=lambda row: row["source_row"])
    for number, (row, source) in enumerate(zip(written, feedback(), strict=True), start=1):
        assert (row["label"], row["rating"]) == (source["label"], source["rating"])
        assert (row["source"], row["source_file"], row["source_row"]) == ("f.parquet", "f.parquet", number)
        assert row["answer_messages"] == [{"role": "assistant", "content": source["completion"]}]
    assert len({row["example_id"] for row in written}) == 40
    metrics = read_metrics(directory.metrics_path)[0]
    assert metrics["data/feedback_examples_kept"] == 40
    assert metrics["length/feedback_answer_tokens_max"] >= 2
    report = json.loads((directory.outputs_path / "report" / "report.json").read_text())
    assert report["metrics"]["feedback_good_share"] == 0.5
    ratings = report["histograms"]["feedback_rating"]
    assert (ratings["start"], sum(ratings["counts"])) == (0, 40)
    results = json.loads((directory.outputs_path / "report" / "great_expectations.json").read_text())
    assert set(results) >= {"data_set", "kept_rows_preferences", "kept_rows_feedback"}


def test_feedback_alone_passes_and_can_be_trained_on(
    write_rows: Any, run_stage: Any, chat_tokenizer: Any, tmp_path: Path
) -> None:
    result, directory = run_stage([], [write_rows(feedback(), "f.jsonl")])
    assert result.summary["verdict"] in ("pass", "warn")
    assert (result.summary["rows"], result.summary["kept"], result.summary["num_train_pairs"]) == (0, 0, 0)
    assert result.summary["chosen_longer_share"] is None
    assert [table(directory, name) for name in sorted(PAIR_OUTPUTS)] == [[], []]
    assert result.summary["num_eval_prompts"] == result.summary["num_validation_feedback"] > 0
    path = directory.outputs_path / "train_feedback.parquet"
    encoded = build_feedback_table(path, chat_tokenizer, 512, tmp_path / "f.arrow")
    assert [item.label for item in encoded] == [row["label"] for row in table(directory, path.name)]


def test_without_feedback_nothing_of_it_is_written(good_pairs: Any, write_rows: Any, run_stage: Any) -> None:
    result, directory = run_stage([write_rows(good_pairs)], [])
    assert not FEEDBACK_OUTPUTS & set(result.outputs)
    assert not [key for key in result.summary if "feedback" in key]
    assert not [key for key in read_metrics(directory.metrics_path)[0] if "feedback" in key]


def test_ratings_alone_have_no_labels(write_rows: Any, run_stage: Any) -> None:
    rows = [{key: value for key, value in row.items() if key != "label"} for row in feedback()]
    path = write_rows(rows, "f.jsonl")
    result, directory = run_stage([], [path])
    assert result.summary["verdict"] in ("pass", "warn")
    assert {row["label"] for row in table(directory, "train_feedback.parquet")} == {None}
    judged, directory = run_stage([], [path], feedback=[{"path": "f.jsonl", "rating_threshold": 20.0}])
    assert all(row["label"] == (row["rating"] >= 20) for row in table(directory, "train_feedback.parquet"))
    assert judged.summary["verdict"] in ("pass", "warn")


def test_refusals(write_rows: Any, run_stage: Any, good_pairs: Any) -> None:
    unjudged = [{"prompt": f"u{i}", "answer": "x"} for i in range(10)]
    with pytest.raises(DataError) as caught:
        run_stage([write_rows(good_pairs)], [write_rows([*feedback(), *unjudged], "f.jsonl")])
    message = str(caught.value)
    assert "feedback_quarantined_fraction is 20 % of the feedback rows (10 of 50), allowed: at most 5 %" in message
    assert "feedback: 10 of 50 rows (20.0%) missing_judgement, for example f.jsonl:41" in message
    with pytest.raises(DataError, match=r"feedback_kept is 40 rows, allowed: at least 41 rows: .*data\.min_feedback"):
        run_stage([], [write_rows(feedback(), "f.jsonl")], min_feedback=41)
    with pytest.raises(DataError) as caught:
        run_stage([], [write_rows(unjudged, "f.jsonl")], feedback=[{"path": "f.jsonl", "format": "feedback"}])
    assert "feedback_kept is 0 " in str(caught.value)
    assert "num_train_feedback" not in str(caught.value)


def test_digest_in_the_config_is_held(write_rows: Any, run_stage: Any) -> None:
    path = write_rows(feedback(), "f.jsonl")
    good = [{"path": "f.jsonl", "sha256": file_digest(path)}]
    assert run_stage([], [path], feedback=good)[0].summary["verdict"] in ("pass", "warn")
    with pytest.raises(DigestMismatchError, match=r"feedback file f\.jsonl \(its sha256 is in the config\)"):
        run_stage([], [path], feedback=[{"path": "f.jsonl", "sha256": "0" * 64}])


def test_files_are_inputs_of_the_stage() -> None:
    config = CheckDataConfig.model_validate(
        {
            "preferences": [{"path": "a/x.jsonl"}],
            "feedback": [{"path": "b/x.jsonl", "sha256": "0" * 64}, {"path": "b/y.jsonl"}],
            "rl_prompts": "rl.jsonl",
        }
    )
    found = _data_files(config)
    assert [(file.input_name, file.dotted, file.path, file.portable, file.sha256) for file in found] == [
        ("preferences_0", "data.preferences.0.path", "a/x.jsonl", "preferences_0/x.jsonl", None),
        ("feedback_0", "data.feedback.0.path", "b/x.jsonl", "feedback_0/x.jsonl", "0" * 64),
        ("feedback_1", "data.feedback.1.path", "b/y.jsonl", "y.jsonl", None),
        ("rl_prompts", "data.rl_prompts", "rl.jsonl", "rl.jsonl", None),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"preferences": [], "feedback": []},
        {"feedback": [{"path": "a", "format": "pairs"}]},
        {"feedback": [{"path": "a", "rating_threshold": float("nan")}]},
        {"feedback": [{"path": "a"}], "min_feedback": 1},
    ],
)
def test_config_refuses(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CheckDataConfig.model_validate(fields)
