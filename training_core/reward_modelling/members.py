"""Training the members of a stage, one after another, and saving each as soon as it is done."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path
from typing import Any

from training_core.config.reward_model import RewardModelConfig
from training_core.errors import ArtifactError
from training_core.loop import LoopSettings, run_loop
from training_core.memory import release_free_memory
from training_core.metrics import read_metrics
from training_core.models.heads import RewardModel, new_reward_model, save_reward_model
from training_core.models.loading import DTYPES, load_tokenizer, pad_token_id, training_device
from training_core.models.lora import attach_lora
from training_core.models.recomputation import recompute_layers
from training_core.models.reward_ensemble import member_directory
from training_core.protocol.atomic import fsync_path, fsync_tree
from training_core.protocol.context import StageContext
from training_core.protocol.digests import weights_digest
from training_core.reward_modelling.data import RewardData
from training_core.reward_modelling.measure import describe, score_validation, self_test_sequences
from training_core.reward_modelling.objectives import make_objective
from training_core.reward_modelling.trainer import MemberState, RewardTrainer, member_seed, read_state
from training_core.reward_modelling.validation import check_batch_invariance

BEFORE = ("accuracy", "chosen_score_mean", "rejected_score_mean", "rmse", "spearman")
"""What validation measures that is reported of the time before training too."""
OUTPUT = "reward_model"


def train_members(context: StageContext, config: RewardModelConfig, data: RewardData) -> Path:
    """Train all members that are not saved yet; return the output folder.

    One member lies in the folder itself, several in `member_0`, `member_1` and so on below it. Each is written before
    the next one begins, and checkpoints of the next ones name the digests of those before, so a stage that was stopped
    goes on in the middle of a member. Nothing keeps a model once this returns.

    Raises:
        ArtifactError: a checkpoint is damaged, or a finished member is not what it was.
        TrainingDivergedError, EvaluationError, PreemptedError: as the stage.
    """
    if config.num_members == 1:
        output = context.new_output(OUTPUT)
        train_member(context, config, data, 0, [], output, is_new=context.checkpoints().is_empty())
        return output
    output = context.directory.outputs_path / OUTPUT
    output.mkdir(parents=True, exist_ok=True)
    latest = context.checkpoints().latest()
    state = MemberState(0, {}, []) if latest is None else read_state(latest.path)
    first, finished = state.member, state.finished
    check_finished(output, finished)
    for member in range(first, config.num_members):
        if context.stop.requested:
            # It came in the last step of the member before, which is saved; a new one would first be validated.
            context.stop.raise_preempted(f"stopped by SIGTERM before member {member}")
        is_new = latest is None or member > first
        temporary = output / f".tmp_member_{member}"
        shutil.rmtree(temporary, ignore_errors=True)
        train_member(context, config, data, member, finished, temporary, is_new=is_new)
        finished = [*finished, keep_member(temporary, member_directory(output, member))]
        # The weights of one member and their optimizer state are gone before the next one's are made.
        gc.collect()
        release_free_memory()
    return output


def keep_member(temporary: Path, final: Path) -> str:
    """Move a saved member to its place, whole or not at all; return the digest of its weights."""
    fsync_tree(temporary)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    fsync_path(final.parent)
    return weights_digest(final)


def check_finished(output: Path, finished: list[str]) -> None:
    """Check that the members that a checkpoint builds on are still there.

    Raises:
        ArtifactError: one is missing or changed.
    """
    for member, digest in enumerate(finished):
        directory = member_directory(output, member)
        if not directory.is_dir() or weights_digest(directory) != digest:
            raise ArtifactError(
                f"{directory} is not the finished member {member} of this ensemble any more. Restore it, or delete "
                f"{output.parent.parent} to train all members again"
            )


def train_member(
    context: StageContext,
    config: RewardModelConfig,
    data: RewardData,
    member: int,
    finished: list[str],
    directory: Path,
    *,
    is_new: bool,
) -> None:
    """Train one member to its last step and write it into `directory` in `config.dtype`."""
    source = context.input_path("model")
    seed = member_seed(context.spec.seed, member)
    model = new_reward_model(source, seed).to(training_device())
    if config.lora is not None:
        attach_lora(model, config.lora, seed)
    if config.gradient_checkpointing:
        recompute_layers(model.backbone)
    objective = make_objective(config.loss, data.train, training_device())
    pad = pad_token_id(load_tokenizer(source))
    trainer = RewardTrainer(context, config, model, objective, pad, member, finished)
    if is_new:
        context.progress(0, trainer.num_steps, "validate")
        trainer.before = validate(model, data, config, objective.report(), pad)
    last = trainer.first_step + trainer.num_steps
    phase = "train" if config.num_members == 1 else f"train member {member + 1} of {config.num_members}"
    run_loop(context, trainer, LoopSettings(last, config.checkpoint_every_steps, config.keep_last_checkpoints, phase))
    report = {
        **{f"{name}_before": value for name, value in trainer.before.items()},
        **first_and_last(context, trainer.first_step + 1, last),
        **objective.report(),
        "dtype": config.dtype,
        "num_steps": trainer.num_steps,
        "base_weights_sha256": weights_digest(source),
    }
    save_reward_model(model, source, directory, report, DTYPES[config.dtype])


def validate(
    model: RewardModel, data: RewardData, config: RewardModelConfig, trained: dict[str, Any], pad: int
) -> dict[str, Any]:
    """Measure the float32 weights before training, and find an architecture that cannot do it at once.

    Raises:
        EvaluationError: scores depend on the batch, or one is not finite.
    """
    check_batch_invariance(model, self_test_sequences(data), pad)
    scores = score_validation(model, data, pad, config.max_tokens_per_batch)
    report = describe(scores, data, config, trained)
    return {name: report[name] for name in BEFORE if name in report}


def first_and_last(context: StageContext, first: int, last: int) -> dict[str, float]:
    """Return the mean scores of chosen and rejected answers in a member's first and last training step."""
    rows = {row["step"]: row for row in read_metrics(context.directory.metrics_path)}
    found = {}
    for side in ("chosen", "rejected"):
        for name, step in (("first", first), ("last", last)):
            value = rows.get(step, {}).get(f"train/{side}_score_mean")
            if value is not None:
                found[f"{side}_mean_{name}"] = value
    return found
