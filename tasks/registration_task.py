"""The task that registers a policy that passed."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.pipeline import PipelineRun
from tasks.stage_tasks import STAGE_TASK, stage_task_body


@task(name="register", task_run_name="register", **STAGE_TASK)
def register_model(run: PipelineRun) -> Any:
    """Register the policy in MLflow and make it champion, if the gate passed."""
    return stage_task_body(run, "register")
