"""MLflow runs by what they stand for: one for a pipeline run, a child for each of its stages.

They are found by tags, so that a process that knows nothing of an earlier one writes into the same runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.mlflow_store import StoreLocation, mlflow_errors, store_lock
from tasks.tracking_journal import JournalFile

if TYPE_CHECKING:
    from mlflow import MlflowClient

UID_TAG = "tidegate.uid"
STAGE_TAG = "tidegate.stage"
SPEC_TAG = "tidegate.spec_hash"
PARENT_TAG = "mlflow.parentRunId"


def find_run(client: MlflowClient, experiment: str, tags: Mapping[str, str]) -> str | None:
    """Return the id of the oldest run that has all of `tags`, or None."""
    conditions = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    runs = client.search_runs([experiment], conditions, max_results=1, order_by=["attributes.start_time ASC"])
    return str(runs[0].info.run_id) if runs else None


def find_or_create_run(
    client: MlflowClient,
    location: StoreLocation,
    experiment: str,
    identity: Mapping[str, str],
    *,
    name: str,
    started: float,
    parent: str | None = None,
) -> str:
    """Return the id of the run with the tags `identity`; create it when there is none, once, whoever asks.

    Args:
        started: Unix time in seconds, for a new run.
        parent: id of the run that a new one is a child of.
    """
    with store_lock(location), mlflow_errors(location, "open a run"):
        if found := find_run(client, experiment, identity):
            return found
        tags = dict(identity) | ({PARENT_TAG: parent} if parent else {})
        run = client.create_run(experiment, start_time=int(started * 1000), tags=tags, run_name=name)
        return str(run.info.run_id)


def pipeline_run(
    client: MlflowClient, location: StoreLocation, experiment: str, uid: str, name: str, started: float
) -> str:
    """Return the MLflow run of a pipeline run."""
    identity = {UID_TAG: uid, STAGE_TAG: "pipeline"}
    return find_or_create_run(client, location, experiment, identity, name=name, started=started)


def stage_run(
    client: MlflowClient,
    location: StoreLocation,
    experiment: str,
    root: Path,
    run_id: str | None,
    stage: str,
    spec_hash: str,
) -> str:
    """Return the MLflow run of one stage, also from inside the stage's own process.

    Args:
        run_id: the pipeline run it belongs to; None = the stage runs alone.
    """
    now = time.time()
    if run_id is None:
        identity = {UID_TAG: "alone", STAGE_TAG: stage, SPEC_TAG: spec_hash}
        return find_or_create_run(client, location, experiment, identity, name=stage, started=now)
    journal = JournalFile(root, run_id).create(run_id, run_id, experiment, location.store_id)
    parent = pipeline_run(client, location, experiment, journal.uid, journal.name, journal.started)
    identity = {UID_TAG: journal.uid, STAGE_TAG: stage, SPEC_TAG: spec_hash}
    return find_or_create_run(client, location, experiment, identity, name=stage, started=now, parent=parent)


def close_run(client: MlflowClient, run_id: str, status: str, ended: float | None = None) -> None:
    """End a run with FINISHED, FAILED or KILLED, whatever it was before."""
    client.set_terminated(run_id, status, end_time=int((ended or time.time()) * 1000))
