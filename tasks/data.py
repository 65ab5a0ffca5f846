"""The task that checks the data."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.pipeline import PipelineRun
from tasks.stage_tasks import STAGE_TASK, stage_task_body


@task(name="check-data", task_run_name="check-data", **STAGE_TASK)
def check_data(run: PipelineRun) -> Any:
    """Turn preference files into checked, split pairs and prompts."""
    return stage_task_body(run, "check_data")
