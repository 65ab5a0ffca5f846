"""The tasks that evaluate the policy and decide."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.pipeline import PipelineRun
from tasks.stage_tasks import STAGE_TASK, stage_task_body


@task(name="evaluate", task_run_name="evaluate", **STAGE_TASK)
def evaluate_policy(run: PipelineRun) -> Any:
    """Compare the policy with the SFT checkpoint and the champion on held-out prompts."""
    return stage_task_body(run, "evaluate")


@task(name="gate", task_run_name="gate", **STAGE_TASK)
def decide_gate(run: PipelineRun) -> Any:
    """Decide whether the policy may go on."""
    return stage_task_body(run, "gate")
