"""Data sets in MLflow, looked up in a real store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tracked import Store, make_config

from tasks.mlflow_store import locate_store
from tasks.tracking_datasets import mlflow_schema
from tasks.tracking_journal import FINISHED, JournalFile, StageNote, with_stage
from tasks.tracking_sync import RunSync
from training_core.protocol.atomic import write_json
from training_core.protocol.digests import path_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageResult, StageSpec

FINGERPRINT = "f0" * 32
SECRET = "sk-live-0123456789abcdef"
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
PAIRS = pa.schema([("example_id", pa.string()), ("chosen_messages", MESSAGES), ("margin", pa.float64())])
TABLES = {"train_pairs": 5, "validation_pairs": 2, "rl_prompts": 3, "eval_prompts": 2, "quarantine": 4}
CARD = "# Data set\n\n11 rows, 4 in quarantine.\n"


@pytest.fixture(autouse=True)
def _no_store_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def root(tmp_path: Path, empty_store: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(empty_store, root / "mlflow.db")
    return root


def prepare(root: Path, stage: str, inputs: dict[str, Path]) -> StageDirectory:
    artifacts = {name: Artifact(path=str(path), sha256=digest_of(path)) for name, path in inputs.items()}
    spec = StageSpec(stage=stage, stage_version=1, config={}, inputs=artifacts, seed=7)
    directory = StageDirectory.of_spec(root, spec)
    directory.prepare(spec)
    write_json(directory.environment_path, {"attempts": [{"git_commit": "abc"}]})
    return directory


def digest_of(path: Path) -> str:
    return path_digest(path) if path.exists() else "ab" * 32


def checked(root: Path, **summary: Any) -> StageDirectory:
    """Return a check_data stage that is complete."""
    raw = root / "raw"
    (raw / "saved").mkdir(parents=True)
    (raw / "saved" / "data.arrow").write_bytes(b"rows")
    (raw / "pairs.csv.zst").write_bytes(b"rows")
    (raw / "tokenizer").mkdir()
    (raw / "tokenizer" / "tokenizer.json").write_text("{}")
    inputs = {"preferences_0": raw / "pairs.csv.zst", "feedback_0": raw / "saved", "tokenizer": raw / "tokenizer"}
    directory = prepare(root, "check_data", inputs)
    outputs = directory.outputs_path
    (outputs / "report").mkdir(parents=True)
    for name, num_rows in TABLES.items():
        turns = [[{"role": "assistant", "content": SECRET}]] * num_rows
        table = {"example_id": [SECRET] * num_rows, "chosen_messages": turns, "margin": [None] * num_rows}
        pq.write_table(pa.table(table, schema=PAIRS), outputs / f"{name}.parquet")
    (outputs / "report" / "DATASET_CARD.md").write_text(CARD)
    (outputs / "baselines.json").write_text("{}")
    names = [*(f"{name}.parquet" for name in TABLES), "report", "baselines.json"]
    result = StageResult(
        stage="check_data",
        spec_hash=directory.path.name,
        outputs={name: Artifact(path=f"outputs/{name}", sha256=path_digest(outputs / name)) for name in names},
        summary={"rows": 11, "kept": 7, "quarantined": {"empty": 3, "too_long": 1}, **summary},
        seconds=1.0,
        peak_rss_bytes=1,
    )
    write_json(directory.result_path, result.model_dump(mode="json"))
    return directory


class Sender:
    def __init__(self, root: Path) -> None:
        from mlflow import MlflowClient

        location = locate_store(make_config().tracking, root)
        self.root = root
        self.journal = JournalFile(root, "r").create("r", "r", "test", location.store_id)
        self.client = MlflowClient(tracking_uri=location.uri)
        self.location = location

    def send(self, stage: str, directory: StageDirectory, status: str | None = None) -> Store:
        """Send from the start, as a new process would."""
        ended = 2.0 if status else None
        note = StageNote(directory=str(directory.path), started=1.0, ended=ended, status=status)
        self.journal = with_stage(self.journal, stage, note)
        RunSync(self.client, self.location).sync(self.journal)
        return Store(make_config(), self.root)


def datasets(store: Store, stage: str) -> dict[str, tuple[Any, dict[str, str]]]:
    """Return name -> (dataset, tags) of a stage's run; no name may be there twice."""
    found = store.run(stage).inputs.dataset_inputs
    named = {item.dataset.name: (item.dataset, {tag.key: tag.value for tag in item.tags}) for item in found}
    assert len(named) == len(found)
    return named


