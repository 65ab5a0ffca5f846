"""Advantages from scores of answers to the same prompt.

Shapes: N answers; a group is all answers that share an integer id. Ids name prompts of the batch, not their text, so
the same prompt drawn twice makes two groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training_core.ops.masking import check_mask

STD_EPSILON = 1e-6


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages and what was seen in the groups."""

    advantages: Tensor
    """[answers] float64; 0 for a missing score, in a singleton and, without penalties, in a group of equal scores."""
    num_groups: int
    """Groups with at least one score."""
    num_zero_variance_groups: int
    """Groups of at least two scores that are all equal."""
    num_singletons: int
    """Groups with exactly one score."""


def group_advantages(
    scores: Tensor,
    group_ids: Tensor,
    present: Tensor,
    *,
    divide_by_std: bool,
    penalties: Tensor | None = None,
    epsilon: float = STD_EPSILON,
) -> GroupAdvantages:
    """Compute group-relative advantages.

    A_i = score_i - mean(group), divided by (std(group) + epsilon) when `divide_by_std`. Mean and standard deviation (of
    n - 1 degrees of freedom) are taken over the present scores of the group, in float64 and in two passes.

    With penalties, the centred penalty is then subtracted, undivided: A_i - (penalty_i - mean(group)). This is the
    reward after normalisation minus the penalty; divided as well, a penalty would count without bound in a group whose
    scores hardly differ, and its coefficient would cancel where they are equal.

    Special cases:
        All scores of a group equal: exactly 0, whatever rounding would leave; with penalties, minus the centred
        penalty. One score: 0. Missing: 0, and the others are as if it were not there. Without division
        the advantages of a group sum to 0.

    Args:
        scores: [answers] float, reward units; may hold anything where `present` is false.
        group_ids: [answers] integer.
        present: [answers] bool, true where there is a score.
        divide_by_std: whether to divide.
        penalties: [answers] float, in the unit of the advantages; may hold anything where `present` is false. None for
            none.
        epsilon: added to the standard deviation, reward units.

    Returns:
        The advantages ([answers] float64; without unit when divided, else reward units) and counts of groups.

    Gradient:
        None; inputs are detached.

    Raises:
        ValueError: a present score or penalty is not finite, or shapes differ.

    Source:
        Shao et al. 2024, "DeepSeekMath", section 4.1.2, arXiv 2402.03300; without division: Liu et al. 2025,
        "Understanding R1-Zero-Like Training", arXiv 2503.20783, section 3.

    Example:
        >>> ids, present = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
        >>> group_advantages(torch.tensor([1.0, 3.0, 5.0, 5.0]), ids, present, divide_by_std=False).advantages.tolist()
        [-1.0, 1.0, 0.0, 0.0]
    """
    check_mask(present, group_ids)
    values = _present_values(scores, present)
    unique_ids, groups = torch.unique(group_ids, return_inverse=True)
    num_groups = len(unique_ids)

    def group_sum(x: Tensor) -> Tensor:
        return torch.zeros(num_groups, dtype=torch.float64, device=x.device).index_add_(0, groups, x)

    counts = group_sum(present.double())

    def centre(x: Tensor) -> Tensor:
        mean = group_sum(x) / counts.clamp(min=1.0)
        return torch.where(present, x - mean[groups], torch.zeros_like(x))

    centred = centre(values)
    variance = group_sum(centred.square()) / (counts - 1.0).clamp(min=1.0)
    flat = _groups_without_spread(values, groups, present, num_groups)
    scale = variance.sqrt() + epsilon if divide_by_std else torch.ones_like(variance)
    advantages = torch.where(flat[groups], torch.zeros_like(centred), centred / scale[groups])
    if penalties is not None:
        advantages = advantages - centre(_present_values(penalties, present))
    return GroupAdvantages(
        advantages=advantages,
        num_groups=int((counts > 0).sum()),
        num_zero_variance_groups=int((flat & (counts > 1)).sum()),
        num_singletons=int((counts == 1).sum()),
    )


def _present_values(values: Tensor, present: Tensor) -> Tensor:
    """Return [answers] float64, detached, 0 where `present` is false."""
    check_mask(present, values)
    filled = torch.where(present, values.detach().double(), torch.zeros((), dtype=torch.float64, device=values.device))
    if not bool(torch.isfinite(filled).all()):
        raise ValueError("a score is not finite; report an answer without a score as missing instead")
    return filled


def _groups_without_spread(values: Tensor, groups: Tensor, present: Tensor, num_groups: int) -> Tensor:
    """Return [groups] bool: true where the largest present score equals the smallest, or fewer than two exist."""
    infinity = torch.full((num_groups,), float("inf"), dtype=torch.float64, device=values.device)
    high = torch.where(present, values, torch.full_like(values, -float("inf")))
    low = torch.where(present, values, torch.full_like(values, float("inf")))
    largest = (-infinity).scatter_reduce_(0, groups, high, reduce="amax")
    smallest = infinity.scatter_reduce_(0, groups, low, reduce="amin")
    return largest <= smallest
