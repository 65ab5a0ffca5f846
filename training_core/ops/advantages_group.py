"""Advantages of whole answers, each compared with the other answers to the same prompt.

Every token of an answer gets the answer's advantage. Shapes: N answers, T longest answer, G groups.
"""

from __future__ import annotations

from torch import Tensor

from training_core.ops.advantages_common import Advantages, EstimatorInputs, Groups, scored
from training_core.ops.normalising import STD_EPSILON


def group_normalised(inputs: EstimatorInputs) -> Advantages:
    """Compute GRPO's advantages: the score against the group's mean, in units of the group's spread.

    A_i = (score_i - mean(group)) / (std(group) + 1e-6) - (K_i - mean_K(group)), where K_i is the sum of the answer's KL
    penalties and std has n - 1 degrees of freedom.

    The KL is subtracted after the division: divided as well, it would count without bound in a group whose scores
    hardly differ, and its coefficient would cancel where they are equal.

    Special cases:
        All scores of a group equal: exactly 0 without KL, else minus the centred KL. A group of one: 0, and counted. An
        answer without a score or without a token: 0, counted, and the others are as if it were not there. The
        advantages of a group, one an answer, sum to 0.

    Args:
        inputs: the step's answers; `values` and `baseline_scores` are not used.

    Returns:
        Advantages, the same at every token of an answer; without unit.

    Gradient:
        None; inputs are detached.

    Raises:
        ValueError: a present score, or a KL penalty of a token that counts, is not finite.

    Source:
        Shao et al. 2024, "DeepSeekMath", section 4.1.2, arXiv 2402.03300.

    Example:
        >>> import torch
        >>> scores, mask = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, 1, dtype=torch.bool)
        >>> result = group_normalised(EstimatorInputs(scores, mask[:, 0], torch.tensor([4, 4, 4]), mask, None))
        >>> [round(x, 4) for x in result.advantages[:, 0].tolist()]
        [-1.0, 0.0, 1.0]
    """
    answers = scored(inputs)
    rows = _relative(answers.scores, answers.penalty_sums(), answers.groups, divide_by_std=True)
    return answers.result(answers.spread(rows))


def group_centred(inputs: EstimatorInputs) -> Advantages:
    """Compute Dr. GRPO's advantages: the score against the group's mean.

    A_i = R_i - mean(group), where R_i is the score minus the sum of the answer's KL penalties.

    Special cases:
        As `group_normalised`. Over all groups of n independent answers the gradient that it gives is (n - 1) / n of the
        exact one, because an answer is compared with a mean that it is part of.

    Args:
        inputs: the step's answers; `values` and `baseline_scores` are not used.

    Returns:
        Advantages, the same at every token of an answer; reward units.

    Gradient:
        None; inputs are detached.

    Raises:
        ValueError: a present score, or a KL penalty of a token that counts, is not finite.

    Source:
        Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3, arXiv 2503.20783.

    Example:
        >>> import torch
        >>> scores, mask = torch.tensor([1.0, 2.0, 6.0]), torch.ones(3, 1, dtype=torch.bool)
        >>> result = group_centred(EstimatorInputs(scores, mask[:, 0], torch.tensor([4, 4, 4]), mask, None))
        >>> result.advantages[:, 0].tolist()
        [-2.0, -1.0, 3.0]
    """
    answers = scored(inputs)
    rows = _relative(answers.scores, answers.penalty_sums(), answers.groups, divide_by_std=False)
    return answers.result(answers.spread(rows))


def leave_one_out(inputs: EstimatorInputs) -> Advantages:
    """Compute RLOO's advantages: an answer against the mean of the others.

    A_i = R_i - mean of R_j over the other answers j of the group, where R_i is the score minus the sum of the answer's
    KL penalties.

    Special cases:
        Equals n / (n - 1) times `group_centred` in a group of n scored answers; so equal scores without KL give exactly
        0, a group of one 0 (counted), and an answer without a score or without a token 0 (counted), the others as if it
        were not there.

    Args:
        inputs: the step's answers; `values` and `baseline_scores` are not used.

    Returns:
        Advantages, the same at every token of an answer; reward units.

    Gradient:
        None; inputs are detached. The policy gradient with it is unbiased for E[score] - sum of the expected penalties:
        the exact gradient of E[score] - beta * KL(policy || reference) when the penalties are beta * k1.

    Raises:
        ValueError: a present score, or a KL penalty of a token that counts, is not finite.

    Source:
        Ahmadian et al. 2024, "Back to Basics" (the RLOO estimator), arXiv 2402.14740; Kool et al. 2019, "Buy 4
        REINFORCE Samples, Get a Baseline for Free!".

    Example:
        >>> import torch
        >>> scores, mask = torch.tensor([1.0, 2.0, 6.0]), torch.ones(3, 1, dtype=torch.bool)
        >>> result = leave_one_out(EstimatorInputs(scores, mask[:, 0], torch.tensor([4, 4, 4]), mask, None))
        >>> result.advantages[:, 0].tolist()
        [-3.0, -1.5, 4.5]
    """
    answers = scored(inputs)
    rows = _relative(answers.scores, answers.penalty_sums(), answers.groups, divide_by_std=False)
    sizes = answers.groups.sizes
    factor = sizes / (sizes - 1.0).clamp(min=1.0)
    return answers.result(answers.spread(rows * factor[answers.groups.rows]))


def _relative(scores: Tensor, penalties: Tensor | None, groups: Groups, *, divide_by_std: bool) -> Tensor:
    """Return [answers]: centred scores, divided if asked, minus the centred penalties."""
    centred = groups.centred(scores)
    if divide_by_std:
        centred = centred / (groups.std(centred) + STD_EPSILON)[groups.rows]
    return centred if penalties is None else centred - groups.centred(penalties)
