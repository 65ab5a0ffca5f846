"""Losses of a reward model: one value a pair or a rating. Adding them up, with the step's denominator, is the caller's.

Shapes: P pairs, N rated answers, K levels of an ordinal rating.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad, softplus


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor | None = None) -> Tensor:
    """Compute the negative log-likelihood that the chosen answer wins by at least a margin.

    loss = -log sigmoid(chosen - rejected - margin).

    Special cases:
        margin None or 0: the plain Bradley-Terry loss, -log P(chosen beats rejected); log 2 at equal scores. A margin m
        is the same as scores that are m closer together. The same number added to both scores changes nothing.

    Args:
        chosen, rejected: [pairs] scores of the preferred and of the other answer.
        margin: [pairs] in units of the score: how far apart the scores should be. None is no margin. What a data set
            does not say has no place here: the caller decides what a pair without a margin is.

    Returns:
        [pairs], nats, above 0; linear in the scores where they are far on the wrong side, so nothing overflows.

    Gradient:
        -sigmoid(-(chosen - rejected - margin)) to `chosen`, its negative to `rejected`; none to `margin`.

    Source:
        Bradley and Terry 1952; Ouyang et al. 2022, equation 1, arXiv 2203.02155. Margin: Touvron et al. 2023, equation
        2, arXiv 2307.09288.

    Example:
        >>> scores = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 0.0])
        >>> [round(x, 4) for x in bradley_terry(*scores, margin=torch.tensor([2.0, 0.0])).tolist()]
        [0.6931, 0.6931]
    """
    difference = chosen - rejected
    return -logsigmoid(difference if margin is None else difference - margin.detach())


def centring(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute a penalty that holds the scores of a pair around zero.

    penalty = (chosen + rejected)^2.

    Special cases:
        Scores of opposite sign and equal size: 0. It says nothing about their difference, which is what a pair teaches,
        and fixes what a pair leaves open: the number that may be added to all scores.

    Args:
        chosen, rejected: [pairs] scores.

    Returns:
        [pairs], squared units of the score, at least 0.

    Gradient:
        2 * (chosen + rejected) to both.

    Source:
        Eisenstein et al. 2023, the regulariser of section 2, arXiv 2312.09244.

    Example:
        >>> centring(torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 2.0])).tolist()
        [0.0, 9.0]
    """
    return (chosen + rejected).square()


def squared_error(scores: Tensor, ratings: Tensor) -> Tensor:
    """Compute the squared difference between score and rating.

    loss = (score - rating)^2.

    Special cases:
        score = rating: 0. The constant score that costs least is the mean rating.

    Args:
        scores: [answers].
        ratings: [answers], in the unit that the score shall have.

    Returns:
        [answers], squared units of the rating.

    Gradient:
        2 * (score - rating) to `scores`.

    Source:
        Least squares; ratings as a target of a reward model: Wang et al. 2024, HelpSteer2, arXiv 2406.08673.

    Example:
        >>> squared_error(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 5.0])).tolist()
        [0.0, 4.0]
    """
    return (scores - ratings).square()


