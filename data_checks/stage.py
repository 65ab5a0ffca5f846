"""The `check_data` stage: files in, canonical tables, a quarantine and a report out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from data_checks.config import CheckDataConfig, FeedbackFile, PreferenceFile
from data_checks.entries import InputFiles
from data_checks.feedback_metrics import feedback_lengths, feedback_metrics
from data_checks.metrics import DatasetMetrics, dataset_metrics, length_statistics
from data_checks.report import build_report, refusal, run_checks, summarise
from data_checks.runner import CheckedData, check_dataset
from data_checks.tables import feedback_table, pair_table, prompt_table, quarantine_table, write_table
from data_checks.tokens import load_tokenizer
from data_checks.wording import describe_check
from training_core.errors import ConfigurationError, DataError
from training_core.protocol.atomic import write_json
from training_core.protocol.context import StageContext
from training_core.protocol.digests import verify_digest
from training_core.records import StageOutcome

logger = logging.getLogger("tidegate.check_data")


def run(context: StageContext) -> StageOutcome:
    """Check the data that the spec names (docs/stages.md lists inputs and outputs).

    The quarantine and the report are written before a refusal, so that they can be looked at.

    Raises:
        DataError: a file cannot be read, has no rows or no clear format, or a critical check does not pass.
        DigestMismatchError: a file is not the one that the config's `sha256` names.
        ArtifactError: the tokenizer does not load, or an input is missing.
    """
    config = CheckDataConfig.model_validate(context.spec.config)
    files = input_files(context, config)
    tokenizer = load_tokenizer(context.input_path("tokenizer"))
    data = check_dataset(files, config, tokenizer, seed=context.spec.seed, progress=context.progress)
    outputs = write_tables(context, data)

    metrics = dataset_metrics(data)
    checks, results = run_checks(data, config, metrics)
    report = context.new_output("report")
    report.mkdir()
    write_json(report / "report.json", build_report(data, checks, metrics))
    write_json(report / "great_expectations.json", results)
    outputs["report"] = "outputs/report"
    write_metrics(context, data, metrics)
    for check in checks:
        if check.verdict != "pass" and (data.pairs or check.value is not None):
            logger.warning("%s: %s: %s", check.verdict, describe_check(check, data), check.error or check.advice)
    if message := refusal(data, checks, str(context.directory.outputs_path)):
        raise DataError(message)
    return StageOutcome(outputs=outputs, summary=summarise(data, checks, metrics))


def input_files(context: StageContext, config: CheckDataConfig) -> InputFiles:
    """Return where the spec's inputs lie, after comparing them with the digests in the config.

    Raises:
        ConfigurationError: config and inputs do not name the same prompt files.
        DigestMismatchError: a file is not the one that the config names.
    """
    preferences = _listed_files(context, "preferences", "preference", config.preferences)
    feedback = _listed_files(context, "feedback", "feedback", config.feedback)
    prompts: dict[str, Path | None] = {}
    for name in ("rl_prompts", "eval_prompts"):
        wanted = getattr(config, name) is not None
        if wanted != context.has_input(name):
            raise ConfigurationError(
                f"data.{name} is {'set' if wanted else 'null'} in the config, but the spec has "
                f"{'no' if wanted else 'an'} input of that name. Plan again"
            )
        prompts[name] = context.input_path(name) if wanted else None
    return InputFiles(preferences, prompts["rl_prompts"], prompts["eval_prompts"], feedback)


def _listed_files(
    context: StageContext, name: str, kind: str, files: Sequence[PreferenceFile | FeedbackFile]
) -> list[Path]:
    paths = [context.input_path(f"{name}_{index}") for index in range(len(files))]
    for path, file in zip(paths, files, strict=True):
        if file.sha256 is not None:
            verify_digest(path, file.sha256, f"{kind} file {file.path} (its sha256 is in the config)")
    return paths


def write_tables(context: StageContext, data: CheckedData) -> dict[str, str]:
    """Write the Parquet outputs; return their names and paths.

    Tables of pairs are always there, without rows where no pairs were read; those of feedback where feedback was read.
    """
    tables = {
        "train_pairs": pair_table(data.train),
        "validation_pairs": pair_table(data.validation),
        "rl_prompts": prompt_table(data.rl_prompts),
        "eval_prompts": prompt_table(data.eval_prompts),
        "quarantine": quarantine_table(data.quarantined),
    }
    if "feedback" in data.counts:
        tables["train_feedback"] = feedback_table(data.train_feedback)
        tables["validation_feedback"] = feedback_table(data.validation_feedback)
    outputs = {}
    for name, table in tables.items():
        write_table(table, context.new_output(f"{name}.parquet"))
        outputs[f"{name}.parquet"] = f"outputs/{name}.parquet"
    return outputs


def write_metrics(context: StageContext, data: CheckedData, metrics: DatasetMetrics) -> None:
    """Write the numbers of the data set as the stage's only step."""
    values = {f"data/{name}": value for name, value in metrics.items() if value is not None}
    for column, statistics in length_statistics(data.pairs).items():
        values |= {f"length/{column}_{name}": value for name, value in statistics.items()}
    if "feedback" in data.counts:
        values |= {f"data/{name}": value for name, value in feedback_metrics(data).items() if value is not None}
        for column, statistics in feedback_lengths(data.feedback).items():
            values |= {f"length/feedback_{column}_{name}": value for name, value in statistics.items()}
    context.metrics.truncate_after(0)
    context.metrics.write(1, values)
