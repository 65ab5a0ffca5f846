"""The task that trains the policy."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.pipeline import PipelineRun
from tasks.stage_tasks import STAGE_TASK, stage_task_body


@task(name="policy", task_run_name="policy", **STAGE_TASK)
def train_policy(run: PipelineRun) -> Any:
    """Train the policy by RL from the SFT checkpoint."""
    return stage_task_body(run, "policy")