def ordinal(scores: Tensor, levels: Tensor, thresholds: Tensor) -> Tensor:
    """Compute the negative log-likelihood of ordered levels in the proportional-odds model.

    P(level <= k) = sigmoid(threshold_k - score), so with the thresholds above and below the observed level,
    loss = -log(sigmoid(above - score) - sigmoid(below - score)), where the lowest level has no threshold below
    (sigmoid 0) and the highest none above (sigmoid 1).

    Taken as -log sigmoid(above - score) - log sigmoid(score - below) - log(1 - exp(below - above)), the same number
    without the difference of two near equal ones.

    Special cases:
        Two levels: logistic regression, -log sigmoid(±(score - threshold)). The same number added to scores and
        thresholds changes nothing.

    Args:
        scores: [answers], position on the latent scale, where the noise is standard logistic.
        levels: [answers], int64 in [0, levels - 1], 0 the lowest.
        thresholds: [levels - 1], strictly increasing, on the scale of the scores.

    Returns:
        [answers], nats, above 0, in the wider of the two dtypes.

    Gradient:
        To `scores` and `thresholds`.

    Raises:
        ValueError: thresholds are missing or not strictly increasing, or a level is outside the range.

    Source:
        McCullagh 1980, Regression models for ordinal data, J. R. Statist. Soc. B 42(2), equation 1.1 and section 2.

    Example:
        >>> loss = ordinal(torch.zeros(3), torch.tensor([0, 1, 2]), torch.tensor([-1.0, 1.0]))
        >>> [round(x, 4) for x in (-loss).exp().tolist()]
        [0.2689, 0.4621, 0.2689]
    """
    num_levels = len(thresholds) + 1
    if thresholds.ndim != 1 or num_levels < 2 or not bool((thresholds.detach().diff() > 0).all()):
        raise ValueError(f"thresholds must be strictly increasing and at least one, got {thresholds.tolist()}")
    if levels.numel() and not 0 <= int(levels.min()) <= int(levels.max()) < num_levels:
        raise ValueError(
            f"levels must lie in [0, {num_levels - 1}], got {int(levels.min())} to {int(levels.max())}: there are "
            f"{len(thresholds)} thresholds"
        )
    zero = torch.zeros((), dtype=torch.promote_types(scores.dtype, thresholds.dtype), device=scores.device)
    has_above, has_below = levels < num_levels - 1, levels > 0
    above = thresholds[levels.clamp(max=num_levels - 2)]
    below = thresholds[(levels - 1).clamp(min=0)]
    width = torch.where(has_above & has_below, above - below, torch.ones_like(above))
    loss = -torch.where(has_above, logsigmoid(above - scores), zero)
    loss = loss - torch.where(has_below, logsigmoid(scores - below), zero)
    return loss - torch.where(has_above & has_below, torch.log(-torch.expm1(-width)), zero)


def ordered_thresholds(first: Tensor, raw_widths: Tensor) -> Tensor:
    """Return strictly increasing thresholds from parameters that may have any value.

    threshold_0 = first; threshold_k = threshold_(k-1) + softplus(raw_width_k).

    Special cases:
        No raw width: the one threshold `first`. Widths too small for float64 beside the threshold below them would be
        rounded away; `ordinal` refuses the result.

    Args:
        first: [1], the lowest threshold.
        raw_widths: [levels - 2]; softplus makes them the distances between neighbours.

    Returns:
        [levels - 1] float64, on the scale of the scores.

    Gradient:
        To both.

    Source:
        A reparametrisation of McCullagh 1980's ordered cut points; softplus: Dugas et al. 2001.

    Example:
        >>> ordered_thresholds(torch.tensor([-1.0]), torch.tensor([0.0])).tolist()
        [-1.0, -0.3068528194400547]
    """
    return torch.cat([first.double(), first.double() + softplus(raw_widths.double()).cumsum(0)])


def threshold_parameters(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return parameters of `ordered_thresholds` under which a score of 0 gives each level its observed frequency.

    threshold_k = logit of the share of ratings at level k or below, one added to each count, so that a level nobody
    used has a place too.

    Special cases:
        Equal counts of two levels: the threshold 0.

    Args:
        counts: [levels], how often each level occurs, at least two levels.

    Returns:
        (first [1], raw_widths [levels - 2]), float64.

    Source:
        The maximum-likelihood thresholds of McCullagh 1980's model without covariates (equation 1.1), with Laplace's
        rule of succession.

    Example:
        >>> [x.tolist() for x in threshold_parameters(torch.tensor([4, 4]))]
        [[0.0], []]
    """
    shares = (counts.double() + 1.0).cumsum(0)
    thresholds = torch.logit(shares[:-1] / shares[-1])
    widths = thresholds.diff()
    return thresholds[:1], widths + torch.log(-torch.expm1(-widths))


def level_probabilities(scores: Tensor, thresholds: Tensor) -> Tensor:
    """Return the probability of each ordered level.

    P(level = k) = sigmoid(threshold_k - score) - sigmoid(threshold_(k-1) - score).

    Special cases:
        Two levels: [sigmoid(threshold - score), sigmoid(score - threshold)]. A row sums to 1.

    Args:
        scores: [answers].
        thresholds: [levels - 1], increasing.

    Returns:
        [answers, levels].

    Source:
        McCullagh 1980, equation 1.1.

    Example:
        >>> [round(x, 4) for x in level_probabilities(torch.zeros(1), torch.tensor([-1.0, 1.0]))[0].tolist()]
        [0.2689, 0.4621, 0.2689]
    """
    cumulative = torch.sigmoid(thresholds[None, :] - scores[:, None])
    return pad(pad(cumulative, (1, 0), value=0.0), (0, 1), value=1.0).diff(dim=1)
