"""The task that trains the reward model."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.pipeline import PipelineRun
from tasks.stage_tasks import STAGE_TASK, stage_task_body


@task(name="reward-model", task_run_name="reward-model", **STAGE_TASK)
def train_reward_model(run: PipelineRun) -> Any:
    """Train the reward model on the checked pairs."""
    return stage_task_body(run, "reward_model")
