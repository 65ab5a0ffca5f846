"""Advantages of single tokens: the KL of a token counts for it and for the tokens before it, not for those after.

Shapes: N answers, T longest answer. A penalty of beta * k1 in the reward with reward-to-go gives the exact gradient of
the KL of whole answers. The penalty of the token alone does not: it misses how an early token changes what comes later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training_core.ops import normalising
from training_core.ops.advantages_common import Advantages, EstimatorInputs, Scored, scored
from training_core.ops.returns import discounted_reward_to_go, finite_or_zero, generalised_advantages, token_rewards


def reinforce_plus_plus(inputs: EstimatorInputs, discount: float) -> Advantages:
    """Compute REINFORCE++'s advantages: reward-to-go, whitened over all tokens of the step.

    G_t = sum over tokens s >= t of discount^(s - t) * r_s, where r is minus the KL penalty, plus the score on the last
    token; A = (G - mean) / (std + 1e-6), over all tokens of answers with a score.

    Special cases:
        discount = 1, no KL: the whitened scores, each as often as its answer has tokens; for answers of one token the
        whitened scores. All scores equal then: exactly 0. Groups play no part but in the counts. An answer without a
        score or without a token: 0, counted, and in no statistic.

    Args:
        inputs: the step's answers; `values` and `baseline_scores` are not used.
        discount: in [0, 1]; 1 as in the paper.

    Returns:
        Advantages, without unit.

    Gradient:
        None; inputs are detached. Before whitening the policy gradient is unbiased; the mean and the spread are those
        of the step itself, which adds a bias that falls with the number of answers.

    Raises:
        ValueError: a present score or a KL penalty that counts is not finite, or the discount is out of range.

    Source:
        Hu et al. 2025, "REINFORCE++", section 3, arXiv 2501.03262.

    Example:
        >>> scores, mask = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, 1, dtype=torch.bool)
        >>> inputs = EstimatorInputs(scores, mask[:, 0], torch.tensor([0, 1, 2]), mask, None)
        >>> [round(x, 4) for x in reinforce_plus_plus(inputs, discount=1.0).advantages[:, 0].tolist()]
        [-1.0, 0.0, 1.0]
    """
    answers = scored(inputs)
    returns = discounted_reward_to_go(_token_rewards(answers), answers.mask, discount)
    return answers.result(normalising.whiten(returns, answers.mask))


def reinforce_plus_plus_baseline(inputs: EstimatorInputs, discount: float) -> Advantages:
    """Compute the baseline form of REINFORCE++: group mean off the score first, then whitening over the step.

    B_t = score_i - mean(group) - sum over tokens s >= t of discount^(s - t) * penalty_s; A = (B - mean) / (std + 1e-6),
    over all tokens of answers that have a score and another answer to compare with.

    The discount acts on the KL only: the comparison is between whole answers, and discounting a difference to the
    group's mean by the number of tokens to come would make the baseline depend on those tokens.

    Special cases:
        No KL and the scores of each group equal: exactly 0. No KL, answers of one token, one group: the whitened
        scores. A group of equal scores beside others: minus the mean over the step, which is 0 when answers are equally
        long. A group of one has no baseline: 0, counted, and in no statistic; so has an answer without a score or
        without a token.

    Args:
        inputs: the step's answers; `values` and `baseline_scores` are not used.
        discount: in [0, 1], of the KL penalties.

    Returns:
        Advantages, without unit.

    Gradient:
        None; inputs are detached.

    Raises:
        ValueError: a present score or a KL penalty that counts is not finite, or the discount is out of range.

    Source:
        Hu et al. 2025, "REINFORCE++", section 3 (baseline), arXiv 2501.03262.

    Example:
        >>> scores, mask = torch.tensor([1.0, 3.0, 7.0, 9.0]), torch.ones(4, 1, dtype=torch.bool)
        >>> inputs = EstimatorInputs(scores, mask[:, 0], torch.tensor([0, 0, 1, 1]), mask, None)
        >>> [round(x, 3) for x in reinforce_plus_plus_baseline(inputs, discount=1.0).advantages[:, 0].tolist()]
        [-0.866, 0.866, -0.866, 0.866]
    """
    answers = scored(inputs)
    compared = answers.mask & (answers.groups.sizes > 1)[answers.groups.rows][:, None]
    estimate = answers.spread(answers.groups.centred(answers.scores)) - _penalty_to_go(answers, discount)
    return answers.result(normalising.whiten(estimate, compared))


def remax(inputs: EstimatorInputs, discount: float) -> Advantages:
    """Compute ReMax's advantages: the score against that of the greedy answer to the same prompt.

    A_t = score_i - baseline_i - sum over tokens s >= t of discount^(s - t) * penalty_s.

    The discount acts on the KL only, as in `reinforce_plus_plus_baseline`.

    Special cases:
        Score equal to the baseline, no KL: exactly 0. discount = 1: reward-to-go minus the baseline. Groups play no
        part but in the counts. An answer whose baseline is missing (NaN) counts as without a score: 0, and counted; so
        does an answer without a token.

    Args:
        inputs: the step's answers with `baseline_scores`; `values` is not used.
        discount: in [0, 1], of the KL penalties.

    Returns:
        Advantages, reward units.

    Gradient:
        None; inputs are detached. The policy gradient with it is unbiased: the greedy answer does not depend on the one
        that was sampled.

    Raises:
        ValueError: no baseline scores, one that is infinite, a present score or a KL penalty that counts is not finite,
            or the discount is out of range.

    Source:
        Li et al. 2024, "ReMax", algorithm 1, arXiv 2310.10505.

    Example:
        >>> mask, scores, greedy = torch.ones(2, 1) > 0, torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0])
        >>> inputs = EstimatorInputs(scores, mask[:, 0], torch.tensor([0, 1]), mask, None, baseline_scores=greedy)
        >>> remax(inputs, discount=1.0).advantages[:, 0].tolist()
        [-1.0, 1.0]
    """
    if inputs.baseline_scores is None:
        raise ValueError("remax needs baseline_scores: the score of the greedy answer to each prompt")
    has_baseline = ~inputs.baseline_scores.isnan()
    answers = scored(inputs, also=has_baseline)
    baseline = finite_or_zero(inputs.baseline_scores, has_baseline, "a baseline score")
    estimate = answers.spread(answers.scores - baseline) - _penalty_to_go(answers, discount)
    return answers.result(estimate)


def gae(inputs: EstimatorInputs, discount: float, smoothing: float, whiten: bool) -> Advantages:
    """Compute PPO's advantages with a critic, and the critic's targets.

    delta_t = r_t + discount * V_next - V_t; A_t = delta_t + discount * smoothing * A_next, where r is minus the KL
    penalty, plus the score on the last token; then, if asked, whitened over all tokens of answers with a score.

    The critic's targets are A_t + V_t before whitening; see `generalised_advantages`.

    Special cases:
        smoothing = 1: reward-to-go minus value. Values of 0, discount and smoothing 1, whitened: `reinforce_plus_plus`.
        Groups play no part but in the counts. An answer without a score or without a token: 0, counted, and in no
        statistic; it must not count in the critic's loss either, as its target is 0 too.

    Args:
        inputs: the step's answers with `values`; `baseline_scores` is not used.
        discount: gamma, in [0, 1].
        smoothing: lambda, in [0, 1].
        whiten: whether to whiten the advantages.

    Returns:
        Advantages (without unit when whitened, else reward units) and `returns`.

    Gradient:
        None; inputs are detached. With smoothing 1 and discount 1, not whitened, the policy gradient is unbiased for
        any critic.

    Raises:
        ValueError: no values, or a present score, a KL penalty or a value that counts is not finite, or discount or
            smoothing is out of range.

    Source:
        Schulman et al. 2016, equation 16, arXiv 1506.02438; Ouyang et al. 2022, appendix C, arXiv 2203.02155.

    Example:
        >>> mask, scores = torch.ones(1, 2, dtype=torch.bool), torch.tensor([1.0])
        >>> inputs = EstimatorInputs(scores, mask[:, 0], torch.tensor([0]), mask, None, values=0.5 * mask)
        >>> result = gae(inputs, discount=1.0, smoothing=1.0, whiten=False)
        >>> result.advantages.tolist(), result.returns.tolist()
        ([[0.5, 0.5]], [[1.0, 1.0]])
    """
    if inputs.values is None:
        raise ValueError("gae needs values: the critic's value of the state before each token")
    answers = scored(inputs)
    values = finite_or_zero(inputs.values, answers.mask, "a value")
    advantages, returns = generalised_advantages(_token_rewards(answers), values, answers.mask, discount, smoothing)
    return answers.result(normalising.whiten(advantages, answers.mask) if whiten else advantages, returns)


def _token_rewards(answers: Scored) -> Tensor:
    """Return [N, T] token rewards of the answers that count."""
    return token_rewards(answers.scores, answers.counted, answers.mask, answers.inputs.kl_penalties)


def _penalty_to_go(answers: Scored, discount: float) -> Tensor:
    """Return [N, T]: the discounted KL penalties from each token on; 0 without KL."""
    penalties = answers.penalties()
    if penalties is None:
        penalties = torch.zeros(answers.mask.shape, dtype=torch.float64, device=answers.mask.device)
    return discounted_reward_to_go(penalties, answers.mask, discount)
