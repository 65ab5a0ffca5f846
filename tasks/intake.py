"""The task that takes in the SFT checkpoint."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.pipeline import PipelineRun
from tasks.stage_tasks import STAGE_TASK, stage_task_body


@task(name="sft-intake", task_run_name="sft-intake", **STAGE_TASK)
def take_in_checkpoint(run: PipelineRun) -> Any:
    """Verify the SFT checkpoint and store it as safetensors with its tokenizer."""
    return stage_task_body(run, "sft_intake")
