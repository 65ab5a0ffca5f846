"""What the updates of a step learn from: scored answers, their advantages, and the tokens that count.

Shapes: N answers of the step, T longest answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training_core.config.kl import KlInLoss, KlInReward
from training_core.config.online import OnlineConfig
from training_core.ops.advantages import Advantages, EstimatorInputs
from training_core.ops.masking import masked_fill_zero
from training_core.registries import KL_REWARDS
from training_core.rl.plugs import Estimator
from training_core.rollout.batch import TrajectoryBatch
from training_core.seeding import permutation


@dataclass(frozen=True)
class ScoredBatch:
    """Answers and what they are worth. Rows come group after group."""

    batch: TrajectoryBatch
    scores: Tensor
    """[N] float64; anything where `present` is false."""
    present: Tensor
    """[N] bool: false where an answer has no score."""
    is_truncated: Tensor
    """[N] bool."""
    group_ids: Tensor
    """[N] int64, 0 to the number of groups - 1: which prompt of the step an answer belongs to."""
    baseline_scores: Tensor | None = None
    """[N] float64: score of the most probable answer to the same prompt, NaN where missing; None unless asked for."""
    is_replayed: Tensor | None = None
    """[N] bool: sampled in an earlier step. None when nothing is."""
    row_weights: Tensor | None = None
    """[N] float64: factor of an answer's policy loss, from prioritised replay. None for 1."""


@dataclass(frozen=True)
class BeforeUpdates:
    """What forward passes before a step's first update said; all without gradient and on the CPU."""

    logprobs: Tensor
    """[N, T] of the policy, nats."""
    reference_logprobs: Tensor | None
    """[N, T] of the reference, nats; None without one."""
    values: Tensor | None = None
    """[N, T] of the critic, reward units; None without one."""


@dataclass(frozen=True)
class Signal:
    """What the updates of one step learn from; all on the CPU."""

    batch: TrajectoryBatch
    mask: Tensor
    """[N, T] bool: the tokens that count in the loss. The one mask: numerators and denominators use it."""
    group_ids: Tensor
    """[N] int64."""
    advantages: Tensor
    """[N, T]."""
    old_logprobs: Tensor | None
    """[N, T] of the policy that ratios are relative to; None when it is the one of training's own forward pass."""
    reference_logprobs: Tensor | None
    """[N, T]; None when there is no reference, or when training's forward pass comes first."""
    is_compared: bool
    """Whether the policy was compared with sampler and reference before the first update, over all answers. Else the
    update's forward passes do it, over those answers that they need."""
    kl_coefficient: float = 0.0
    """Of the KL term in the loss."""
    row_weights: Tensor | None = None
    """[N]: factor of an answer's policy loss; None for 1."""
    is_fresh: Tensor | None = None
    """[N] bool: sampled in this step, so that sampler and trainer can be compared; None when all are."""
    returns: Tensor | None = None
    """[N, T]: what the critic learns; None without one."""
    old_values: Tensor | None = None
    """[N, T]: the critic's values before the step; None without one."""

    @property
    def num_groups(self) -> int:
        return int(self.group_ids.max()) + 1 if len(self.group_ids) else 0


def kl_penalties(
    config: OnlineConfig, coefficient: float, before: BeforeUpdates | None, batch: TrajectoryBatch
) -> Tensor | None:
    """Return [N, T] float64: what the KL takes from the reward of each token; None without a KL in the reward."""
    if not isinstance(config.kl, KlInReward):
        return None
    assert before is not None
    assert before.reference_logprobs is not None
    log_ratio = masked_fill_zero(before.logprobs.double() - before.reference_logprobs.double(), batch.mask)
    return coefficient * KL_REWARDS[config.kl.estimator](log_ratio)


def build_signal(
    config: OnlineConfig,
    estimate: Estimator,
    scored: ScoredBatch,
    before: BeforeUpdates | None,
    kl_coefficient: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[Signal, Advantages]:
    """Return what the updates learn from, and what the scores said about the groups.

    Args:
        config: the algorithm.
        estimate: its advantage estimator.
        scored: the step's answers.
        before: what forward passes said before the first update; None when training's own give all that is needed.
        kl_coefficient: of the KL term, wherever it counts.
        dtype: of what the updates read.
    """
    batch = scored.batch
    inputs = EstimatorInputs(
        scores=scored.scores,
        present=scored.present,
        group_ids=scored.group_ids,
        mask=batch.mask,
        kl_penalties=kl_penalties(config, kl_coefficient, before, batch),
        values=None if before is None or before.values is None else before.values.double(),
        baseline_scores=scored.baseline_scores,
    )
    found = estimate(inputs)
    counted = scored.present & ~scored.is_truncated if config.mask_truncated else scored.present
    if config.advantage.needs_greedy_answer and scored.baseline_scores is not None:
        counted = counted & ~scored.baseline_scores.isnan()
    signal = Signal(
        batch=batch,
        mask=batch.mask & counted[:, None],
        group_ids=scored.group_ids,
        advantages=found.advantages.to(dtype),
        old_logprobs=old_logprobs(config, scored, before),
        reference_logprobs=None if before is None else before.reference_logprobs,
        is_compared=before is not None,
        kl_coefficient=kl_coefficient if isinstance(config.kl, KlInLoss) else 0.0,
        row_weights=None if scored.row_weights is None else scored.row_weights.to(dtype),
        is_fresh=None if scored.is_replayed is None else ~scored.is_replayed,
        returns=None if found.returns is None else found.returns.to(dtype),
        old_values=None if before is None or before.values is None else before.values.to(dtype),
    )
    return signal, found


def old_logprobs(config: OnlineConfig, scored: ScoredBatch, before: BeforeUpdates | None) -> Tensor | None:
    """Return [N, T] log-probs of the policy that ratios are relative to, or None.

    With one update and fresh answers that is the policy of training's own forward pass: the ratio is exactly 1. A
    replayed answer's ratio is to the policy that sampled it.
    """
    if scored.is_replayed is not None and bool(scored.is_replayed.any()):
        assert before is not None
        return torch.where(scored.is_replayed[:, None], scored.batch.sampler_logprobs, before.logprobs)
    return None if config.updates_per_step == 1 or before is None else before.logprobs


def can_have_gradient(config: OnlineConfig, signal: Signal, row: int) -> bool:
    """Return whether an answer can have a gradient: it counts, and has an advantage or a term of its own."""
    counts = bool(signal.mask[row].any())
    always = isinstance(config.kl, KlInLoss) or config.entropy_coefficient > 0.0 or config.experts is not None
    return counts and (always or bool((signal.advantages[row] != 0.0).any()))


def minibatch_rows(config: OnlineConfig, seed: int, step: int, group_ids: Tensor) -> list[list[int]]:
    """Return the rows of each update of a step: whole groups, in an order of its own for each epoch.

    Where there are fewer groups than minibatches, some are empty.
    """
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids.tolist()):
        rows_of.setdefault(group, []).append(row)
    result = []
    for epoch in range(config.num_epochs):
        order = permutation(len(rows_of), seed, "minibatch", step, epoch)
        for number in range(config.num_minibatches):
            groups = sorted(order[number :: config.num_minibatches])
            result.append([row for group in groups for row in rows_of[group]])
    return result
