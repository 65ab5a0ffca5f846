"""What every advantage estimator takes and gives, and statistics within groups.

Shapes: N answers of a step, group after group or in any order; T longest answer; G groups. A group is all answers that
share an integer id. Ids name prompts of the batch, not their text, so the same prompt drawn twice makes two groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training_core.ops.masking import check_mask, masked_fill_zero
from training_core.ops.returns import finite_or_zero


@dataclass(frozen=True)
class EstimatorInputs:
    """The answers of a step and what they were worth.

    Raises:
        TypeError: a mask is not bool.
        ValueError: shapes do not fit together, or group ids are not integers.
    """

    scores: Tensor
    """[N] float, reward units; anything where not present."""
    present: Tensor
    """[N] bool: has a score."""
    group_ids: Tensor
    """[N] integer."""
    mask: Tensor
    """[N, T] bool: the tokens of the answer."""
    kl_penalties: Tensor | None
    """[N, T] float64, reward units: coefficient times KL estimate of each token, subtracted from the reward; None for
    no KL in the reward. Anything at masked positions and in answers without a score."""
    values: Tensor | None = None
    """[N, T] float64, reward units: the critic's value of the state before each token; None without a critic."""
    baseline_scores: Tensor | None = None
    """[N] float64: score of the greedy answer to the same prompt, NaN where missing; None where nothing uses it."""

    def __post_init__(self) -> None:
        check_mask(self.present)
        check_mask(self.mask)
        if self.mask.ndim != 2 or self.present.ndim != 1:
            raise ValueError(
                f"expected mask [N, T] and present [N], got {tuple(self.mask.shape)} and {tuple(self.present.shape)}"
            )
        rows, tokens = self.mask.shape[:1], self.mask.shape
        wanted = {"scores": rows, "present": rows, "group_ids": rows, "baseline_scores": rows}
        for name, shape in {**wanted, "kl_penalties": tokens, "values": tokens}.items():
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise ValueError(f"{name} must be {tuple(shape)}, as the mask asks, got {tuple(value.shape)}")
        if self.group_ids.dtype.is_floating_point or self.group_ids.dtype == torch.bool:
            raise ValueError(f"group_ids must be integers, got {self.group_ids.dtype}")


@dataclass(frozen=True)
class Advantages:
    """What an estimator returns."""

    advantages: Tensor
    """[N, T] float64; 0 at masked positions and in answers without a score."""
    returns: Tensor | None
    """[N, T] float64, reward units: targets of the critic; 0 at masked positions and in answers without a score, which
    the critic's loss must leave out. None without a critic."""
    num_groups: int
    """Groups with at least one scored answer."""
    num_zero_variance_groups: int
    """Groups of at least two scored answers whose scores are all equal."""
    num_singletons: int
    """Groups with exactly one scored answer."""
    num_without_score: int = 0
    """Answers that took no part: without a score, without a token, or without what the estimator compares with."""


@dataclass(frozen=True)
class Groups:
    """Which answers are compared with which; answers that do not count change nothing and get 0."""

    rows: Tensor
    """[N] int64: the group of each answer, 0 to G - 1."""
    counted: Tensor
    """[N] bool: takes part."""
    sizes: Tensor
    """[G] float64: answers of the group that take part."""

    @staticmethod
    def of(group_ids: Tensor, counted: Tensor) -> Groups:
        """Return the groups of the answers that count."""
        check_mask(counted, group_ids)
        unique_ids, rows = torch.unique(group_ids, return_inverse=True)
        sizes = torch.zeros(len(unique_ids), dtype=torch.float64, device=rows.device)
        return Groups(rows, counted, sizes.index_add_(0, rows, counted.double()))

    def sum(self, values: Tensor) -> Tensor:
        """Return [G]: the sums of [N] float64 values that are 0 where an answer does not count."""
        return torch.zeros_like(self.sizes).index_add_(0, self.rows, values)

    def is_flat(self, values: Tensor) -> Tensor:
        """Return [G] bool: the largest value that counts equals the smallest, or there are fewer than two."""
        highest, lowest = torch.full_like(self.sizes, -torch.inf), torch.full_like(self.sizes, torch.inf)
        up = torch.where(self.counted, values, -torch.inf)
        down = torch.where(self.counted, values, torch.inf)
        highest = highest.scatter_reduce_(0, self.rows, up, reduce="amax")
        return highest <= lowest.scatter_reduce_(0, self.rows, down, reduce="amin")

    def centred(self, values: Tensor) -> Tensor:
        """Return [N]: values less their group's mean; exactly 0 in a flat group, whatever rounding would leave."""
        spreads = self.counted & ~self.is_flat(values)[self.rows]
        deviations = masked_fill_zero(values - self._mean(values)[self.rows], spreads)
        # Far from zero the mean itself is rounded; the mean of the deviations is what it was off by.
        return masked_fill_zero(deviations - self._mean(deviations)[self.rows], spreads)

    def _mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.sizes.clamp(min=1.0)

    def std(self, centred: Tensor) -> Tensor:
        """Return [G]: the standard deviation of centred values, with n - 1 degrees of freedom."""
        return (self.sum(centred.square()) / (self.sizes - 1.0).clamp(min=1.0)).sqrt()


@dataclass(frozen=True)
class Scored:
    """The answers that count, checked."""

    inputs: EstimatorInputs
    scores: Tensor
    """[N] float64; 0 where an answer does not count."""
    groups: Groups
    mask: Tensor
    """[N, T] bool: tokens of answers that count."""

    @property
    def counted(self) -> Tensor:
        """[N] bool: has a score and a token."""
        return self.groups.counted

    def penalties(self) -> Tensor | None:
        """Return [N, T] float64 KL penalties, 0 where a token does not count; None without."""
        penalties = self.inputs.kl_penalties
        return None if penalties is None else finite_or_zero(penalties, self.mask, "a KL penalty")

    def penalty_sums(self) -> Tensor | None:
        """Return [N] float64: the KL penalty of each whole answer; None without."""
        penalties = self.penalties()
        return None if penalties is None else penalties.sum(dim=1)

    def spread(self, rows: Tensor) -> Tensor:
        """Return [N, T]: the answer's value at each of its tokens; 0 where a token does not count."""
        return masked_fill_zero(rows[:, None].expand(self.mask.shape), self.mask)

    def result(self, advantages: Tensor, returns: Tensor | None = None) -> Advantages:
        """Return the result of an estimator with what the scores said about the groups."""
        sizes = self.groups.sizes
        return Advantages(
            advantages=advantages,
            returns=returns,
            num_groups=int((sizes > 0).sum()),
            num_zero_variance_groups=int((self.groups.is_flat(self.scores) & (sizes > 1)).sum()),
            num_singletons=int((sizes == 1).sum()),
            num_without_score=int((~self.counted).sum()),
        )


def scored(inputs: EstimatorInputs, also: Tensor | None = None) -> Scored:
    """Return the answers that count: with a score, with at least one token, and where `also` ([N] bool) is true.

    An answer without a token has nothing that could learn from its score, and an estimate that counted it would let a
    score that belongs to no action move the others.

    Raises:
        ValueError: a present score is not finite.
    """
    scores = finite_or_zero(inputs.scores, inputs.present, "a score")
    counted = inputs.present & inputs.mask.any(dim=1)
    if also is not None:
        counted = counted & also
    groups = Groups.of(inputs.group_ids, counted)
    return Scored(inputs, masked_fill_zero(scores, counted), groups, inputs.mask & counted[:, None])
