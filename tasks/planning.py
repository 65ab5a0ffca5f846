"""The chain as a table of stages, and what each of them would be given: its spec.

A spec follows from the pipeline's config, the digests of the files from outside, and the results of the stages before.
To add a stage: write its builder and put a row into `CHAIN`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import data_checks
import tasks
import training_core.stages
from tasks.code_files import code_files
from tasks.config import PipelineConfig
from tasks.consistency import is_online, learns_from_feedback
from tasks.early_checks import check_answer_room, check_prompts
from tasks.inputs import digest_external_files, external_files, without_folders
from tasks.mlflow_store import locate_store
from tasks.roots import ROOT_VARIABLE, usable_root
from training_core.errors import ConfigurationError
from training_core.protocol.child import StageEntry
from training_core.protocol.digests import config_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageResult, StageSpec, Verdict

PACKAGES: dict[str, Mapping[str, StageEntry]] = {
    "training_core": training_core.stages.STAGES,
    "data_checks": data_checks.STAGES,
    "tasks": tasks.STAGES,
}
RUN_HASH_LENGTH = 12
BASELINES = "baselines.json"
"""Output of check_data, where there are pairs: what a reward model has to beat."""


@dataclass(frozen=True)
class FinishedStage:
    """A complete stage and where it lies."""

    directory: StageDirectory
    result: StageResult

    def artifact(self, name: str) -> Artifact:
        """Return an output as the input of a later stage."""
        output = self.result.outputs[name]
        return Artifact(path=str(self.directory.path / output.path), sha256=output.sha256)


@dataclass
class ChainState:
    """What is known while a chain is planned or run."""

    config: PipelineConfig
    root: Path
    external: dict[str, Artifact]
    """Dotted field -> file from outside, with the digest that it had when the run was planned."""
    finished: dict[str, FinishedStage] = field(default_factory=dict)
    champion: Artifact | None = None
    """Weights of the registry's champion, once it is known that there is one."""
    champion_known: bool = False

    @classmethod
    def begin(cls, config: PipelineConfig) -> ChainState:
        """Digest the files from outside.

        Raises:
            ConfigurationError: one is missing or of a kind that no stage reads; the root or the store cannot be used.
            DataError: a data file holds no rows.
            DigestMismatchError: a file is not the one that the config's `sha256` names.
            ArtifactError: the checkpoint is damaged, incomplete or of a refused kind.
        """
        root = root_of(config)
        locate_store(config.tracking, root)  # Refuses an unusable one, or a password in it, before anything is written.
        return cls(config, root, digest_external_files(config))

    @classmethod
    def begun(cls, config: PipelineConfig) -> ChainState:
        """Return the state that `handed_over` holds for this config, else `begin` anew."""
        for state in _handed_over:
            if state.config == config:
                return cls(config, state.root, dict(state.external))
        return cls.begin(config)

    @property
    def portable_config(self) -> dict[str, Any]:
        """The config as JSON with files as stand-ins: what stages are given and hashes see."""
        return without_folders(self.config, self.config.identity())

    @property
    def config_sha256(self) -> str:
        """Digest of the config wherever its files lie: a tag of the run and of the model version in MLflow."""
        return config_digest(self.portable_config)

    @property
    def run_id(self) -> str:
        """`<name>-<12 hex>` over the config and the digests of the files from outside."""
        digests = {name: artifact.sha256 for name, artifact in self.external.items()}
        identity = {"config": self.portable_config, "inputs": digests}
        return f"{self.config.name}-{config_digest(identity)[:RUN_HASH_LENGTH]}"

    def output(self, stage: str, name: str) -> Artifact:
        return self.finished[stage].artifact(name)


_handed_over: list[ChainState] = []


@contextlib.contextmanager
def handed_over(state: ChainState) -> Iterator[None]:
    """Let a run that starts within take over the digests of `state`: the same files once more, and the same run id.

    A file that changes in between is found by the stage that reads it.
    """
    _handed_over.append(state)
    try:
        yield
    finally:
        _handed_over.remove(state)


