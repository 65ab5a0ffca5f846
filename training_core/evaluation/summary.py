"""evaluation.json: the settings that all models shared, and each model's means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from training_core.config.evaluation import PAIRWISE_METRICS, EvaluateStageConfig
from training_core.evaluation.generation import ModelSource
from training_core.evaluation.samples import EvaluationPrompt, ModelSamples
from training_core.evaluation.statistics import cluster_sums, linearised, standard_error
from training_core.protocol.digests import config_digest
from training_core.records import PromptRow

EVALUATION_SCHEMA_VERSION = 1


def describe_settings(
    config: EvaluateStageConfig,
    rows: Sequence[PromptRow],
    reference: ModelSource,
    reward_model_sha256: str | None,
    seed: int,
) -> dict[str, Any]:
    """Return everything besides the models' weights that the scores depend on."""
    evaluation = config.evaluation.model_dump(mode="json", exclude={"num_prompts"})
    evaluation["sampling"]["max_new_tokens"] = config.max_new_tokens
    engine = config.rollout.model_dump(mode="json", exclude={"temperature", "max_new_tokens"})
    return {
        "engine": engine,
        "evaluation": evaluation,
        "seed": seed,
        "num_prompts": len(rows),
        "prompts_sha256": config_digest([row.model_dump(mode="json") for row in rows]),
        "tokenizer_sha256": reference.tokenizer_sha256,
        "reward_model_sha256": reward_model_sha256,
    }


def summarise(
    settings: Mapping[str, Any],
    sources: Sequence[ModelSource],
    tables: Mapping[str, ModelSamples],
    prompts: Sequence[EvaluationPrompt],
    metrics: Sequence[str],
) -> dict[str, Any]:
    """Return the content of evaluation.json."""
    models = {source.name: summarise_model(source, tables[source.name], prompts, metrics) for source in sources}
    return {
        "schema_version": EVALUATION_SCHEMA_VERSION,
        "evaluation_digest": config_digest(settings),
        "settings": dict(settings),
        "metrics": list(metrics),
        "models": models,
    }


def summarise_model(
    source: ModelSource, table: ModelSamples, prompts: Sequence[EvaluationPrompt], metrics: Sequence[str]
) -> dict[str, Any]:
    """Return means over prompts of the means over samples, with cluster-robust standard errors; null for no score."""
    means: dict[str, float | None] = {}
    errors: dict[str, float | None] = {}
    missing: dict[str, int] = {}
    for metric in metrics:
        by_prompt: dict[int, list[float]] = {}
        for sample, score in zip(table.samples, table.scores[metric], strict=True):
            if score is not None:
                by_prompt.setdefault(sample.prompt_index, []).append(score)
        missing[metric] = sum(score is None for score in table.scores[metric])
        means[metric], errors[metric] = None, None
        if by_prompt:
            values = [float(np.mean(scores)) for scores in by_prompt.values()]
            clusters = [prompts[index].group_id for index in by_prompt]
            means[metric] = cluster_sums(values, clusters).mean
            groups = cluster_sums(linearised(values) if metric in PAIRWISE_METRICS else values, clusters)
            errors[metric] = standard_error(groups) if len(groups) > 1 else None
    return {
        "weights_sha256": source.weights_sha256,
        "tokenizer_sha256": source.tokenizer_sha256,
        "num_samples": len(table.samples),
        "num_missing": missing,
        "means": means,
        "standard_errors": errors,
    }
