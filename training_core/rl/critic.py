"""The critic's half of PPO: values of states, and updates towards the returns.

Shapes: N answers of the step, T longest answer, B rows of a micro-batch, t its longest answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from training_core.config.critic import CriticConfig
from training_core.config.online import OnlineConfig
from training_core.engines.single import SingleProcessEngine, StepReport
from training_core.metrics import MetricSums
from training_core.models.critic import ValueModel
from training_core.ops.aggregation import AllSum, keep, token_mean_weights, weighted_sum
from training_core.ops.masking import masked_fill_zero, masked_sum
from training_core.ops.value_losses import clipped_value_loss
from training_core.rl.forward import Precision, predicting_hidden
from training_core.rl.signal import Signal
from training_core.rollout.batch import MicroBatch
from training_core.sentinels import check_finite_loss


class CriticUpdater:
    """Gives values and learns from returns, with an optimizer of its own: clipping sees each model's gradient apart.

    Args:
        config: of the critic.
        algorithm: whose updates it shares.
        model: float32 master weights.
        optimizer: owns its parameters.
        all_sum: sums counts over ranks.
    """

    def __init__(
        self,
        config: CriticConfig,
        algorithm: OnlineConfig,
        model: ValueModel,
        optimizer: SingleProcessEngine,
        all_sum: AllSum = keep,
    ) -> None:
        self.config = config
        self.algorithm = algorithm
        self.model = model
        self.optimizer = optimizer
        self.all_sum = all_sum
        self.precision = Precision(algorithm.autocast, model.device)

    def values(self, micro: MicroBatch) -> Tensor:
        """Return [B, t]: the value of the state before each answer token; 0 elsewhere."""
        with self.precision.context():
            hidden = predicting_hidden(self.model.backbone, micro)
        return micro.scatter(self.model.read(hidden))

    def optimizer_update(
        self,
        step: int,
        number: int,
        micros: Sequence[MicroBatch],
        rows: Sequence[int],
        signal: Signal,
        sums: MetricSums,
    ) -> StepReport | None:
        """Do one update over `rows` of the step; None when no token of them counts."""
        weights = torch.zeros(signal.mask.shape, dtype=torch.float64)
        # Every token's value is as good a lesson as any other's, whatever the policy's aggregation.
        weights[list(rows)] = token_mean_weights(signal.mask[list(rows)], all_sum=self.all_sum)
        if not bool(signal.mask[list(rows)].any()):
            return None
        total = 0.0
        for micro in micros:
            loss = self.micro_loss(micro, signal, weights, sums)
            total += float(loss.detach())
            check_finite_loss(total, step)
            loss.backward()  # type: ignore[no-untyped-call]
        sums.add("critic/loss", total, 1)
        report = self.optimizer.step((step - 1) * self.algorithm.updates_per_step + number + 1)
        sums.add("critic/grad_norm", report.grad_norm, 1)
        return report

    def micro_loss(self, micro: MicroBatch, signal: Signal, weights: Tensor, sums: MetricSums) -> Tensor:
        """Return this micro-batch's part of the update's loss, and add to the step's metrics."""
        assert signal.returns is not None
        assert signal.old_values is not None
        values = self.values(micro)
        mask = micro.select(signal.mask).to(values.device)
        returns = micro.select(signal.returns).to(values.device)
        old = micro.select(signal.old_values).to(values.device)
        losses, is_clipped = clipped_value_loss(values, old, returns, mask, clip=self.config.value_clip)
        count = int(mask.sum())
        errors = masked_fill_zero(returns - values.detach(), mask).double()
        sums.add("critic/value_mean", float(masked_sum(values.detach().double(), mask)), count)
        sums.add("critic/return_mean", float(masked_sum(returns.double(), mask)), count)
        sums.add("critic/square_error_mean", float(errors.square().sum()), count)
        sums.add("critic/clip_fraction", int((is_clipped & mask).sum()), count)
        return weighted_sum(losses, micro.select(weights).to(values.device), mask)
