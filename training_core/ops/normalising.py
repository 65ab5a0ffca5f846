"""Mean and spread over a batch, and over everything seen so far.

All of it in float64 and in two passes (first the mean, then the deviations): the one-pass formula E[x^2] - E[x]^2
loses all digits when the spread is small beside the mean. Values that are all equal give exactly 0, whatever rounding
would leave.

Shapes: any; usually [answers, time] or [answers].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from training_core.ops.masking import check_mask

STD_EPSILON = 1e-6
"""Added to a standard deviation before it divides: a spread of a few last bits must not become noise of size one."""


def center(values: Tensor, mask: Tensor) -> Tensor:
    """Subtract the mean of the unmasked values.

    x - mean(x).

    Special cases:
        All values equal: exactly 0. One value or none: 0. The results add up to 0.

    Args:
        values: any shape, float; may hold anything where the mask is false.
        mask: same shape, bool.

    Returns:
        Same shape and unit, float64; 0 where the mask is false.

    Gradient:
        None; inputs are detached.

    Raises:
        ValueError: shapes differ.

    Source:
        The definition of the mean.

    Example:
        >>> center(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([True, True, False])).tolist()
        [-1.0, 1.0, 0.0]
    """
    return _scatter(_centred(_select(values, mask)), mask)


def whiten(values: Tensor, mask: Tensor, *, epsilon: float = STD_EPSILON) -> Tensor:
    """Subtract the mean of the unmasked values and divide by their standard deviation.

    (x - mean(x)) / (std(x) + epsilon), with n - 1 degrees of freedom.

    Special cases:
        All values equal: exactly 0. One value or none: 0. The results add up to 0. Adding a constant to all values, or
        multiplying all by a positive one, changes nothing (up to epsilon).

    Args:
        values: any shape, float; may hold anything where the mask is false.
        mask: same shape, bool.
        epsilon: added to the standard deviation, in the unit of the values.

    Returns:
        Same shape, float64, without unit; 0 where the mask is false.

    Gradient:
        None; inputs are detached.

    Raises:
        ValueError: shapes differ.

    Source:
        Andrychowicz et al. 2020, "What Matters In On-Policy Reinforcement Learning?", choice C67
        (advantage normalisation), arXiv 2006.05990.

    Example:
        >>> everything = torch.ones(3, dtype=torch.bool)
        >>> [round(x, 4) for x in whiten(torch.tensor([1.0, 2.0, 3.0]), everything).tolist()]
        [-1.0, 0.0, 1.0]
        >>> whiten(torch.full((3,), 0.7), everything).tolist()
        [0.0, 0.0, 0.0]
    """
    centred = _centred(_select(values, mask))
    degrees = max(centred.numel() - 1, 1)
    return _scatter(centred / ((centred.square().sum() / degrees).sqrt() + epsilon), mask)


@dataclass(frozen=True)
class RunningMoments:
    """Count, mean and spread of all values seen, for rewards that are normalised over a whole run.

    Three numbers hold it, so a checkpoint keeps it as JSON (`dataclasses.asdict`, `RunningMoments(**saved)`) to the
    last bit.

    Example:
        >>> RunningMoments().updated(torch.tensor([1.0, 2.0])).updated(torch.tensor([3.0]))
        RunningMoments(count=3, mean=2.0, m2=2.0)
    """

    count: int = 0
    """Values seen."""
    mean: float = 0.0
    """Their mean; 0 before the first value."""
    m2: float = 0.0
    """Sum of squared deviations from the mean."""

    @property
    def std(self) -> float:
        """Standard deviation with n - 1 degrees of freedom; 0 with fewer than two values."""
        return math.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else 0.0

    def updated(self, values: Tensor) -> RunningMoments:
        """Return the moments with more values.

        Special cases:
            No value: unchanged. The same as all values at once, up to rounding, however they are split. All values
            equal: mean exactly that value, std exactly 0.

        Args:
            values: any shape, float, finite: leave missing ones out.

        Raises:
            ValueError: a value is not finite.
        """
        flat = values.detach().double().reshape(-1)
        if not bool(torch.isfinite(flat).all()):
            raise ValueError("a value is not finite; leave what has no value out of the statistics")
        if flat.numel() == 0:
            return self
        centred = _centred(flat)
        # The first value less its deviation: exact when all are equal, which a mean by division is not.
        mean = float(flat[0] - centred[0])
        return self.merged(RunningMoments(flat.numel(), mean, float(centred.square().sum())))

    def merged(self, other: RunningMoments) -> RunningMoments:
        """Return the moments of both sets of values.

        With d = mean_b - mean_a and n = n_a + n_b: mean = mean_a + d * n_b / n; m2 = m2_a + m2_b + d^2 * n_a * n_b / n.

        Source:
            Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", equations 2.1.
        """
        count = self.count + other.count
        if not self.count or not other.count:
            return other if other.count else self
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        return RunningMoments(count, mean, self.m2 + other.m2 + delta * delta * self.count * other.count / count)


def _select(values: Tensor, mask: Tensor) -> Tensor:
    """Return the unmasked values in one row, float64: sums over it do not depend on the padding, to the bit."""
    check_mask(mask, values)
    return values.detach()[mask].double()


def _centred(selected: Tensor) -> Tensor:
    """Return [count] values less their mean; exactly 0 when the largest equals the smallest."""
    if selected.numel() < 2 or bool(selected.max() == selected.min()):
        return torch.zeros_like(selected)
    deviations = selected - selected.mean()
    # Far from zero the mean itself is rounded; the mean of the deviations is what it was off by.
    return deviations - deviations.mean()


def _scatter(selected: Tensor, mask: Tensor) -> Tensor:
    """Put [count] values back where the mask is true; 0 elsewhere."""
    result = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    result[mask] = selected
    return result
