"""The training half of a GRPO step: from scored answers to updated weights.

Read `GrpoUpdater.update` from top to bottom. What is learned from is in grpo_signal.py, what is measured in
grpo_metrics.py, the maths in training_core/ops.

Shapes: N answers of the step, T longest answer, B rows of a micro-batch, t its longest answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training_core.config.algorithms import GrpoConfig, KlInLoss, KlInReward
from training_core.engines.single import SingleProcessEngine, StepReport
from training_core.loop import StepAbandonedError
from training_core.metrics import MetricSums
from training_core.models.layers import has_only_full_attention
from training_core.ops.aggregation import weighted_sum
from training_core.ops.masking import masked_fill_zero
from training_core.registries import AGGREGATIONS, KL_LOSSES, POLICY_LOSSES
from training_core.rollout.batch import MicroBatch, TrajectoryBatch, split_micro_batches
from training_core.sentinels import check_finite_loss
from training_core.stages.grpo_metrics import TokenValues, add_comparisons, add_policy_metrics, check_comparisons
from training_core.stages.grpo_signal import ScoredBatch, Signal, build_signal, can_have_gradient, minibatch_rows
from training_core.stages.policy_forward import Precision, answer_logprobs, check_forward_pass
from training_core.stages.shared_prompt import split_by_prompt


class GrpoUpdater:
    """Turns one scored rollout into `num_epochs * num_minibatches` optimizer updates.

    Args:
        config: the algorithm.
        policy: float32 master weights.
        reference: frozen start of the policy; None when no KL is asked for.
        optimizer: owns the policy's parameters.
        temperature: of the sampling; all log-probabilities are taken at it.
        pad_token_id: any id of the vocabulary.
        seed: the run's seed.
        should_stop: asked before each micro-batch of the first update; true gives up the step.
    """

    def __init__(
        self,
        config: GrpoConfig,
        policy: PreTrainedModel,
        reference: PreTrainedModel | None,
        optimizer: SingleProcessEngine,
        *,
        temperature: float,
        pad_token_id: int,
        seed: int,
        should_stop: Callable[[], bool],
    ) -> None:
        self.config = config
        self.policy = policy
        self.reference = reference
        self.optimizer = optimizer
        self.temperature = temperature
        self.pad_token_id = pad_token_id
        self.seed = seed
        self.should_stop = should_stop
        self.device = next(policy.parameters()).device
        self.precision = Precision(config.autocast, self.device)
        # Other layers would count the padding between a prompt and its answers as tokens.
        self.shares_prompts = config.share_prompt and has_only_full_attention(policy)
        self._head_checked = False

    def update(self, step: int, scored: ScoredBatch) -> dict[str, float]:
        """Update the policy from the answers of step `step` (from 1); return metrics.

        `policy/*` metrics are means over the tokens that training goes through: answers without a signal (all scores of
        their group equal, say) are skipped and not among them. `rollout/sampler_trainer_kl_nats` and `kl/*` cover every
        answer that counts when log-probs are taken before the first update (see `logprobs_before`), else the same
        answers as `policy/*`: two more forward passes would buy nothing but these numbers.

        Raises:
            StepAbandonedError: asked to stop; no weight has changed.
            TrainingDivergedError: a loss or gradient is not finite; no weight has changed in this update.
            WeightVersionError: the engine's log-probs are not the policy's; no weight has changed.
        """
        sums = MetricSums()
        self.check_head_once(scored.batch)
        old, reference = self.logprobs_before(scored.batch)
        signal, groups = build_signal(self.config, scored, old, reference)
        if old is not None:
            add_comparisons(sums, old, scored.batch.sampler_logprobs, reference, signal.mask)
            check_comparisons(sums, step, self.config.max_sampler_trainer_kl_nats)
        reports = []
        for number, rows in enumerate(self.minibatches(step)):
            report = self.optimizer_update(step, number, rows, signal, sums)
            reports += [report] if report else []
        metrics = sums.means()
        metrics["rollout/zero_variance_group_fraction"] = groups.num_zero_variance_groups / max(groups.num_groups, 1)
        metrics["train/num_updates"] = len(reports)
        if reports:
            metrics["policy/grad_norm"] = sum(report.grad_norm for report in reports) / len(reports)
            metrics["train/learning_rate"] = reports[-1].learning_rate
        return metrics

    def minibatches(self, step: int) -> list[list[int]]:
        """Return the rows of each update of step `step`."""
        return minibatch_rows(self.config, self.seed, step)

    @torch.no_grad()
    def logprobs_before(self, batch: TrajectoryBatch) -> tuple[Tensor | None, Tensor | None]:
        """Return log-probs of policy and reference before the first update, each [N, T], where they are needed first.

        They are when several updates use one rollout, or when the KL is part of the reward. Else the ratio is 1 and
        training's own forward pass gives them: two forward passes less.
        """
        if self.config.updates_per_step == 1 and not isinstance(self.config.kl, KlInReward):
            return None, None
        old = torch.zeros(batch.mask.shape, dtype=torch.float32)
        reference = torch.zeros_like(old) if self.reference is not None else None
        for micro in self.split(batch, range(len(batch))):
            self.give_up_if_stopped()
            rows, columns = micro.rows, slice(0, micro.mask.shape[1])
            old[rows, columns] = self.forward(self.policy, micro)[0].cpu()
            if reference is not None and self.reference is not None:
                reference[rows, columns] = self.forward(self.reference, micro)[0].cpu()
        return old, reference

    def forward(self, model: PreTrainedModel, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        # Entropy is a metric of training's own passes; nothing reads it of the others, which take no gradient.
        with_entropy = torch.is_grad_enabled()
        return answer_logprobs(model, micro, self.temperature, self.precision, with_entropy=with_entropy)

    def split(self, batch: TrajectoryBatch, rows: Sequence[int]) -> list[MicroBatch]:
        split = split_by_prompt if self.shares_prompts else split_micro_batches
        return split(batch, rows, self.config.micro_batch_size, self.pad_token_id, self.device)

    def optimizer_update(
        self, step: int, number: int, rows: Sequence[int], signal: Signal, sums: MetricSums
    ) -> StepReport | None:
        """Do one optimizer update; None when no answer of it carries a signal (the weights stay as they are)."""
        aggregation = self.config.aggregation
        weights = torch.zeros(signal.mask.shape, dtype=torch.float64)
        weigh = AGGREGATIONS[aggregation.kind]
        weights[rows] = weigh(signal.mask[rows], **aggregation.model_dump(exclude={"kind"}))
        rows = [row for row in rows if self.has_signal(signal, row)]
        total = 0.0
        for micro in self.split(signal.batch, rows):
            if number == 0:
                self.give_up_if_stopped()
            loss = self.micro_loss(micro, signal, weights, sums)
            total += float(loss.detach())
            check_finite_loss(total, step)
            loss.backward()  # type: ignore[no-untyped-call]
        if not rows:
            return None
        sums.add("policy/loss", total, 1)
        if not signal.is_compared:
            check_comparisons(sums, step, self.config.max_sampler_trainer_kl_nats)
        return self.optimizer.step((step - 1) * self.config.updates_per_step + number + 1)

    def has_signal(self, signal: Signal, row: int) -> bool:
        """Return whether an answer goes through the model at all."""
        return can_have_gradient(self.config, signal, row)

    def micro_loss(self, micro: MicroBatch, signal: Signal, weights: Tensor, sums: MetricSums) -> Tensor:
        """Return this micro-batch's part of the update's loss, and add to the step's metrics."""
        config = self.config
        mask = micro.select(signal.mask).to(self.device)
        logprobs, entropy = self.forward(self.policy, micro)
        old = logprobs.detach() if signal.old_logprobs is None else micro.select(signal.old_logprobs).to(self.device)
        reference = self.reference_of(micro, signal)
        losses, is_clipped = POLICY_LOSSES["clipped_surrogate"](
            logprobs,
            old,
            signal.advantages[micro.rows][:, None].to(self.device),
            mask,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )
        if isinstance(config.kl, KlInLoss):
            assert reference is not None
            log_ratio = masked_fill_zero(logprobs - reference, mask)
            importance = masked_fill_zero(logprobs - old, mask)
            losses = losses + config.kl.coefficient * KL_LOSSES[config.kl.estimator](log_ratio, importance)
        values = TokenValues(logprobs.detach(), old, entropy, is_clipped, mask)
        add_policy_metrics(sums, values)
        if not signal.is_compared:
            sampler = micro.select(signal.batch.sampler_logprobs).to(self.device)
            add_comparisons(sums, values.logprobs, sampler, reference, mask)
        return weighted_sum(losses, micro.select(weights).to(self.device), mask)

    @torch.no_grad()
    def reference_of(self, micro: MicroBatch, signal: Signal) -> Tensor | None:
        if self.reference is None:
            return None
        if signal.reference_logprobs is not None:
            return micro.select(signal.reference_logprobs).to(self.device)
        return self.forward(self.reference, micro)[0]

    def check_head_once(self, batch: TrajectoryBatch) -> None:
        """Check the forward pass on answers to the shortest and the longest prompt, before anything comes of it."""
        if not self._head_checked:
            by_prompt = sorted(range(len(batch)), key=lambda row: len(batch.prompts[row]))
            rows = sorted({by_prompt[0], by_prompt[-1]})
            split = split_by_prompt if self.shares_prompts else split_micro_batches
            check_forward_pass(self.policy, split(batch, rows, len(rows), self.pad_token_id, self.device)[0])
            self._head_checked = True

    def give_up_if_stopped(self) -> None:
        if self.should_stop():
            raise StepAbandonedError