def root_of(config: PipelineConfig) -> Path:
    """Return the config's root as an absolute path.

    Raises:
        ConfigurationError: it is no folder and cannot be one, or a placeholder that a deployment left unfilled.
    """
    if "{{" in config.root:
        raise ConfigurationError(
            f"root is {config.root!r}: the variable that it names was not set when the deployments were made. Set "
            f"{ROOT_VARIABLE}, an absolute folder that all workers share, and deploy again"
        )
    return usable_root(config.root)


@dataclass(frozen=True)
class StageDefinition:
    """A row of the chain."""

    name: str
    package: str
    """`python -m <package> spec.json` runs it."""
    pool: Literal["cpu", "gpu"]
    needs: tuple[str, ...]
    """Stages whose outputs it reads, as far as they are part of the chain."""
    build: Callable[[ChainState], tuple[dict[str, Any], dict[str, Artifact]]]
    """State -> (config, inputs) of its spec."""

    @property
    def version(self) -> int:
        return PACKAGES[self.package][self.name].version

    @property
    def flow_name(self) -> str:
        return self.name.replace("_", "-")


def _sft_intake(state: ChainState) -> tuple[dict[str, Any], dict[str, Artifact]]:
    return state.portable_config["checkpoint"], _external_inputs(state, "sft_intake")


def _check_data(state: ChainState) -> tuple[dict[str, Any], dict[str, Artifact]]:
    check_answer_room(state)
    inputs = {"tokenizer": state.output("sft_intake", "tokenizer"), **_external_inputs(state, "check_data")}
    return state.portable_config["data"], inputs


def _reward_model(state: ChainState) -> tuple[dict[str, Any], dict[str, Artifact]]:
    check_prompts(state)
    config = state.config.reward_model
    from_feedback = config is not None and config.needs_feedback
    inputs = {
        "model": state.output("sft_intake", "model"),
        **_judged_inputs(state, "feedback" if from_feedback else "pairs"),
    }
    if from_feedback and state.config.data.preferences:
        # Pairs beside ratings: they say how often the model prefers what people preferred.
        inputs["validation_pairs"] = state.output("check_data", "validation_pairs.parquet")
    if BASELINES in state.finished["check_data"].result.outputs and "validation_pairs" in inputs:
        # Not the whole report: another limit of some check would train the reward model again.
        inputs["baselines"] = state.output("check_data", BASELINES)
    return state.portable_config["reward_model"], inputs


def _judged_inputs(state: ChainState, kind: str) -> dict[str, Artifact]:
    names = [f"{split}_{kind}" for split in ("train", "validation")]
    return {name: state.output("check_data", f"{name}.parquet") for name in names}


def _policy(state: ChainState) -> tuple[dict[str, Any], dict[str, Artifact]]:
    check_prompts(state)
    inputs = {"model": state.output("sft_intake", "model"), **_code_inputs(state, "policy")}
    if not is_online(state.config):
        inputs.update(_judged_inputs(state, "feedback" if learns_from_feedback(state.config) else "pairs"))
        return {"algorithm": state.portable_config["algorithm"]}, inputs
    inputs["rl_prompts"] = state.output("check_data", "rl_prompts.parquet")
    if any(reward.kind == "reward_model" for reward in state.config.rewards):
        inputs["reward_model"] = state.output("reward_model", "reward_model")
    return {key: state.portable_config[key] for key in ("algorithm", "rollout", "rewards")}, inputs


def _evaluate(state: ChainState) -> tuple[dict[str, Any], dict[str, Artifact]]:
    inputs = {
        "candidate": state.output("policy", "policy"),
        "reference": state.output("sft_intake", "model"),
        "eval_prompts": state.output("check_data", "eval_prompts.parquet"),
        **_code_inputs(state, "evaluate"),
    }
    if state.config.evaluation.reward_model:
        inputs["reward_model"] = state.output("reward_model", "reward_model")
    if state.champion is not None:
        inputs["champion"] = state.champion
    return {key: state.portable_config[key] for key in ("evaluation", "rollout")}, inputs


