"""The table of an evaluation: one row an answer, one float64 column a metric; null = no score.

`samples.parquet` is what people, MLflow and the gate read. The same table with the answers' token ids is the state that
an interrupted evaluation continues from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from training_core.errors import EvaluationError
from training_core.evaluation.scores import MODEL_NAMES, EvaluationScores, MetricScores, ModelScores
from training_core.records import StopReason

TEXT_COLUMNS = ("prompt_id", "group_id", "prompt_text", "model", "answer", "stop_reason")
COLUMNS = ("prompt_id", "group_id", "prompt_text", "model", "sample_index", "answer", "num_tokens", "stop_reason")
TOKEN_IDS = "token_ids"

Scores = list[float | None]


@dataclass(frozen=True)
class Sample:
    """One answer of one model."""

    prompt_index: int
    sample_index: int
    token_ids: tuple[int, ...]
    """As sampled, with the end-of-turn token when `stop_reason` is EOS."""
    answer: str
    stop_reason: StopReason

    @property
    def num_tokens(self) -> int:
        """Length in tokens without the end-of-turn token."""
        return len(self.token_ids) - (self.stop_reason == StopReason.EOS)


@dataclass
class ModelSamples:
    """All answers of one model, by prompt and sample, and their scores so far."""

    samples: list[Sample]
    scores: dict[str, Scores] = field(default_factory=dict)

    def copy(self) -> ModelSamples:
        return dataclasses.replace(self, scores=dict(self.scores))


@dataclass(frozen=True)
class EvaluationPrompt:
    """A held-out prompt as the table shows it."""

    prompt_id: str
    group_id: str
    text: str


def add_scores(
    model: str, table: ModelSamples, metric: str, scores: Sequence[float | None], prompts: Sequence[EvaluationPrompt]
) -> None:
    """Put one score an answer into the table; None stays missing.

    Raises:
        EvaluationError: another number of scores than of answers, or a score that is not finite; names the prompt.
    """
    if len(scores) != len(table.samples):
        raise EvaluationError(
            f"metric {metric!r} gave {len(scores)} scores for the {model}'s {len(table.samples)} answers"
        )
    for sample, score in zip(table.samples, scores, strict=True):
        if score is not None and not math.isfinite(score):
            prompt = prompts[sample.prompt_index]
            raise EvaluationError(
                f"metric {metric!r} of the {model}'s answer {sample.sample_index} to prompt {prompt.prompt_id!r} is "
                f"{score}: {sample.answer[:80]!r}. A score must be finite, or missing; look at the metric and the model"
            )
    table.scores[metric] = [None if score is None else float(score) for score in scores]


def write_table(
    path: Path, tables: dict[str, ModelSamples], prompts: Sequence[EvaluationPrompt], metrics: Sequence[str]
) -> None:
    """Write samples.parquet: models in the order of `tables`, then prompts, then samples."""
    rows = [_row(name, sample, prompts[sample.prompt_index]) for name, t in tables.items() for sample in t.samples]
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        kind = pa.string() if name in TEXT_COLUMNS else pa.int64()
        columns[name] = pa.array([row[name] for row in rows], type=kind)
    for metric in metrics:
        values = [s for t in tables.values() for s in t.scores.get(metric, [None] * len(t.samples))]
        columns[metric] = pa.array(values, type=pa.float64())
    pq.write_table(pa.table(columns), path)


def _row(model: str, sample: Sample, prompt: EvaluationPrompt) -> dict[str, Any]:
    return {
        "prompt_id": prompt.prompt_id,
        "group_id": prompt.group_id,
        "prompt_text": prompt.text,
        "model": model,
        "sample_index": sample.sample_index,
        # A lone surrogate is no text that a file can hold.
        "answer": sample.answer.encode("utf-8", "replace").decode("utf-8"),
        "num_tokens": sample.num_tokens,
        "stop_reason": sample.stop_reason.value,
    }


def save_state(directory: Path, tables: dict[str, ModelSamples]) -> None:
    """Write one Parquet file a model into `directory`: enough to continue an evaluation."""
    for name, table in tables.items():
        columns: dict[str, Any] = {
            "prompt_index": pa.array([s.prompt_index for s in table.samples], type=pa.int64()),
            "sample_index": pa.array([s.sample_index for s in table.samples], type=pa.int64()),
            TOKEN_IDS: pa.array([list(s.token_ids) for s in table.samples], type=pa.list_(pa.int32())),
            "answer": pa.array([s.answer.encode("utf-8", "surrogatepass") for s in table.samples], type=pa.binary()),
            "stop_reason": pa.array([s.stop_reason.value for s in table.samples], type=pa.string()),
        }
        for metric, scores in table.scores.items():
            columns[f"score:{metric}"] = pa.array(scores, type=pa.float64())
        pq.write_table(pa.table(columns), directory / f"{name}.parquet")


def load_state(directory: Path) -> dict[str, ModelSamples]:
    """Return what `save_state` wrote, models in their fixed order."""
    tables = {}
    for name in MODEL_NAMES:
        path = directory / f"{name}.parquet"
        if not path.is_file():
            continue
        columns = pq.read_table(path).to_pydict()
        samples = [
            Sample(prompt, index, tuple(ids), answer.decode("utf-8", "surrogatepass"), StopReason(reason))
            for prompt, index, ids, answer, reason in zip(
                columns["prompt_index"],
                columns["sample_index"],
                columns[TOKEN_IDS],
                columns["answer"],
                columns["stop_reason"],
                strict=True,
            )
        ]
        scores = {n.removeprefix("score:"): values for n, values in columns.items() if n.startswith("score:")}
        tables[name] = ModelSamples(samples, scores)
    return tables


def read_scores(path: Path, weights_sha256: dict[str, str], evaluation_digest: str = "") -> EvaluationScores:
    """Return the scores in samples.parquet for the gate; any table with these columns will do.

    Args:
        path: the table. Null is a missing score; NaN stays NaN, for the gate to refuse.
        weights_sha256: digest of each model's weights; models of the table without one are refused.
        evaluation_digest: recorded in the verdict.

    Raises:
        EvaluationError: the table is unreadable, lacks a column, or a prompt's samples are not 0, 1, … once each.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise EvaluationError(f"{path} is no readable samples table: {error}") from error
    missing = [name for name in ("prompt_id", "group_id", "model", "sample_index") if name not in table.column_names]
    if missing:
        raise EvaluationError(f"{path} lacks the columns {', '.join(missing)}")
    metrics = [f.name for f in table.schema if pa.types.is_floating(f.type)]
    columns = table.to_pydict()
    rows_by_model: dict[str, list[int]] = {}
    for row, name in enumerate(columns["model"]):
        rows_by_model.setdefault(name, []).append(row)
    unnamed = sorted(set(rows_by_model) - set(weights_sha256))
    if unnamed:
        raise EvaluationError(
            f"{path} has answers of {', '.join(unnamed)}, whose weights evaluation.json does not name"
        )
    models = {
        name: _model_scores(columns, rows, metrics, weights_sha256[name], f"{path}, model {name}")
        for name, rows in rows_by_model.items()
    }
    return EvaluationScores(models=models, evaluation_digest=evaluation_digest, metric_names=tuple(metrics))


def _model_scores(
    columns: dict[str, list[Any]], rows: list[int], metrics: list[str], sha256: str, where: str
) -> ModelScores:
    by_prompt: dict[str, list[int]] = {}
    for row in rows:
        by_prompt.setdefault(columns["prompt_id"][row], []).append(row)
    num_samples = max(len(found) for found in by_prompt.values())
    for prompt_id, found in by_prompt.items():
        found.sort(key=lambda row: columns["sample_index"][row])
        if [columns["sample_index"][row] for row in found] != list(range(num_samples)):
            raise EvaluationError(
                f"{where}: prompt {prompt_id!r} does not have the samples 0 to {num_samples - 1} once each"
            )
    order = np.array([row for found in by_prompt.values() for row in found])
    scores = {}
    for metric in metrics:
        column = columns[metric]
        picked = [column[row] for row in order]
        scores[metric] = MetricScores.of(
            [picked[start : start + num_samples] for start in range(0, len(picked), num_samples)]
        )
    return ModelScores(
        weights_sha256=sha256,
        prompt_ids=tuple(by_prompt),
        group_ids=tuple(columns["group_id"][found[0]] for found in by_prompt.values()),
        metrics=scores,
    )
