"""What the updates of a GRPO step learn from: scored answers, their advantages, and the tokens that count.

Shapes: N answers of the step, T longest answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training_core.config.algorithms import GrpoConfig, KlInLoss, KlInReward
from training_core.ops.advantages import GroupAdvantages
from training_core.ops.kl import k1
from training_core.ops.masking import masked_sum
from training_core.registries import ADVANTAGE_ESTIMATORS
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


@dataclass(frozen=True)
class Signal:
    """What the updates of one step learn from; all on the CPU."""

    batch: TrajectoryBatch
    mask: Tensor
    """[N, T] bool: the tokens that count in the loss. The one mask: numerators and denominators use it."""
    advantages: Tensor
    """[N] float32."""
    old_logprobs: Tensor | None
    """[N, T] of the policy before the first update; None when one update is made, whose ratio is 1."""
    reference_logprobs: Tensor | None
    """[N, T]; None when there is no reference, or when training's forward pass comes first."""
    is_compared: bool
    """Whether the policy was compared with sampler and reference before the first update, over all answers. Else the
    update's forward passes do it, over those answers that they need."""


def build_signal(
    config: GrpoConfig, scored: ScoredBatch, old: Tensor | None, reference: Tensor | None
) -> tuple[Signal, GroupAdvantages]:
    """Return what the updates learn from, and what the scores said about the groups.

    Args:
        config: the algorithm.
        scored: the step's answers.
        old: [N, T] log-probs of the policy before the first update; None when training's forward pass gives them.
        reference: [N, T] of the reference, taken at the same time; None without one.
    """
    group_ids = torch.arange(len(scored.batch)) // config.group_size
    estimate = ADVANTAGE_ESTIMATORS[config.advantage]
    penalties = None
    if isinstance(config.kl, KlInReward):
        penalties = config.kl.coefficient * answer_kl(old, reference, scored.batch.mask)
    groups = estimate(scored.scores, group_ids, scored.present, penalties=penalties)
    counted = scored.present & ~scored.is_truncated if config.mask_truncated else scored.present
    # One update starts where the answers came from: its own forward pass is the old policy, the ratio exactly 1.
    signal_old = None if config.updates_per_step == 1 else old
    mask = scored.batch.mask & counted[:, None]
    signal = Signal(scored.batch, mask, groups.advantages.float(), signal_old, reference, is_compared=old is not None)
    return signal, groups


def answer_kl(policy: Tensor | None, reference: Tensor | None, mask: Tensor) -> Tensor:
    """Return [N] float64: the sum over each answer's tokens of log policy - log reference (k1), in nats."""
    assert policy is not None
    assert reference is not None
    return masked_sum(k1(policy.double() - reference.double()), mask, dim=1)


def can_have_gradient(config: GrpoConfig, signal: Signal, row: int) -> bool:
    """Return whether an answer can have a gradient: it counts, and has an advantage or a KL term in the loss."""
    counts = bool(signal.mask[row].any())
    return counts and (float(signal.advantages[row]) != 0.0 or isinstance(config.kl, KlInLoss))


def minibatch_rows(config: GrpoConfig, seed: int, step: int) -> list[list[int]]:
    """Return the rows of each update of a step: whole groups, in an order of its own for each epoch."""
    result = []
    for epoch in range(config.num_epochs):
        order = permutation(config.prompts_per_step, seed, "minibatch", step, epoch)
        for number in range(config.num_minibatches):
            groups = sorted(order[number :: config.num_minibatches])
            starts = [group * config.group_size for group in groups]
            result.append([start + sample for start in starts for sample in range(config.group_size)])
    return result
