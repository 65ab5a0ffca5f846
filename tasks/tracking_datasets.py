"""Data sets in MLflow: what a stage reads, and what the data checks made, under its fingerprint.

MLflow knows a data set by name and digest, and keeps schema and profile of the first that it is told of. So a table has
one entry, whether the checks wrote it or a training read it. Names, types and counts go there; no text of any row,
and of names those that may be shown.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_checks.naming import shown_names
from training_core.records import Artifact, StageResult, StageSpec

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput

logger = logging.getLogger(__name__)

DIGEST_CHARACTERS = 36
"""MLflow refuses a longer dataset digest; the whole one is a tag."""
CHECKED_DATA = "checked_data"
CONTEXTS = {"train_": "training", "rl_prompts": "training", "validation_": "validation", "eval_prompts": "evaluation"}
"""How a table's name begins -> what it is used for."""
TABLE_SUFFIX = ".parquet"
COUNTS = ("rows", "examples", "kept", "quarantined", "dropped")
"""Entries of the summary of check_data that are a number, or numbers by reason."""


def input_datasets(spec: StageSpec) -> list[DatasetInput]:
    """Return the data files among a stage's inputs: what the checks read, and the tables that others read."""
    found = []
    for name, artifact in spec.inputs.items():
        if artifact.path.endswith(TABLE_SUFFIX):
            found.append(_table(name, artifact, {}))
        elif spec.stage == "check_data" and name != "tokenizer":
            found.append(_dataset(name, artifact.sha256, artifact.path, name, {"tidegate.sha256": artifact.sha256}))
    return found


def checked_datasets(folder: Path, result: StageResult) -> list[DatasetInput]:
    """Return the whole of the checked data, known by its fingerprint, and the tables that it was split into.

    Args:
        folder: the stage's directory.
        result: of check_data; of another stage nothing is returned.
    """
    fingerprint = result.summary.get("fingerprint")
    if not isinstance(fingerprint, str):
        return []
    tables = {
        name.removesuffix(TABLE_SUFFIX): Artifact(path=str(folder / output.path), sha256=output.sha256)
        for name, output in sorted(result.outputs.items())
        if name.endswith(TABLE_SUFFIX) and context_of(name) is not None
    }
    tags = {"tidegate.fingerprint": fingerprint}
    counts = {key: _total(result.summary[key]) for key in COUNTS if key in result.summary}
    num_rows = {name: _footer(artifact)[1] for name, artifact in tables.items()}
    whole = _dataset(
        CHECKED_DATA,
        fingerprint,
        str(folder / "outputs"),
        "training",
        tags,
        schema=next((_footer(artifact)[0] for name, artifact in tables.items() if name.startswith("train_")), None),
        profile={**counts, **{f"num_{name}": num for name, num in num_rows.items() if num is not None}},
    )
    return [whole, *(_table(name, artifact, tags) for name, artifact in tables.items())]


def log_new(client: MlflowClient, run: Any, datasets: Sequence[DatasetInput]) -> None:
    """Log the data sets that a run does not have yet."""
    known = {(item.dataset.name, item.dataset.digest) for item in run.inputs.dataset_inputs} if run.inputs else set()
    new = [item for item in datasets if (item.dataset.name, item.dataset.digest) not in known]
    if new:
        client.log_inputs(run.info.run_id, new)


def context_of(name: str) -> str | None:
    """Return what a table is used for; None for one that nothing is trained or measured on.

    >>> [context_of(name) for name in ("validation_pairs", "quarantine")]
    ['validation', None]
    """
    return next((context for start, context in CONTEXTS.items() if name.startswith(start)), None)


def _table(name: str, artifact: Artifact, tags: dict[str, str]) -> DatasetInput:
    schema, num_rows = _footer(artifact)
    profile = {} if num_rows is None else {"num_rows": num_rows}
    tags = {**tags, "tidegate.sha256": artifact.sha256}
    return _dataset(name, artifact.sha256, artifact.path, context_of(name) or name, tags, schema, profile)


def _dataset(
    name: str,
    digest: str,
    path: str,
    context: str,
    tags: dict[str, str],
    schema: str | None = None,
    profile: dict[str, int] | None = None,
) -> DatasetInput:
    from mlflow.data.dataset_source_registry import resolve_dataset_source
    from mlflow.entities import Dataset, DatasetInput, InputTag

    with warnings.catch_warnings():  # MLflow registers its source of local files twice and warns about that.
        warnings.simplefilter("ignore", UserWarning)
        source = resolve_dataset_source(path)
    dataset = Dataset(
        name=name,
        digest=digest[:DIGEST_CHARACTERS],
        source_type=source._get_source_type(),
        source=source.to_json(),
        schema=schema,
        profile=json.dumps(profile, sort_keys=True) if profile else None,
    )
    values = {"mlflow.data.context": context, **tags}
    return DatasetInput(dataset, tags=[InputTag(key, value) for key, value in values.items()])


def _footer(artifact: Artifact) -> tuple[str | None, int | None]:
    """Return the schema of a Parquet file as MLflow writes it, and its rows; None for both where it cannot be read."""
    try:
        with pq.ParquetFile(artifact.path) as file:
            return mlflow_schema(file.schema_arrow), file.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        # The stage that reads the file says so; what is only a record of it must not stop a run.
        logger.warning("MLflow is told no schema of %s: %s", artifact.path, error)
        return None, None


def mlflow_schema(schema: pa.Schema) -> str:
    """Return an Arrow schema in the JSON that MLflow shows."""
    from mlflow.types import ColSpec, Schema, TensorSpec

    names = shown_names(schema.names)
    columns: list[ColSpec | TensorSpec] = [
        ColSpec(_mlflow_type(field.type), names[field.name], required=False) for field in schema
    ]
    return json.dumps({"mlflow_colspec": Schema(columns).to_dict()})


def _mlflow_type(kind: pa.DataType) -> Any:
    from mlflow.types import DataType
    from mlflow.types.schema import AnyType, Array, Object, Property

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return Array(_mlflow_type(kind.value_type))
    if pa.types.is_struct(kind):
        names = shown_names(field.name for field in kind)
        return Object([Property(names[field.name], _mlflow_type(field.type), required=False) for field in kind])
    for matches, name in (
        (pa.types.is_boolean, DataType.boolean),
        (pa.types.is_integer, DataType.long),
        (pa.types.is_floating, DataType.double),
        (pa.types.is_string, DataType.string),
        (pa.types.is_large_string, DataType.string),
        (pa.types.is_dictionary, DataType.string),
        (pa.types.is_binary, DataType.binary),
        (pa.types.is_timestamp, DataType.datetime),
    ):
        if matches(kind):
            return name
    return AnyType()  # type: ignore[no-untyped-call]


def _total(value: Any) -> int:
    """Return a count, or the sum of counts by reason."""
    return sum(value.values()) if isinstance(value, dict) else int(value)
