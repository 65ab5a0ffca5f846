"""The check_data stage as a process and in place: outputs, exit codes, the same bytes each time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from data_checks import STAGES
from data_checks.config import CheckDataConfig
from data_checks.table_files import DROPPED_SCHEMA, PAIR_SCHEMA, PROMPT_SCHEMA, QUARANTINE_SCHEMA
from training_core.errors import ArtifactError, ConfigurationError, DataError, DigestMismatchError
from training_core.metrics import read_metrics
from training_core.protocol.child import main, run_stage_here
from training_core.protocol.digests import file_digest, path_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageSpec

TABLES = {
    "train_pairs.parquet": PAIR_SCHEMA,
    "validation_pairs.parquet": PAIR_SCHEMA,
    "rl_prompts.parquet": PROMPT_SCHEMA,
    "eval_prompts.parquet": PROMPT_SCHEMA,
    "quarantine.parquet": QUARANTINE_SCHEMA,
    "dropped.parquet": DROPPED_SCHEMA,
}
SUMMARY_KEYS = {
    *("rows", "examples", "kept", "quarantined", "dropped", "fingerprint", "verdict", "checks"),
    *("num_train_pairs", "num_validation_pairs", "num_rl_prompts", "num_eval_prompts", "num_eval_groups"),
    *("longest_rl_prompt_tokens", "longest_eval_prompt_tokens"),
}


def artifact(path: Path) -> Artifact:
    return Artifact(path=str(path), sha256=path_digest(path))


def make_stage(root: Path, tokenizer: Path, files: list[Path], **fields: Any) -> tuple[StageSpec, StageDirectory]:
    """Return the spec of a check and its directory; keywords are config fields."""
    preferences = [{"path": file.name} for file in files]
    config = {"preferences": preferences, "min_pairs": 2, "validation_fraction": 0.3, **fields}
    inputs = {"tokenizer": artifact(tokenizer)} | {f"preferences_{i}": artifact(file) for i, file in enumerate(files)}
    for name in ("rl_prompts", "eval_prompts"):
        if fields.get(name):
            inputs[name] = artifact(Path(fields[name]))
    spec = StageSpec(
        stage="check_data", stage_version=STAGES["check_data"].version, config=config, inputs=inputs, seed=5
    )
    directory = StageDirectory.of_spec(root, spec)
    directory.prepare(spec)
    return spec, directory


@pytest.fixture
def stage(tmp_path: Path, tokenizer_directory: Path) -> Any:
    def make(files: list[Path], root: str = "root", **fields: Any) -> tuple[StageSpec, StageDirectory]:
        return make_stage(tmp_path / root, tokenizer_directory, files, **fields)

    return make


def test_process_writes_every_output(good_pairs: Any, write_rows: Any, stage: Any) -> None:
    prompts = write_rows([{"prompt": "Held out"}], "eval.jsonl")
    blank = {"prompt": "b", "chosen": "", "rejected": "x"}
    _, directory = stage(
        [write_rows([*good_pairs, blank]), write_rows([blank], "more.parquet")], eval_prompts=str(prompts)
    )
    command = [sys.executable, "-m", "data_checks", str(directory.spec_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = directory.result()
    assert result is not None
    assert set(result.outputs) == {*TABLES, "report", "baselines.json"}
    directory.verify_outputs(result)
    for name, schema in TABLES.items():
        assert pq.read_schema(directory.path / result.outputs[name].path).equals(schema)
    assert set(result.summary) >= SUMMARY_KEYS
    assert (result.summary["rows"], result.summary["kept"], result.summary["quarantined"]) == (
        42,
        40,
        {"empty_response": 2},
    )
    quarantined = pq.read_table(directory.outputs_path / "quarantine.parquet").to_pylist()
    assert [(row["source_file"], row["source_row"]) for row in quarantined] == [
        ("pairs.jsonl", 41),
        ("more.parquet", 1),
    ]
    assert json.loads(quarantined[0]["raw"]) == blank
    report = json.loads((directory.outputs_path / "report" / "report.json").read_text())
    assert report["formats"][0]["evidence"]
    assert report["tables"]["preferences"]["defects"]["empty_response"]["examples"] == [
        "pairs.jsonl:41",
        "more.parquet:1",
    ]
    parts = ("prompt", "chosen", "rejected")
    lengths = {f"{part}_{unit}" for part in parts for unit in ("tokens", "characters")}
    assert set(report["lengths"]) >= lengths
    assert json.loads((directory.outputs_path / "baselines.json").read_text()) == report["baselines"]
    results = json.loads((directory.outputs_path / "report" / "great_expectations.json").read_text())
    assert set(results) >= {"data_set", "kept_rows_preferences"}
    metrics = read_metrics(directory.metrics_path)
    assert [row["step"] for row in metrics] == [1]
    assert metrics[0]["data/rows_kept"] == 40


def test_two_runs_give_the_same_bytes(good_pairs: Any, write_rows: Any, stage: Any) -> None:
    path = write_rows(good_pairs)
    results = []
    for root in ("first", "second"):
        spec, directory = stage([path], root=root)
        if root == "second":  # What a killed attempt may have left behind.
            (directory.outputs_path / "report").mkdir(parents=True)
            (directory.outputs_path / "report" / "old.json").write_text("{}")
            directory.metrics_path.write_text('{"step": 1, "data/rows": 9}\n')
        result = run_stage_here(spec, directory, STAGES)
        results.append(
            ([a.sha256 for a in result.outputs.values()], result.summary, directory.metrics_path.read_text())
        )
    assert results[0] == results[1]


def test_files_of_one_name_are_told_apart(good_pairs: Any, write_rows: Any, stage: Any, tmp_path: Path) -> None:
    blank, broken = {"prompt": "b", "chosen": "", "rejected": "x"}, {"prompt": "b", "chosen": "", "rejected": 5}
    files = []
    for folder, rows in (("a", [*good_pairs[:20], blank, blank]), ("b", [*good_pairs[20:], good_pairs[3], broken])):
        (tmp_path / folder).mkdir()
        files.append(write_rows(rows, f"{folder}/train.jsonl"))
    prompts = write_rows([{"prompt": ""}, {"prompt": "New"}], "train.jsonl")
    spec, directory = stage(files, rl_prompts=str(prompts), max_quarantined_fraction=0.01)
    config = {**spec.config, "rl_prompts": "train.jsonl"}
    with pytest.raises(DataError) as caught:
        run_stage_here(spec.model_copy(update={"config": config}), directory, STAGES)
    detail = "chosen: turn 1 of the answer is blank after trimming"
    assert f"for example preferences_0/train.jsonl:21 ({detail}), preferences_0/train.jsonl:22" in str(caught.value)
    assert "preferences_1/train.jsonl:22 (rejected is a number" in str(caught.value)
    assert "rl_prompts/train.jsonl:1 (turn 1 of the prompt is blank" in str(caught.value)
    quarantine = pq.read_table(directory.outputs_path / "quarantine.parquet").to_pylist()
    assert {(row["source_file"], row["source_row"]): row["detail"] for row in quarantine}[
        "preferences_1/train.jsonl", 21
    ] == "repeats row 4 of preferences_0/train.jsonl"
    report = json.loads((directory.outputs_path / "report" / "report.json").read_text())
    sources = {entry["source"]: entry["num_rows"] for entry in report["sources"]["preferences"]}
    named = ["preferences_0/train.jsonl", "preferences_1/train.jsonl"]
    assert sorted(set(sources) - {""}) == named  # A row that could not be read has no source.
    assert [evidence["path"] for evidence in report["formats"]][:2] == named


def test_the_summary_has_the_longest_prompts(good_pairs: Any, write_rows: Any, stage: Any, chat_tokenizer: Any) -> None:
    from training_core.models.chat import encode_prompt

    rl = [{"prompt": "Short"}, {"prompt": "A much longer prompt than the other one"}, {"prompt": "Middle one"}]
    spec, directory = stage([write_rows(good_pairs)], rl_prompts=str(write_rows(rl, "rl.jsonl")))
    summary = run_stage_here(spec, directory, STAGES).summary
    lengths = {}
    for name in ("rl_prompts", "eval_prompts"):
        rows = pq.read_table(directory.outputs_path / f"{name}.parquet").to_pylist()
        lengths[name] = [len(encode_prompt(chat_tokenizer, row["prompt_messages"])) for row in rows]
    assert summary["longest_rl_prompt_tokens"] == max(lengths["rl_prompts"]) > min(lengths["rl_prompts"])
    assert summary["longest_eval_prompt_tokens"] == max(lengths["eval_prompts"])


def test_without_prompts_the_longest_is_null(good_pairs: Any, write_rows: Any, stage: Any) -> None:
    spec, directory = stage([write_rows(good_pairs)], rl_prompts=str(write_rows([{"prompt": " "}], "rl.jsonl")))
    with pytest.raises(DataError, match="num_rl_prompts is 0"):
        run_stage_here(spec, directory, STAGES)
    report = json.loads((directory.outputs_path / "report" / "report.json").read_text())
    assert report["metrics"].get("longest_rl_prompts_tokens") is None
    assert isinstance(report["metrics"]["longest_eval_prompts_tokens"], int)


def test_too_many_bad_rows_exit_3_with_the_quarantine_written(
    good_pairs: Any, write_rows: Any, stage: Any, capsys: Any
) -> None:
    blank = [{"prompt": f"b{index}", "chosen": "", "rejected": "x"} for index in range(10)]
    _, directory = stage([write_rows([*good_pairs, *blank])])
    assert main([str(directory.spec_path)], STAGES) == 3
    message = capsys.readouterr().err
    assert "quarantined_fraction is 20 % of the preference rows (10 of 50), allowed: at most 5 %" in message
    assert "raise data.max_quarantined_fraction" in message
    where = "pairs.jsonl:41 (chosen: turn 1 of the answer is blank after trimming), pairs.jsonl:42"
    assert f"10 of 50 rows (20.0%) empty_response, for example {where}" in message
    assert directory.result() is None
    assert pq.read_table(directory.outputs_path / "quarantine.parquet").num_rows == 10
    assert json.loads((directory.outputs_path / "report" / "report.json").read_text())["verdict"] == "fail"


def test_all_rows_bad_is_a_refusal(write_rows: Any, stage: Any) -> None:
    blank = [{"prompt": f"b{index}", "chosen": "", "rejected": "x"} for index in range(10)]
    spec, directory = stage([write_rows(blank)])
    with pytest.raises(DataError, match="rows_kept is 0 pairs, allowed: at least 2 pairs") as caught:
        run_stage_here(spec, directory, STAGES)
    # What follows from there being no pair would only hide the reason.
    assert "num_train_pairs" not in str(caught.value)
    assert str(caught.value).count("data.min_pairs") == 1


def test_empty_file_is_a_refusal(write_rows: Any, stage: Any) -> None:
    spec, directory = stage([write_rows([])])
    with pytest.raises(DataError, match="holds no rows"):
        run_stage_here(spec, directory, STAGES)


def test_no_validation_prompt_is_a_refusal(good_pairs: Any, write_rows: Any, stage: Any) -> None:
    spec, directory = stage([write_rows(good_pairs[:5])], validation_fraction=1e-6)
    with pytest.raises(
        DataError, match=r"num_validation_pairs is 0 pairs, allowed: at least 1 pair: .*raise data\.validation_fraction"
    ):
        run_stage_here(spec, directory, STAGES)


def test_digest_in_the_config_is_held(good_pairs: Any, write_rows: Any, stage: Any) -> None:
    path = write_rows(good_pairs)
    spec, directory = stage([path], preferences=[{"path": path.name, "sha256": file_digest(path)}])
    assert run_stage_here(spec, directory, STAGES).summary["verdict"] in ("pass", "warn")
    spec, directory = stage([path], preferences=[{"path": path.name, "sha256": "0" * 64}])
    with pytest.raises(DigestMismatchError, match=r"its sha256 is in the config"):
        run_stage_here(spec, directory, STAGES)


def test_missing_inputs_are_named(good_pairs: Any, write_rows: Any, stage: Any) -> None:
    path = write_rows(good_pairs)
    spec, directory = stage([path], preferences=[{"path": path.name}, {"path": "other.jsonl"}])
    with pytest.raises(ArtifactError, match="preferences_1"):
        run_stage_here(spec, directory, STAGES)
    spec, directory = stage([path])
    lost = spec.model_copy(update={"config": {**spec.config, "rl_prompts": "rl.jsonl"}})
    with pytest.raises(ConfigurationError, match=r"data\.rl_prompts is set in the config, but the spec has no input"):
        run_stage_here(lost, directory, STAGES)


def test_tokenizer_that_does_not_load(good_pairs: Any, write_rows: Any, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    spec, directory = make_stage(tmp_path / "root", empty, [write_rows(good_pairs)])
    with pytest.raises(ArtifactError, match="does not load"):
        run_stage_here(spec, directory, STAGES)


@pytest.mark.parametrize(
    "fields",
    [
        {"preferences": []},
        {"preferences": [{"path": "a", "format": "csv"}]},
        {"preferences": [{"path": "a", "sha256": "abc"}]},
        {"validation_fraction": 0.0},
        {"validation_fraction": "0.1"},
        {"max_quarantined_fraction": 1.5},
        {"min_pairs": 1},
        {"duplicates": "drop"},
        {"max_length": 10},
    ],
)
def test_config_refuses(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CheckDataConfig.model_validate({"preferences": [{"path": "a.jsonl"}], **fields})


def test_every_config_field_has_a_description() -> None:
    schema = CheckDataConfig.model_json_schema()
    models = [schema, *schema["$defs"].values()]
    assert all("description" in field for model in models for field in model["properties"].values())


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, data_checks, data_checks.config; "
        "print(sorted({'torch', 'transformers', 'great_expectations', 'pandas', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
