"""The training half of a step: from scored answers to updated weights.

Read `PolicyUpdater.update` from top to bottom. What is learned from is in signal.py, the loss of a token in losses.py,
what is measured in metrics.py, the maths in training_core/ops.

Shapes: N answers of the step, T longest answer, B rows of a micro-batch, t its longest answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training_core.config.online import OnlineConfig
from training_core.engines.single import SingleProcessEngine, StepReport
from training_core.loop import StepAbandonedError
from training_core.metrics import MetricSums
from training_core.ops.aggregation import AllSum, keep, weighted_sum
from training_core.registries import AGGREGATIONS
from training_core.rl.critic import CriticUpdater
from training_core.rl.experts import ExpertTerm
from training_core.rl.first_batch import check_model_on, check_scored
from training_core.rl.forward import Precision, answer_logprobs
from training_core.rl.layouts import choose_layout
from training_core.rl.losses import TokenInputs, token_losses
from training_core.rl.metrics import (
    add_comparisons,
    add_policy_metrics,
    advantage_metrics,
    answer_kl_error,
    check_comparisons,
    effective_sample_fraction,
    fresh_tokens,
)
from training_core.rl.plugs import build_estimator, build_policy_loss
from training_core.rl.reference import Reference
from training_core.rl.signal import (
    BeforeUpdates,
    ScoredBatch,
    Signal,
    build_signal,
    can_have_gradient,
    kl_penalties,
    minibatch_rows,
)
from training_core.rollout.batch import MicroBatch, TrajectoryBatch
from training_core.sentinels import check_finite_loss


@dataclass(frozen=True)
class Surroundings:
    """What an updater is given besides its models."""

    temperature: float
    """Of the sampling; all log-probabilities are taken at it."""
    pad_token_id: int
    """Any id of the vocabulary."""
    seed: int
    """The run's."""
    should_stop: Callable[[], bool]
    """Asked before each micro-batch of the first update; true gives up the step."""
    max_new_tokens: int
    """The token limit of an answer: a constant normaliser's default."""
    all_sum: AllSum = keep
    """Sums counts over ranks: denominators are those of the whole optimizer step."""


