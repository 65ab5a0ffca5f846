"""The config of a whole pipeline: the stages' configs, how to run them, and rules that span stages."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from data_checks.config import CheckDataConfig
from tasks.consistency import find_conflicts
from tasks.roots import DEFAULT_ROOT
from training_core.config.algorithms import AlgorithmConfig
from training_core.config.base import Config
from training_core.config.evaluation import EvaluationConfig
from training_core.config.gate import GateConfig
from training_core.config.intake import IntakeConfig
from training_core.config.reward_model import RewardModelConfig
from training_core.config.rewards import RewardConfig, check_names_differ
from training_core.config.rollout import RolloutConfig

NOT_IDENTITY = ("root", "launch", "tracking", "orchestration")
"""Fields that say how and where to run, not what to compute: two runs that differ only here are the same run."""


class RegistryConfig(Config):
    """Where a trained model is registered."""

    model_name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=200)
    """Name of the registered model in MLflow. Its versions carry the aliases `challenger` and `champion`."""


class TrackingConfig(Config):
    """Which MLflow store takes metrics and models."""

    uri: str | None = None
    """An MLflow server (`http://host:5000`) or a database (`sqlite:////absolute/path.db`), without credentials: those
    come from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD. Default: MLFLOW_TRACKING_URI when it is set, else
    an SQLite file below `root`."""
    experiment: str = Field(default="tidegate", min_length=1)
    """MLflow experiment that holds the runs."""
    poll_seconds: float = Field(default=5.0, gt=0, le=600)
    """How often new metrics are sent. Default: 5."""
    flush_seconds: float = Field(default=30.0, ge=0, le=600)
    """How long the end of a run waits for metrics that MLflow has not taken yet; they are sent by the next run else."""


class LaunchConfig(Config):
    """How a stage's process is started and ended."""

    python: str | None = None
    """Interpreter for the stages, e.g. one of an environment with another vLLM. Default: the one that runs this."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """A stage that runs longer is asked to save and ended. Default: no limit."""
    grace_seconds: float = Field(default=25.0, gt=0, le=3600)
    """Time to save between SIGTERM and SIGKILL. Default 25: Prefect kills a cancelled flow after 30."""
    num_threads: int | None = Field(default=None, ge=1)
    """Threads of the stages' maths. It can change the last bits of results, so set it where bits must agree between
    machines. Default: what torch chooses."""
    retries: int = Field(default=3, ge=0, le=100)
    """How often a pre-empted stage is started again within one run. A stage that met a server which did not answer is
    started once more whatever this says. Default: 3."""
    offline: bool = True
    """Keep Hugging Face libraries off the network. Set false for a checkpoint named by its hub id."""


class OrchestrationConfig(Config):
    """Where stages run: in this process's machine, or as Prefect deployments on work pools."""

    mode: Literal["local", "deployments"] = "local"
    """`local`: each stage is a child process here. `deployments`: each stage is a flow run of its own on a work pool;
    `root` must then be a folder that all workers share."""
    cpu_deployment: str = Field(default="cpu", min_length=1)
    """Deployment name of the stages that need no accelerator (`check-data/<name>` and so on)."""
    gpu_deployment: str = Field(default="gpu", min_length=1)
    """Deployment name of the stages that train or sample."""
    poll_seconds: float = Field(default=2.0, gt=0, le=300)
    """How often the main flow looks at a stage's flow run. Default: 2."""


class PipelineConfig(Config):
    """From preference data and an SFT checkpoint to a registered model."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=60)
    """What this pipeline is called: lower-case letters, digits, dashes. The run id starts with it."""
    root: str = DEFAULT_ROOT
    """Folder for everything that runs write. `--root` and TIDEGATE_ROOT come first. Default: .tidegate"""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of every stage."""
    checkpoint: IntakeConfig
    """The SFT checkpoint to start from."""
    data: CheckDataConfig
    """Preference data and prompts."""
    reward_model: RewardModelConfig | None = None
    """How to train the reward model; null when no reward uses one."""
    algorithm: AlgorithmConfig
    """The algorithm that trains the policy."""
    rollout: RolloutConfig
    """How answers are sampled."""
    rewards: list[RewardConfig] = Field(default_factory=list)
    """What answers are rewarded for: at least one part for algorithms that sample, none for dpo and kto."""
    evaluation: EvaluationConfig
    """What is measured on the held-out prompts."""
    gate: GateConfig
    """What a candidate must show."""
    registry: RegistryConfig
    """Where the model is registered."""
    tracking: TrackingConfig = TrackingConfig()
    """Which MLflow store is used."""
    launch: LaunchConfig = LaunchConfig()
    """How stages' processes are started and ended."""
    orchestration: OrchestrationConfig = OrchestrationConfig()
    """Where stages run."""

    @model_validator(mode="after")
    def _stages_fit_together(self) -> Self:
        check_names_differ(self.rewards)
        if conflicts := find_conflicts(self):
            raise ValueError("\n".join(conflicts))  # One problem a line, each starts with its field.
        return self

    def identity(self) -> dict[str, Any]:
        """Return what decides the results, as JSON."""
        return self.model_dump(mode="json", exclude=set(NOT_IDENTITY))