def test_the_checked_data_stand_under_their_fingerprint(root: Path) -> None:
    sender, directory = Sender(root), checked(root, fingerprint=FINGERPRINT, dropped={"tie": 2})
    store = sender.send("check_data", directory, FINISHED)
    of_stage, of_pipeline = datasets(store, "check_data"), datasets(store, "pipeline")
    tables = {name for name in TABLES if name != "quarantine"}
    assert set(of_pipeline) == {"checked_data", *tables}
    # A folder of `datasets` is data, too; the tokenizer is none.
    assert set(of_stage) == {*of_pipeline, "preferences_0", "feedback_0"}
    for found in (of_stage, of_pipeline):
        dataset, tags = found["checked_data"]
        assert dataset.digest == FINGERPRINT[:36]
        assert tags == {"mlflow.data.context": "training", "tidegate.fingerprint": FINGERPRINT}
        assert json.loads(dataset.profile) == {
            "rows": 11,
            "kept": 7,
            "quarantined": 4,
            "dropped": 2,
            **{f"num_{name}": TABLES[name] for name in tables},
        }
        assert json.loads(dataset.source)["uri"].endswith("outputs")
    contexts = {name: of_pipeline[name][1]["mlflow.data.context"] for name in tables}
    assert contexts == {
        "train_pairs": "training",
        "validation_pairs": "validation",
        "rl_prompts": "training",
        "eval_prompts": "evaluation",
    }
    train, tags = of_pipeline["train_pairs"]
    digest = path_digest(directory.outputs_path / "train_pairs.parquet")
    assert (train.digest, tags["tidegate.sha256"], tags["tidegate.fingerprint"]) == (digest[:36], digest, FINGERPRINT)
    assert json.loads(train.profile) == {"num_rows": 5}
    assert [column["name"] for column in json.loads(train.schema)["mlflow_colspec"]] == PAIRS.names


def test_sent_again_nothing_is_there_twice_and_a_reader_has_the_same_entry(root: Path) -> None:
    sender, directory = Sender(root), checked(root, fingerprint=FINGERPRINT)
    sender.send("check_data", directory, FINISHED)
    directory_of_reader = prepare(
        root,
        "reward_model",
        {
            "train_pairs": directory.outputs_path / "train_pairs.parquet",
            "baselines": directory.outputs_path / "baselines.json",
        },
    )
    store = sender.send("reward_model", directory_of_reader)
    (read, tags) = datasets(store, "reward_model")["train_pairs"]
    assert len(datasets(store, "reward_model")) == 1  # A file of numbers is no data set.
    assert tags["mlflow.data.context"] == "training"
    made = datasets(store, "pipeline")["train_pairs"][0]
    assert (read.name, read.digest, read.schema, read.profile) == (made.name, made.digest, made.schema, made.profile)
    assert len(datasets(store, "check_data")) == 7


def test_the_card_is_the_runs_description_and_no_text_of_a_row_is_anywhere(root: Path) -> None:
    directory = checked(root, fingerprint=FINGERPRINT)
    store = Sender(root).send("check_data", directory, FINISHED)
    run = store.run("check_data")
    assert run.data.tags["mlflow.note.content"] == CARD
    assert "DATASET_CARD.md" in [file.path for file in store.client.list_artifacts(run.info.run_id)]
    database = b"".join(path.read_bytes() for path in root.glob("mlflow.db*"))
    assert FINGERPRINT.encode() in database
    assert SECRET.encode() not in database


def test_a_table_that_cannot_be_read_or_data_without_a_fingerprint_stop_nothing(root: Path) -> None:
    directory = checked(root, fingerprint=FINGERPRINT)
    (directory.outputs_path / "train_pairs.parquet").write_text("no parquet")
    store = Sender(root).send("check_data", directory, FINISHED)
    found = datasets(store, "pipeline")
    assert (found["train_pairs"][0].schema, found["train_pairs"][0].profile) == (None, None)
    assert "num_train_pairs" not in json.loads(found["checked_data"][0].profile)
    assert store.run("check_data").info.status == "FINISHED"


def test_a_stage_without_a_fingerprint_made_no_data(root: Path) -> None:
    store = Sender(root).send("check_data", checked(root), FINISHED)
    assert store.run("pipeline").inputs.dataset_inputs == []
    assert set(datasets(store, "check_data")) == {"preferences_0", "feedback_0"}


def test_schemas_of_every_kind_of_column() -> None:
    schema = pa.schema(
        {
            "flag": pa.bool_(),
            "count": pa.int32(),
            "share": pa.float32(),
            "text": pa.large_string(),
            "bytes": pa.binary(),
            "time": pa.timestamp("us"),
            "label": pa.dictionary(pa.int32(), pa.string()),
            "turns": MESSAGES,
            "odd": pa.time32("s"),
        }
    )
    columns = {column["name"]: column for column in json.loads(mlflow_schema(schema))["mlflow_colspec"]}
    types = {name: column["type"] for name, column in columns.items()}
    assert types == {
        "flag": "boolean",
        "count": "long",
        "share": "double",
        "text": "string",
        "bytes": "binary",
        "time": "datetime",
        "label": "string",
        "turns": "array",
        "odd": "any",
    }
    assert set(columns["turns"]["items"]["properties"]) == {"role", "content"}
