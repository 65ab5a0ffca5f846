"""Stage `policy` for algorithms that learn from preferences: data, reference, training, output `policy`."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from training_core.config.preference import DpoConfig, KtoConfig
from training_core.data.tables import PairTable, build_feedback_table, build_pair_table
from training_core.engines.single import SingleProcessEngine, group_of
from training_core.loop import LoopSettings, run_loop
from training_core.memory import release_free_memory
from training_core.metrics import read_metrics
from training_core.models.loading import (
    checkpoint_dtype,
    load_causal_lm,
    load_tokenizer,
    pad_token_id,
    save_causal_lm,
    training_device,
)
from training_core.models.lora import attach_lora
from training_core.models.recomputation import recompute_layers
from training_core.preference.forward import AnswerScorer
from training_core.preference.items import (
    FeedbackSource,
    JudgedItems,
    JudgedSource,
    PairItems,
    TakenApartSource,
    check_disjoint,
)
from training_core.preference.objective import ItemsT, KtoObjective, Objective, PairObjective, Split
from training_core.preference.reference import REFERENCE_FILE, reference_logprobs
from training_core.preference.trainer import PreferenceTrainer, count_steps
from training_core.protocol.context import StageContext
from training_core.protocol.digests import weights_digest
from training_core.records import StageOutcome
from training_core.rl.forward import Precision

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation")
TABLES_FOLDER = "tables"


def train(context: StageContext, config: DpoConfig | KtoConfig) -> StageOutcome:
    """Train the policy from preferences, save it, and say what came out.

    Inputs: `model`; `train_pairs` and `validation_pairs`, or for KTO `train_feedback` and `validation_feedback` in
    their place.

    Args:
        context: of the stage.
        config: the algorithm.

    Raises:
        DataError: data that cannot be trained on.
        ConfigurationError: a model that cannot be trained so, or a warm-up longer than the training.
        ArtifactError: a checkpoint or the reference's file is damaged or of other inputs.
        TrainingDivergedError: a loss or gradient is not finite.
        PreemptedError: SIGTERM; state is saved.
    """
    model_directory = context.input_path("model")
    tokenizer = load_tokenizer(model_directory)
    policy = load_causal_lm(model_directory, torch.float32).to(training_device())  # type: ignore[arg-type]
    limit = int(policy.config.max_position_embeddings)
    scorer = AnswerScorer(policy, pad_token_id(tokenizer), Precision(config.autocast, policy.device))
    if isinstance(config, DpoConfig):
        tables = [pair_table(context, f"{split}_pairs", tokenizer, limit) for split in SPLITS]
        return train_on(context, config, PairObjective(config, scorer), *map(PairItems, tables))
    judged = [JudgedItems(judged_source(context, split, tokenizer, limit), limit) for split in SPLITS]
    return train_on(context, config, KtoObjective(config, scorer), *judged)


def train_on(
    context: StageContext,
    config: DpoConfig | KtoConfig,
    objective: Objective[ItemsT],
    train_items: ItemsT,
    validation_items: ItemsT,
) -> StageOutcome:
    """Train on given items and write the output `policy`."""
    check_disjoint(train_items, validation_items)
    model_directory, policy = context.input_path("model"), objective.scorer.model
    shortest = min(range(len(train_items)), key=train_items.lengths.__getitem__)
    objective.scorer.check(train_items.forwards([shortest])[0])
    reference_sha256 = weights_digest(model_directory)
    splits = with_reference(context, config, objective.scorer, (train_items, validation_items), reference_sha256)
    if config.lora is not None:
        attach_lora(policy, config.lora, context.spec.seed)
    if config.gradient_checkpointing:
        recompute_layers(policy)
    num_steps = count_steps(config, len(train_items))
    group = group_of("policy", policy, config.optimizer.learning_rate)
    engine = SingleProcessEngine([group], config.optimizer, num_steps, config.autocast)
    trainer = PreferenceTrainer(context, config, objective, *splits, engine, reference_sha256)
    if context.checkpoints().is_empty():
        context.progress(0, num_steps, "validate")
        trainer.before = trainer.validate()
    release_free_memory()
    steps = (num_steps, config.checkpoint_every_steps, config.keep_last_checkpoints)
    run_loop(context, trainer, LoopSettings(*steps, phase=config.name, sentinels=config.sentinels))
    save_causal_lm(policy, model_directory, context.new_output("policy"), checkpoint_dtype(model_directory))
    return StageOutcome(outputs={"policy": "outputs/policy"}, summary=summarise(context, trainer))


def with_reference(
    context: StageContext,
    config: DpoConfig | KtoConfig,
    scorer: AnswerScorer,
    items: tuple[ItemsT, ItemsT],
    reference_sha256: str,
) -> tuple[Split[ItemsT], Split[ItemsT]]:
    """Return the training and the validation items with the reference's log-probabilities, where a loss needs them.

    Args:
        context: the file is kept in its directory.
        config: the algorithm.
        scorer: the untrained policy, which is the reference.
        items: of training and validation.
        reference_sha256: digest of its weights.
    """
    if not config.needs_reference:
        return Split(items[0], None), Split(items[1], None)
    found = reference_logprobs(
        context.directory.path / REFERENCE_FILE,
        scorer,
        {"train": items[0], "validation": items[1]},
        {
            "reference_sha256": reference_sha256,
            "train_sha256": items[0].digest,
            "validation_sha256": items[1].digest,
            "autocast": config.autocast,
        },
        config.micro_batch_size,
        lambda done, total: context.progress(done, total, "reference"),
    )
    return Split(items[0], found["train"]), Split(items[1], found["validation"])


def pair_table(context: StageContext, name: str, tokenizer: PreTrainedTokenizerBase, limit: int) -> PairTable:
    path = context.directory.path / TABLES_FOLDER / f"{name}.arrow"
    return build_pair_table(context.input_path(name), tokenizer, limit, path)


def judged_source(context: StageContext, split: str, tokenizer: PreTrainedTokenizerBase, limit: int) -> JudgedSource:
    """Return the answers of a split with their judgements: of the feedback file, or of the pairs taken apart."""
    name = f"{split}_feedback"
    if not context.has_input(name):
        return TakenApartSource(pair_table(context, f"{split}_pairs", tokenizer, limit))
    path = context.directory.path / TABLES_FOLDER / f"{name}.arrow"
    table = build_feedback_table(context.input_path(name), tokenizer, limit, path)
    source = FeedbackSource(table)
    if num_without := len(table) - len(source.groups):
        logger.warning("%s: %d of %d rows have no label and are left out", name, num_without, len(table))
    return source


def summarise(context: StageContext, trainer: PreferenceTrainer[ItemsT]) -> dict[str, Any]:
    """Return the stage's summary; a margin is null where the validation data have answers of one kind alone."""
    rows = read_metrics(context.directory.metrics_path)
    last, before = rows[-1], trainer.before
    return {
        "weights_sha256": weights_digest(context.directory.outputs_path / "policy"),
        "reference_weights_sha256": trainer.reference_sha256,
        "num_steps": trainer.num_steps,
        "num_train_items": len(trainer.train.items),
        "num_validation_items": len(trainer.validation.items),
        "accuracy": last["validation/accuracy"],
        "accuracy_before": before["validation/accuracy"],
        "margin_mean": last.get("validation/margin_mean"),
        "margin_mean_before": before.get("validation/margin_mean"),
        "validation_loss": last["validation/loss"],
        "validation_loss_before": before["validation/loss"],
        "loss_first": rows[0]["train/loss"],
        "loss_last": last["train/loss"],
    }
