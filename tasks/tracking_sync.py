"""Makes MLflow agree with a journal. Called again and again while the run goes on, and by a later run for the rest.

Every step looks at what MLflow has first, so that any call may follow any crash.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.alarms import ALARMS_FILE, alarm_counts, read_alarms
from tasks.mlflow_runs import SPEC_TAG, STAGE_TAG, UID_TAG, close_run, find_or_create_run, find_run, pipeline_run
from tasks.mlflow_store import StoreLocation, experiment_id, redact, redact_uris
from tasks.showing import flatten
from tasks.tracking_datasets import checked_datasets, input_datasets, log_new
from tasks.tracking_journal import FINISHED, Journal, StageNote, stage_of
from tasks.tracking_rows import (
    ALARMS_PREFIX,
    METRICS_PER_BATCH,
    MetricLog,
    mlflow_key,
    rule_numbers,
    summary_numbers,
)
from training_core.protocol.atomic import read_json
from training_core.protocol.digests import file_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import StageResult, StageSpec

if TYPE_CHECKING:
    from mlflow import MlflowClient

ENTRIES_PER_BATCH = 100
"""Params or tags: MLflow's own limit for one request."""
MAX_PARAM_CHARACTERS = 500
MAX_TAG_CHARACTERS = 5000
MAX_ARTIFACT_BYTES = 50 << 20
ARTIFACT_SUFFIXES = (".json", ".html", ".md")
DATASET_CARD = "DATASET_CARD.md"
DESCRIPTION_TAG = "mlflow.note.content"
"""Markdown that MLflow shows at the head of a run's page."""
DONE_TAG = "tidegate.done"
"""Set last, to the digest of result.json: everything of this result is in MLflow."""


class RunSync:
    """One pipeline run and its stages, with what this process knows of their MLflow runs."""

    def __init__(self, client: MlflowClient, location: StoreLocation) -> None:
        self.client = client
        self.location = location
        self.pipeline_id: str | None = None
        self.stages: dict[str, StageSync] = {}
        self.stage_ids: dict[str, str] = {}
        """Stage -> MLflow run id."""
        self._experiment: str | None = None
        self._last_status: str | None = None

    def sync(self, journal: Journal) -> None:
        """Send everything that is new. Raises what MLflow raises; nothing is lost then, and the next call goes on."""
        if self._experiment is None:
            self._experiment = experiment_id(self.client, self.location, journal.experiment)
        if self.pipeline_id is None:
            self.pipeline_id = pipeline_run(
                self.client, self.location, self._experiment, journal.uid, journal.name, journal.started
            )
            add_missing_params(self.client, self.pipeline_id, journal.params)
        # Directories that the run left come first: what the pipeline's run shows of a stage is of the present one.
        for key, note in sorted(journal.stages.items(), key=lambda item: stage_of(item[0]) == item[0]):
            name = stage_of(key)
            stage = self.stages.get(f"{name}:{note.directory}") or self._open_stage(journal, name, note)
            self.stages[f"{name}:{note.directory}"] = stage
            if key == name:
                self.stage_ids[name] = stage.run_id
            stage.sync(note)
        self._describe(journal)

    def _open_stage(self, journal: Journal, name: str, note: StageNote) -> StageSync:
        assert self._experiment is not None
        spec_hash = Path(note.directory).name
        identity = {UID_TAG: journal.uid, STAGE_TAG: name, SPEC_TAG: spec_hash}
        run_id = find_or_create_run(
            self.client,
            self.location,
            self._experiment,
            identity,
            name=name,
            started=note.started,
            parent=self.pipeline_id,
        )
        cached_from = None
        if note.cached:
            first = find_run(self.client, self._experiment, {STAGE_TAG: name, SPEC_TAG: spec_hash})
            cached_from = first if first != run_id else None
        assert self.pipeline_id is not None
        return StageSync(self.client, run_id, Path(note.directory), cached_from, name, self.pipeline_id)

    def _describe(self, journal: Journal) -> None:
        """Tags, artifacts and status of the pipeline's own run."""
        assert self.pipeline_id is not None
        status = journal.status or "RUNNING"
        if status == self._last_status:
            return
        set_tags(self.client, self.pipeline_id, journal.tags | ({"tidegate.state": journal.state}))
        if journal.status is None:
            self.client.update_run(self.pipeline_id, status="RUNNING")
        else:
            for path in map(Path, journal.artifacts):
                if path.is_file():
                    self.client.log_artifact(self.pipeline_id, str(path))
            close_run(self.client, self.pipeline_id, status, journal.ended)
        self._last_status = status


