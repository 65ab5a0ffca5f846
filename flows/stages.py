"""Each stage as a flow of its own, deployable alone on a work pool.

The main flow passes its `run_id`; without one, a stage runs on its own and finds what it needs under the root.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from tasks.config import PipelineConfig
from tasks.data import check_data as check_data_task
from tasks.evaluation import decide_gate, evaluate_policy
from tasks.intake import take_in_checkpoint
from tasks.policy import train_policy
from tasks.registration_task import register_model
from tasks.reward import train_reward_model
from tasks.stage_tasks import run_stage_flow


@flow(name="sft-intake", flow_run_name="{config.name}-sft-intake", persist_result=False)
def sft_intake(config: PipelineConfig, run_id: str | None = None) -> Any:
    """Take in the SFT checkpoint."""
    return run_stage_flow(take_in_checkpoint, config, run_id)


@flow(name="check-data", flow_run_name="{config.name}-check-data", persist_result=False)
def check_data(config: PipelineConfig, run_id: str | None = None) -> Any:
    """Check and split the preference data."""
    return run_stage_flow(check_data_task, config, run_id)


@flow(name="reward-model", flow_run_name="{config.name}-reward-model", persist_result=False)
def reward_model(config: PipelineConfig, run_id: str | None = None) -> Any:
    """Train the reward model."""
    return run_stage_flow(train_reward_model, config, run_id)


@flow(name="policy", flow_run_name="{config.name}-policy", persist_result=False)
def policy(config: PipelineConfig, run_id: str | None = None) -> Any:
    """Train the policy."""
    return run_stage_flow(train_policy, config, run_id)


@flow(name="evaluate", flow_run_name="{config.name}-evaluate", persist_result=False)
def evaluate(config: PipelineConfig, run_id: str | None = None) -> Any:
    """Evaluate the policy."""
    return run_stage_flow(evaluate_policy, config, run_id)


@flow(name="gate", flow_run_name="{config.name}-gate", persist_result=False)
def gate(config: PipelineConfig, run_id: str | None = None) -> Any:
    """Decide whether the policy may go on."""
    return run_stage_flow(decide_gate, config, run_id)


@flow(name="register", flow_run_name="{config.name}-register", persist_result=False)
def register(config: PipelineConfig, run_id: str | None = None) -> Any:
    """Register a policy that passed."""
    return run_stage_flow(register_model, config, run_id)
