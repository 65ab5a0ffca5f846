"""The `check_data` stage: files in, canonical tables, a quarantine and a report out."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from data_checks.check import Outcome, check
from data_checks.checks import describe_check
from data_checks.config import CheckDataConfig, FeedbackFile, PreferenceFile
from data_checks.presentation import write_report
from data_checks.report import refusal, summarise
from data_checks.runner import InputFiles
from data_checks.unforeseen import without_row_text
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
    work_folder = context.directory.path / "work"
    folder = context.directory.outputs_path
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with without_row_text():
            outcome = check(
                files,
                config,
                context.input_path("tokenizer"),
                seed=context.spec.seed,
                work_folder=work_folder,
                output_folder=folder,
                progress=context.progress,
            )
    finally:
        shutil.rmtree(work_folder, ignore_errors=True)
    outputs = {f"{name}.parquet": f"outputs/{name}.parquet" for name in outcome.data.tables}
    write_report(outcome, context.new_output("report"))
    outputs["report"] = "outputs/report"
    # An output of its own: what the reward model must beat, and nothing that changes without it.
    write_json(context.new_output("baselines.json"), outcome.report["baselines"] or {})
    outputs["baselines.json"] = "outputs/baselines.json"
    write_metrics(context, outcome)
    for found in outcome.checks:
        if found.verdict in ("warn", "fail", "error"):
            logger.warning(
                "%s: %s: %s", found.verdict, describe_check(found, outcome.data), found.error or found.advice
            )
    if message := refusal(outcome.data, outcome.checks, str(folder)):
        raise DataError(message)
    return StageOutcome(outputs=outputs, summary=summarise(outcome.data, outcome.checks, outcome.numbers))


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


def write_metrics(context: StageContext, outcome: Outcome) -> None:
    """Write the numbers of the data set as the stage's only step."""
    values = {f"data/{name}": value for name, value in outcome.numbers.items() if value is not None}
    for column, statistics in outcome.report["lengths"].items():
        values |= {f"length/{column}_{name}": value for name, value in statistics.items()}
    context.metrics.truncate_after(0)
    context.metrics.write(1, values)
