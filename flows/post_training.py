"""The main flow: from preference data and an SFT checkpoint to a registered model."""

from __future__ import annotations

from typing import Any

from prefect import flow

from tasks.config import PipelineConfig
from tasks.data import check_data
from tasks.evaluation import decide_gate, evaluate_policy
from tasks.intake import take_in_checkpoint
from tasks.pipeline import PipelineRun
from tasks.policy import train_policy
from tasks.registration_task import register_model
from tasks.reward import train_reward_model
from tasks.stage_tasks import call


@flow(name="post-training", flow_run_name="{config.name}", persist_result=False)
def post_training(config: PipelineConfig) -> Any:
    """Check the data, train, evaluate, decide, register. The same config and files again continue the same run.

    The final state is Completed when the gate passed, Rejected (a completed state) when it did not, GateError (failed)
    when it could not decide, Pre-empted (failed) when the run was asked to stop.
    """
    with PipelineRun(config) as run:
        call(take_in_checkpoint, run)
        call(check_data, run)
        if config.reward_model is not None:
            call(train_reward_model, run)
        call(train_policy, run)
        call(evaluate_policy, run)
        call(decide_gate, run)
        call(register_model, run)
    return run.final_state()
