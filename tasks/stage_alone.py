"""One stage on behalf of a main flow elsewhere."""

from __future__ import annotations

from tasks import planning
from tasks.code_files import digest_code_files
from tasks.config import PipelineConfig
from tasks.dispatch import run_stage
from tasks.planning import ChainState, FinishedStage, root_of
from tasks.plans import PlanState, assess, require_finished
from tasks.progress import observer
from tasks.rivals import adopt_champion
from tasks.runs import RunRecord, StageState, load_run
from training_core.errors import TidegateError
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact


def run_stage_alone(name: str, config: PipelineConfig, run_id: str) -> FinishedStage:
    """Run one stage on behalf of a main flow elsewhere, which keeps the run's record and sends its metrics.

    Raises:
        TidegateError: of the type that the stage reported.
    """
    root = root_of(config)
    record = load_run(root, run_id)
    if record is None:
        raise TidegateError(
            f"no run {run_id} under {config.root}. With orchestration.mode deployments all workers must share `root`"
        )
    state = ChainState(config, root, planned_files(config, record))
    adopt_champion(state, record)
    stage = planning.BY_NAME[name]
    require_finished(stage, state)
    plan = assess(stage, state)
    if plan.state is PlanState.CACHED:
        return state.finished[name]
    assert plan.spec is not None
    assert plan.directory is not None
    directory = StageDirectory(plan.directory)
    local = config.model_copy(update={"orchestration": config.orchestration.model_copy(update={"mode": "local"})})
    observer().stage_started(name, plan.state.value, plan.why)
    result = run_stage(stage, plan.spec, directory, local, run_id, "", lambda progress: None)
    observer().stage_finished(name, StageState.COMPLETED.value, result.seconds)
    return FinishedStage(directory, result)


def planned_files(config: PipelineConfig, record: RunRecord) -> dict[str, Artifact]:
    """Return the files from outside as they were planned, modules with rewards where this machine has them.

    The stage itself verifies that they are the planned ones.

    Raises:
        ConfigurationError: this machine lacks a module.
    """
    here = digest_code_files(config)
    return {
        name: artifact.model_copy(update={"path": here[name].path}) if name in here else artifact
        for name, artifact in record.inputs.items()
    }