class StageSync:
    """One stage's MLflow run."""

    def __init__(
        self,
        client: MlflowClient,
        run_id: str,
        directory: Path,
        cached_from: str | None,
        name: str,
        pipeline_id: str,
    ) -> None:
        self.client = client
        self.run_id = run_id
        self.name = name
        self.pipeline_id = pipeline_id
        self.directory = StageDirectory(directory)
        self.cached_from = cached_from
        self.log = MetricLog(client, run_id, directory)
        self._alarms: dict[str, float] = {}
        """Counts that MLflow knows, by metric."""
        self._described = False
        self._ended: tuple[str, float | None] | None = None
        """Status and time of the end that MLflow knows."""

    def sync(self, note: StageNote) -> None:
        """Send new rows; at the end of the stage also its result."""
        end = (note.status, note.ended) if note.status is not None else None
        if self._ended is not None:
            if self._ended == end:
                return
            self._ended, self._described = None, False  # Another attempt at the stage: it runs again, or has run.
        if not self._described:
            run = self.client.get_run(self.run_id)
            if note.status == FINISHED and run.info.status == FINISHED and run.data.tags.get(DONE_TAG) == self._done():
                self._ended = end  # Nothing to add: the same stage of the same run was completed before.
                return
            self._describe(run)
            self._described = True
        self.log.send_new()
        self._send_alarms()
        if note.status is None or end is None:
            return
        result = self.directory.result() if note.status == FINISHED else None
        if result is not None:
            self._send_result(result)
        set_tags(self.client, self.run_id, {"tidegate.error": note.error})  # Empty, it takes back an earlier one.
        close_run(self.client, self.run_id, note.status, note.ended)
        self._ended = end

    def _describe(self, run: Any) -> None:
        self.client.update_run(self.run_id, status="RUNNING")
        tags = {"tidegate.directory": str(self.directory.path)}
        if self.cached_from:
            tags["tidegate.cached_from"] = self.cached_from
        if self.directory.environment_path.exists():
            attempts = read_json(self.directory.environment_path)["attempts"]
            tags["tidegate.resumed"] = str(len(attempts) > 1).lower()
            tags["tidegate.git_commit"] = str(attempts[-1].get("git_commit") or "")
        if self.directory.spec_path.exists():
            spec = StageSpec.load(self.directory.spec_path)
            params = {"seed": spec.seed, "stage_version": spec.stage_version, **flatten(spec.config)}
            add_missing_params(self.client, self.run_id, params)
            log_new(self.client, run, input_datasets(spec))
            for name, artifact in spec.inputs.items():
                tags[f"tidegate.input.{name}"] = artifact.sha256
        set_tags(self.client, self.run_id, tags)

    def _send_alarms(self) -> None:
        """Count the alarms of each sentinel, in the stage's run and the pipeline's; what a roll-back undid is gone."""
        counts = alarm_counts(read_alarms(self.directory.path / ALARMS_FILE))
        values = {f"{ALARMS_PREFIX}{name}": float(count) for name, count in counts.items()}
        if values == self._alarms:
            return
        logged = [key for key in self.client.get_run(self.run_id).data.metrics if key.startswith(ALARMS_PREFIX)]
        told = dict.fromkeys(logged, 0.0) | values
        set_metrics(self.client, self.run_id, told)
        set_metrics(self.client, self.pipeline_id, {f"{self.name}/{key}": value for key, value in told.items()})
        self._alarms = values

    def _send_result(self, result: StageResult) -> None:
        numbers = summary_numbers(result.summary) | {
            "seconds": result.seconds,
            "peak_rss_bytes": float(result.peak_rss_bytes),
            "attempts": float(result.attempts),
        }
        self.log.send_summary(numbers)
        outcome = summary_numbers(result.summary) | rule_numbers(result.summary)
        set_metrics(self.client, self.pipeline_id, {f"{self.name}/{key}": value for key, value in outcome.items()})
        if datasets := checked_datasets(self.directory.path, result):
            for run_id in (self.run_id, self.pipeline_id):
                log_new(self.client, self.client.get_run(run_id), datasets)
        files = result_files(self.directory, result)
        for path in files:
            self.client.log_artifact(self.run_id, str(path))
        tags = {f"tidegate.output.{name}": artifact.sha256 for name, artifact in result.outputs.items()}
        for card in (path for path in files if path.name == DATASET_CARD):
            tags[DESCRIPTION_TAG] = card.read_text(encoding="utf-8")
        for key, value in result.summary.items():
            if isinstance(value, str):
                tags[f"tidegate.{key}"] = value
        set_tags(self.client, self.run_id, tags | {"tidegate.resumed": str(result.attempts > 1).lower()})
        set_tags(self.client, self.run_id, {DONE_TAG: self._done()})

    def _done(self) -> str:
        path = self.directory.result_path
        return file_digest(path) if path.exists() else ""