def _gate(state: ChainState) -> tuple[dict[str, Any], dict[str, Artifact]]:
    return state.portable_config["gate"], {"evaluation": state.output("evaluate", "evaluation")}


def _register(state: ChainState) -> tuple[dict[str, Any], dict[str, Artifact]]:
    lineage = {
        "run_id": state.run_id,
        "dataset_sha256": state.finished["check_data"].result.summary.get("fingerprint"),
        "checkpoint_sha256": state.finished["sft_intake"].result.summary.get("weights_sha256"),
        "config_sha256": state.config_sha256,
        "spec_hashes": {name: stage.result.spec_hash for name, stage in state.finished.items() if name != "register"},
    }
    tracking = state.config.tracking.model_dump(mode="json", include={"uri", "experiment"})
    config = {"registry": state.config.registry.model_dump(mode="json"), "tracking": tracking, "lineage": lineage}
    inputs = {"policy": state.output("policy", "policy"), "gate": state.output("gate", "gate.json")}
    return config, inputs


CHAIN: tuple[StageDefinition, ...] = (
    # The checkpoint comes before the data: the data check counts tokens with its tokenizer and chat template.
    StageDefinition("sft_intake", "training_core", "cpu", (), _sft_intake),
    StageDefinition("check_data", "data_checks", "cpu", ("sft_intake",), _check_data),
    StageDefinition("reward_model", "training_core", "gpu", ("sft_intake", "check_data"), _reward_model),
    StageDefinition("policy", "training_core", "gpu", ("sft_intake", "check_data", "reward_model"), _policy),
    StageDefinition(
        "evaluate", "training_core", "gpu", ("sft_intake", "check_data", "reward_model", "policy"), _evaluate
    ),
    StageDefinition(
        "gate", "training_core", "cpu", ("sft_intake", "check_data", "reward_model", "policy", "evaluate"), _gate
    ),
    StageDefinition(
        "register",
        "tasks",
        "cpu",
        (
            "sft_intake",
            "check_data",
            "reward_model",
            "policy",
            "evaluate",
            "gate",
        ),  # All: their hashes are its lineage.
        _register,
    ),
)

BY_NAME = {definition.name: definition for definition in CHAIN}


def chain_of(config: PipelineConfig) -> list[StageDefinition]:
    """Return the stages of this config, in order."""
    return [stage for stage in CHAIN if stage.name != "reward_model" or config.reward_model is not None]


def needed_stages(stage: StageDefinition, config: PipelineConfig) -> list[str]:
    """Return the stages that must be complete before `stage`, in order."""
    present = {definition.name for definition in chain_of(config)}
    return [name for name in stage.needs if name in present]


def build_spec(stage: StageDefinition, state: ChainState) -> StageSpec:
    """Return the spec of a stage whose needed stages are all finished in `state`."""
    config, inputs = stage.build(state)
    launch = state.config.launch
    return StageSpec(
        stage=stage.name,
        stage_version=stage.version,
        config=config,
        inputs=inputs,
        seed=state.config.seed,
        execution={"num_threads": launch.num_threads} if launch.num_threads is not None else {},
    )


def is_rejected(state: ChainState) -> bool:
    """Return whether the gate has spoken and did not say pass: then nothing is registered."""
    gate = state.finished.get("gate")
    return gate is not None and gate.result.summary.get("verdict") != Verdict.PASS


def _external_inputs(state: ChainState, stage: str) -> dict[str, Artifact]:
    files = [file for file in external_files(state.config) if file.stage == stage]
    return {file.input_name: state.external[file.dotted] for file in files}


def _code_inputs(state: ChainState, stage: str) -> dict[str, Artifact]:
    return {file.input_name: state.external[file.dotted] for file in code_files(state.config) if file.stage == stage}
