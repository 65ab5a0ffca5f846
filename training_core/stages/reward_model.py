"""Stage `reward_model`: learn from pairs which answer people prefer.

Loss of a pair: −log σ(r_chosen − r_rejected) (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, eq. 1),
r the scalar at the answer's EOS. One optimizer step is `batch_size` pairs; its loss is the sum over pairs divided by
their number, however they are cut into micro-batches.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from transformers import PreTrainedTokenizerBase

from training_core.config.reward_model import RewardModelConfig
from training_core.data.batching import micro_batches, pad_sequences
from training_core.data.preferences import read_pairs
from training_core.determinism import make_deterministic
from training_core.engines.single import ParameterGroup, SingleProcessEngine, StepReport, group_of
from training_core.errors import ArtifactError, DataError
from training_core.loop import LoopSettings, StepAbandonedError, StepRecord, run_loop
from training_core.memory import release_free_memory
from training_core.metrics import MetricSums
from training_core.models.chat import encode_pair
from training_core.models.heads import (
    RewardModel,
    load_reward_model,
    new_reward_model,
    save_reward_model,
    save_score_scale,
)
from training_core.models.loading import DTYPES, load_tokenizer, pad_token_id, training_device
from training_core.protocol.atomic import read_json, write_json
from training_core.protocol.context import StageContext
from training_core.protocol.digests import weights_digest
from training_core.records import PreferencePair, StageOutcome
from training_core.seeding import batch_indices
from training_core.stages.reward_validation import PairScores, check_batch_invariance, score_pairs

STATE_FILE = "stage.json"


@dataclass(frozen=True)
class EncodedPair:
    """Token ids of prompt + answer for both answers of a pair."""

    chosen: list[int]
    rejected: list[int]

    @property
    def length(self) -> int:
        return max(len(self.chosen), len(self.rejected))


def run(context: StageContext) -> StageOutcome:
    """Train and save a reward model, and measure what was saved: that is what answers will be scored with.

    Raises:
        DataError: pairs that cannot be trained on.
        TrainingDivergedError: a gradient is not finite.
        EvaluationError: a validation score is not finite, all are equal, or scores depend on the batch.
        PreemptedError: SIGTERM; state is saved.
    """
    make_deterministic()
    config = RewardModelConfig.model_validate(context.spec.config)
    output = context.new_output("reward_model")
    report = train_and_save(context, config, output)
    # The float32 weights and their optimizer state are gone before the saved ones are loaded.
    gc.collect()
    release_free_memory()
    context.progress(report["num_steps"], report["num_steps"], "validate")
    rows = read_pairs(context.input_path("validation_pairs"))
    report = {**measure_saved(output, rows, config.max_tokens_per_batch), **report}
    summary = {"weights_sha256": weights_digest(output), **report}
    context.progress(report["num_steps"], report["num_steps"], "done", accuracy=report["accuracy"])
    return StageOutcome(outputs={"reward_model": "outputs/reward_model"}, summary=summary)


def train_and_save(context: StageContext, config: RewardModelConfig, output: Path) -> dict[str, Any]:
    """Train, write the model into `output` in `config.dtype`, and return what the training has to report.

    Nothing keeps the model once this returns.
    """
    model_directory = context.input_path("model")
    tokenizer = load_tokenizer(model_directory)
    model = new_reward_model(model_directory, context.spec.seed).to(training_device())
    limit = int(model.backbone.config.max_position_embeddings)
    train_rows = read_pairs(context.input_path("train_pairs"))
    validation_rows = read_pairs(context.input_path("validation_pairs"))
    check_disjoint(train_rows, validation_rows)
    train, validation = (encode_pairs(rows, tokenizer, limit) for rows in (train_rows, validation_rows))
    trainer = RewardTrainer(context, config, model, train, validation, pad_token_id(tokenizer))
    accuracy_before = trainer.train()
    report = {
        "accuracy_before": accuracy_before,
        "dtype": config.dtype,
        "num_train_pairs": len(train),
        "num_validation_pairs": len(validation),
        "num_steps": trainer.num_steps,
        "base_weights_sha256": weights_digest(model_directory),
    }
    save_reward_model(model, model_directory, output, report, DTYPES[config.dtype])
    return report


def measure_saved(directory: Path, rows: list[PreferencePair], max_tokens_per_batch: int) -> dict[str, Any]:
    """Load a saved reward model, measure it on the validation pairs, and write scale and report beside its weights.

    Raises:
        EvaluationError: as `run`.
    """
    model = load_reward_model(directory).to(training_device())
    tokenizer = load_tokenizer(directory)
    pairs = encode_pairs(rows, tokenizer, int(model.backbone.config.max_position_embeddings))
    chosen, rejected, pad = [p.chosen for p in pairs], [p.rejected for p in pairs], pad_token_id(tokenizer)
    scores = score_pairs(model, chosen, rejected, pad, max_tokens_per_batch)
    model.score_mean, model.score_std = scores.mean_and_std()
    self_test = check_batch_invariance(model, chosen, pad, max(1.0, model.score_std))
    report = {**scores.summary(), "batch_invariance": self_test}
    save_score_scale(model, directory, report)
    return report


def check_disjoint(train: list[PreferencePair], validation: list[PreferencePair]) -> None:
    """Refuse a validation set that shares a prompt with the training set: it would measure memory.

    Raises:
        DataError: names one such prompt.
    """
    shared = {pair.group_id for pair in train} & {pair.group_id for pair in validation}
    if shared:
        raise DataError(
            f"{len(shared)} prompts are in both train_pairs and validation_pairs, e.g. group {min(shared)!r}. Split by "
            "prompt, as the data checks do"
        )


def encode_pairs(pairs: list[PreferencePair], tokenizer: PreTrainedTokenizerBase, limit: int) -> list[EncodedPair]:
    """Return the pairs as token ids.

    Args:
        pairs: checked rows.
        tokenizer: with chat template and EOS.
        limit: the model's number of positions.

    Raises:
        DataError: an answer is too long (nothing is cut: two answers cut to the same tokens would teach nothing), or
            both answers are the same tokens.
    """
    encoded = []
    for pair in pairs:
        chosen, rejected, _ = encode_pair(tokenizer, pair.prompt, pair.chosen, pair.rejected)
        longest = max(len(chosen), len(rejected))
        if longest > limit:
            raise DataError(
                f"pair {pair.example_id!r} has {longest} tokens, the model's limit is {limit}. The data checks leave "
                "such pairs out: lower their length limit and run them again"
            )
        if chosen == rejected:
            raise DataError(
                f"pair {pair.example_id!r} has the same tokens for both answers, so it prefers nothing. The data "
                "checks leave such pairs out: run them again with this model's tokenizer"
            )
        encoded.append(EncodedPair(chosen, rejected))
    return encoded


class RewardTrainer:
    """The training loop with its state; `train` may be stopped anywhere and called again in another process."""

    accuracy_before: float
    """On the validation pairs before training, of the float32 weights that it starts from."""

    def __init__(
        self,
        context: StageContext,
        config: RewardModelConfig,
        model: RewardModel,
        train: list[EncodedPair],
        validation: list[EncodedPair],
        pad_token_id: int,
    ) -> None:
        self.context = context
        self.config = config
        self.model = model
        self.pairs = train
        self.validation = validation
        self.pad_token_id = pad_token_id
        self.num_items = len(train) * config.num_epochs
        self.num_steps = -(-self.num_items // config.batch_size)
        self.engine = SingleProcessEngine(
            [
                group_of("backbone", model.backbone, config.optimizer.learning_rate),
                ParameterGroup("head", dict(model.head.named_parameters()), config.head_learning_rate),
            ],
            config.optimizer,
            self.num_steps,
            config.autocast,
        )

    def train(self) -> float:
        """Train to the last step, from the newest checkpoint if there is one; return the accuracy before training."""
        config = self.config
        if self.context.checkpoints().is_empty():
            chosen = [pair.chosen for pair in self.validation]
            check_batch_invariance(self.model, chosen, self.pad_token_id)
            self.accuracy_before = self.validate().accuracy
        run_loop(
            self.context,
            self,
            LoopSettings(self.num_steps, config.checkpoint_every_steps, config.keep_last_checkpoints, "train"),
        )
        return self.accuracy_before

    def load(self, directory: Path) -> int:
        """Restore a checkpoint; return the steps done.

        Raises:
            ArtifactError: a part is missing, damaged or of another model.
        """
        try:
            self.accuracy_before = float(read_json(directory / STATE_FILE)["accuracy_before"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"{directory} holds no readable {STATE_FILE}: {error!r}. Delete it to go on from the checkpoint before"
            ) from error
        return self.engine.load(directory)

    def save(self, directory: Path, step: int) -> None:
        self.engine.save(directory, step)
        write_json(directory / STATE_FILE, {"accuracy_before": self.accuracy_before})

    def step_items(self, step: int) -> list[int]:
        """Return the pairs of step `step` (from 1). The last step has what is left of the last epoch."""
        size, seed = self.config.batch_size, self.context.spec.seed
        items = batch_indices(step - 1, size, len(self.pairs), seed, "reward_pairs")
        return items[: self.num_items - (step - 1) * size]

    def train_step(self, step: int) -> StepRecord:
        """Do step `step` (from 1).

        Raises:
            StepAbandonedError: asked to stop; no weight has changed.
            TrainingDivergedError: a gradient is not finite; no weight has changed.
        """
        started = time.monotonic()
        items = self.step_items(step)
        sums = MetricSums()
        lengths = [pair.length for pair in self.pairs]
        for indices in micro_batches(items, lengths, self.config.micro_batch_size):
            if self.context.stop.requested:
                raise StepAbandonedError
            self.backward([self.pairs[i] for i in indices], len(items), sums)
        report = self.engine.step(step)
        return make_record(sums, report, time.monotonic() - started)

    def backward(self, pairs: list[EncodedPair], num_pairs_in_step: int, sums: MetricSums) -> None:
        """Add one micro-batch's share of the step's gradient, chosen and rejected answers in one forward pass."""
        sequences = [p.chosen for p in pairs] + [p.rejected for p in pairs]
        input_ids, mask = pad_sequences(sequences, self.pad_token_id)
        with self.engine.autocast():
            scores = self.model(input_ids.to(self.engine.device), mask.to(self.engine.device))
        chosen, rejected = scores.chunk(2)
        losses = -logsigmoid(chosen - rejected)
        torch.autograd.backward([losses.sum() / num_pairs_in_step])
        add_sums(sums, losses, chosen, rejected, sum(map(len, sequences)))

    def validate(self) -> PairScores:
        """Score the validation pairs with the float32 weights as they are."""
        self.context.progress(0, self.num_steps, "validate")
        chosen, rejected = ([getattr(p, which) for p in self.validation] for which in ("chosen", "rejected"))
        return score_pairs(self.model, chosen, rejected, self.pad_token_id, self.config.max_tokens_per_batch)


def make_record(sums: MetricSums, report: StepReport, seconds: float) -> StepRecord:
    """Return what metrics.jsonl and timings.jsonl hold of one step."""
    num_tokens = int(sums.sums["train/num_tokens"].total)
    values = {**sums.means(), "train/num_tokens": num_tokens}
    values.update({"train/grad_norm": report.grad_norm, "train/learning_rate": report.learning_rate})
    return StepRecord(values, {"time/tokens_per_second": num_tokens / max(seconds, 1e-9)})


def add_sums(
    sums: MetricSums, losses: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor, num_tokens: int
) -> None:
    """Add one micro-batch to the step's metrics; all tensors are [pairs], a tie counts half as right."""
    count = len(losses)
    margins = (chosen - rejected).detach().double()
    right = (margins > 0).double() + 0.5 * (margins == 0).double()
    totals = {
        "train/loss": losses.detach().double().sum(),
        "train/accuracy": right.sum(),
        "train/margin_mean": margins.sum(),
        "train/chosen_score_mean": chosen.detach().double().sum(),
        "train/rejected_score_mean": rejected.detach().double().sum(),
    }
    for name, total in totals.items():
        sums.add(name, float(total.item()), count)
    sums.add("train/num_tokens", num_tokens, 1)