def result_files(directory: StageDirectory, result: StageResult) -> list[Path]:
    """Return the readable files among a stage's outputs: gate.json, evaluation.json, reports; never a model's."""
    found = []
    for artifact in result.outputs.values():
        path = directory.path / artifact.path
        holds_model = (path / "config.json").exists() or (path / "tokenizer_config.json").exists()
        files = sorted(path.iterdir()) if path.is_dir() and not holds_model else [path]
        found += [f for f in files if f.is_file() and f.suffix in ARTIFACT_SUFFIXES]
    return [f for f in found if f.stat().st_size <= MAX_ARTIFACT_BYTES]


def add_missing_params(client: MlflowClient, run_id: str, params: dict[str, Any]) -> None:
    """Log params that the run does not have; MLflow never changes one."""
    from mlflow.entities import Param

    known = client.get_run(run_id).data.params
    named = {mlflow_key(name): param_text(value) for name, value in params.items()}
    new = [Param(name, text) for name, text in sorted(named.items()) if name not in known]
    for start in range(0, len(new), ENTRIES_PER_BATCH):
        client.log_batch(run_id, params=new[start : start + ENTRIES_PER_BATCH])


def param_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return redact_uris(text)[:MAX_PARAM_CHARACTERS]


def set_tags(client: MlflowClient, run_id: str, tags: dict[str, str]) -> None:
    from mlflow.entities import RunTag

    entries = [RunTag(mlflow_key(key), redact(value)[:MAX_TAG_CHARACTERS]) for key, value in tags.items()]
    for start in range(0, len(entries), ENTRIES_PER_BATCH):
        client.log_batch(run_id, tags=entries[start : start + ENTRIES_PER_BATCH])


def set_metrics(client: MlflowClient, run_id: str, values: dict[str, float]) -> None:
    """Give a run these metrics, each a single value: one that it has already is not sent again.

    MLflow shows the value with the latest time, so one that changed (another champion) replaces the old.
    """
    from mlflow.entities import Metric

    known, now = client.get_run(run_id).data.metrics, int(time.time() * 1000)
    named = {mlflow_key(name): value for name, value in values.items()}
    new = [Metric(name, value, now, 0) for name, value in named.items() if known.get(name) != value]
    for start in range(0, len(new), METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=new[start : start + METRICS_PER_BATCH])