class PolicyUpdater:
    """Turns one scored rollout into `num_epochs * num_minibatches` optimizer updates.

    Args:
        config: the algorithm.
        policy: float32 master weights.
        reference: the frozen start of the policy; None when no KL is asked for.
        optimizer: owns the policy's trainable parameters.
        around: everything else.
        critic: for estimators that read values.
    """

    def __init__(
        self,
        config: OnlineConfig,
        policy: PreTrainedModel,
        reference: Reference | None,
        optimizer: SingleProcessEngine,
        around: Surroundings,
        critic: CriticUpdater | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self.reference = reference
        self.optimizer = optimizer
        self.around = around
        self.critic = critic
        self.estimate = build_estimator(config.advantage)
        self.policy_loss = build_policy_loss(config.loss)
        self.device = next(policy.parameters()).device
        # float32, or what the weights have where that is wider.
        self.dtype = torch.promote_types(torch.float32, next(policy.parameters()).dtype)
        self.precision = Precision(config.autocast, self.device)
        self.layout = choose_layout(config, policy)
        self.experts = None if config.experts is None else ExpertTerm(config.experts, policy, around.all_sum)
        self._is_first = True

    def update(self, step: int, scored: ScoredBatch, kl_coefficient: float) -> tuple[dict[str, float], Tensor]:
        """Update policy and critic from the answers of step `step` (from 1); return metrics and advantages [N, T].

        `policy/*` metrics are means over the tokens that training goes through: answers without a signal (all scores of
        their group equal, say) are skipped and not among them. `rollout/sampler_trainer_kl_nats` and `kl/*` cover every
        answer that counts when log-probs are taken before the first update (see `needs_pass_before`), else the same
        answers as `policy/*`: two more forward passes would buy nothing but these numbers.

        Raises:
            StepAbandonedError: asked to stop; no weight has changed.
            TrainingDivergedError: a loss or gradient is not finite; no weight has changed in this update.
            WeightVersionError: the engine's log-probs are not the policy's; no weight has changed.
        """
        sums = MetricSums()
        self.check_model_once(scored.batch)
        before = self.before_updates(scored.batch) if self.needs_pass_before(scored) else None
        if self._is_first:
            check_scored(scored, kl_penalties(self.config, kl_coefficient, before, scored.batch))
            self._is_first = False
        signal, found = build_signal(self.config, self.estimate, scored, before, kl_coefficient, self.dtype)
        if before is not None:
            sampled = fresh_tokens(scored)
            add_comparisons(sums, before.logprobs, scored.batch.sampler_logprobs, before.reference_logprobs, sampled)
            check_comparisons(sums, step, self.max_mismatch(step))
        reports = []
        for number, rows in enumerate(minibatch_rows(self.config, self.around.seed, step, signal.group_ids)):
            if self.trains_policy(step):
                report = self.optimizer_update(step, number, rows, signal, sums)
                reports += [report] if report else []
            if self.critic is not None:
                self.critic.optimizer_update(step, number, self.split(signal.batch, rows), rows, signal, sums)
        kl_error = answer_kl_error(sums)
        metrics = {**sums.means(), **kl_error}
        metrics.update(effective_sample_fraction(metrics))
        metrics.update(advantage_metrics(scored, signal, found))
        if self.experts is not None and self.reads_routing:
            metrics.update(self.experts.step_metrics(len(scored.batch)))
        metrics["train/num_updates"] = len(reports)
        if reports:
            # The largest of the step: a mean would hide one update that went wrong.
            metrics["policy/grad_norm"] = max(report.grad_norm for report in reports)
            metrics["train/learning_rate"] = reports[-1].learning_rate
        return metrics, signal.advantages

    @property
    def reads_routing(self) -> bool:
        """Whether the experts that the policy chose before the updates are needed."""
        return self.config.experts is not None and self.config.experts.needs_pass_before

    @property
    def has_budget(self) -> bool:
        """Whether a KL that is only measured has a limit: a policy of equal scores may be beyond it too."""
        budget = self.config.sentinels.kl_budget
        is_limited = budget.limit_nats_per_token is not None or budget.limit_nats_per_answer is not None
        is_only_measured = self.reference is not None and self.config.kl.placement == "none"
        return is_only_measured and is_limited and budget.action != "off"

    def trains_policy(self, step: int) -> bool:
        """Return whether the policy learns in this step: not while the critic warms up."""
        return step > self.config.num_warmup_steps

    def needs_pass_before(self, scored: ScoredBatch) -> bool:
        """Return whether log-probs of the policy are needed before the first update.

        They are with several updates (what the ratio is relative to), a KL in the reward, a critic, replayed answers,
        watched experts, whose load is fixed first, and a budget for a KL that is not trained on. With one update of
        fresh answers, training's own forward pass gives them.
        """
        in_reward = self.config.kl.placement == "reward"
        replays = scored.is_replayed is not None and bool(scored.is_replayed.any())
        others = self.critic is not None or self.reads_routing or self.has_budget
        return self.config.updates_per_step > 1 or in_reward or others or replays

    @torch.no_grad()
    def before_updates(self, batch: TrajectoryBatch) -> BeforeUpdates:
        """Return what policy, reference and critic say before the first update."""

        def empty() -> Tensor:
            return torch.zeros(batch.mask.shape, dtype=self.dtype)

        logprobs = empty()
        reference = empty() if self.reference is not None else None
        values = empty() if self.critic is not None else None
        if self.experts is not None:
            self.experts.begin_step(len(batch))
        for micro in self.split(batch, range(len(batch))):
            self.give_up_if_stopped()
            rows, columns = micro.rows, slice(0, micro.mask.shape[1])
            with self.experts.recording(micro) if self.experts else nullcontext():
                logprobs[rows, columns] = self.forward(self.policy, micro)[0].cpu()
            if reference is not None:
                reference[rows, columns] = self.reference_pass(micro).cpu()
            if values is not None and self.critic is not None:
                values[rows, columns] = self.critic.values(micro).cpu()
        return BeforeUpdates(logprobs, reference, values)

    def forward(self, model: PreTrainedModel, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        # Entropy is of training's own passes; nothing reads it of the others, which take no gradient.
        trains = torch.is_grad_enabled()
        return answer_logprobs(
            model,
            micro,
            self.around.temperature,
            self.precision,
            with_entropy=trains,
            entropy_gradient=trains and self.config.entropy_coefficient > 0.0,
        )

    @torch.no_grad()
    def reference_pass(self, micro: MicroBatch) -> Tensor:
        assert self.reference is not None
        with self.reference() as model:
            return self.forward(model, micro)[0]

    def split(self, batch: TrajectoryBatch, rows: Sequence[int]) -> list[MicroBatch]:
        return self.layout.split(batch, rows, self.around.pad_token_id, self.device)

    def step_weights(self, signal: Signal, rows: Sequence[int]) -> Tensor:
        """Return [N, T] float64: the weight of each token in the update of these rows, over all ranks."""
        kind, knobs = self.config.aggregation.kind, self.config.aggregation.model_dump(exclude={"kind"})
        if kind == "constant" and knobs["num_tokens"] is None:
            knobs["num_tokens"] = self.around.max_new_tokens
        weights = torch.zeros(signal.mask.shape, dtype=torch.float64)
        weights[list(rows)] = AGGREGATIONS[kind](
            signal.mask[list(rows)],
            signal.group_ids[list(rows)],
            all_sum=self.around.all_sum,
            num_groups=signal.num_groups,
            **knobs,
        )
        return weights

    def optimizer_update(
        self, step: int, number: int, rows: Sequence[int], signal: Signal, sums: MetricSums
    ) -> StepReport | None:
        """Do one optimizer update; None when no answer of it carries a signal (the weights stay as they are)."""
        weights = self.step_weights(signal, rows)
        rows = [row for row in rows if self.has_signal(signal, row)]
        if self.experts is not None and self.reads_routing:
            self.experts.begin_update(rows)
        total = 0.0
        for micro in self.split(signal.batch, rows):
            if number == 0:
                self.give_up_if_stopped()
            with self.experts.training(micro) if self.experts else nullcontext() as record:
                loss = self.micro_loss(micro, signal, weights, sums)
                if self.experts is not None and record is not None:
                    router_loss = self.experts.loss(micro, record, sums)
                    loss = loss if router_loss is None else loss + router_loss
                total += float(loss.detach())
                check_finite_loss(total, step)
                loss.backward()  # type: ignore[no-untyped-call]
        if not rows:
            return None
        sums.add("policy/loss", total, 1)
        if not signal.is_compared:
            check_comparisons(sums, step, self.max_mismatch(step))
        num_before = step - 1 - self.config.num_warmup_steps
        return self.optimizer.step(num_before * self.config.updates_per_step + number + 1)

    def max_mismatch(self, step: int) -> float:
        """Return the most that sampler and trainer may differ in a step for it to be learned from, nats a token."""
        sentinel = self.config.sentinels.sampler_mismatch
        is_watched = sentinel.action == "stop" and step > sentinel.after_step
        return sentinel.limit_nats if is_watched else math.inf

    def has_signal(self, signal: Signal, row: int) -> bool:
        """Return whether an answer goes through the model at all."""
        return can_have_gradient(self.config, signal, row)

    def micro_loss(self, micro: MicroBatch, signal: Signal, weights: Tensor, sums: MetricSums) -> Tensor:
        """Return this micro-batch's part of the update's loss, and add to the step's metrics."""
        logprobs, entropy = self.forward(self.policy, micro)
        detached = logprobs.detach()

        def of_rows(values: Tensor | None) -> Tensor | None:
            return None if values is None else micro.select(values).to(self.device)

        old = of_rows(signal.old_logprobs)
        inputs = TokenInputs(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=detached if old is None else old,
            sampler_logprobs=micro.select(signal.batch.sampler_logprobs).to(self.device),
            reference_logprobs=self.reference_of(micro, signal),
            advantages=micro.select(signal.advantages).to(self.device),
            mask=micro.select(signal.mask).to(self.device),
            row_weights=None if signal.row_weights is None else signal.row_weights[micro.rows].to(self.device),
            is_fresh=None if signal.is_fresh is None else signal.is_fresh[micro.rows].to(self.device),
        )
        found = token_losses(self.config, self.policy_loss, signal.kl_coefficient, inputs)
        add_policy_metrics(sums, inputs, found)
        if not signal.is_compared:
            add_comparisons(sums, detached, inputs.sampler_logprobs, inputs.reference_logprobs, inputs.mask)
        return weighted_sum(found.losses, micro.select(weights).to(self.device), inputs.mask)

    def reference_of(self, micro: MicroBatch, signal: Signal) -> Tensor | None:
        if self.reference is None:
            return None
        if signal.reference_logprobs is not None:
            return micro.select(signal.reference_logprobs).to(self.device)
        return self.reference_pass(micro)

    def check_model_once(self, batch: TrajectoryBatch) -> None:
        """Check forward passes on this process's first batch, before anything comes of them."""
        if self._is_first:
            check_model_on(self.policy, self.layout, batch, self.around.pad_token_id)

    def give_up_if_stopped(self) -> None:
        if self.around.should_stop():
            raise StepAbandonedError
