"""Policy losses on the ratio of whole answers. Same signature as the token-level ones in ops/policy_losses.py.

A row must be a whole answer: its ratio needs all of its tokens. The loss has a value at every token of the row, so that
the same aggregations work; each docstring says which one gives the published objective.

Shapes: B rows (whole answers), T answer tokens.
"""

from __future__ import annotations

from torch import Tensor

from training_core.ops.masking import masked_fill_zero
from training_core.ops.ratios import (
    answer_log_ratios,
    check_clip_bounds,
    clipped_objective,
    token_advantages,
    token_log_ratios,
)


def sequence_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Compute the clipped surrogate on the ratio of the whole answer.

    ratio_i = exp(sum_t (logprobs - old_logprobs)); at every token of the row,
    loss = max(-A * ratio_i, -A * clip(ratio_i, 1 - clip_low, 1 + clip_high)).

    Aggregated by `sequence_mean_token_mean` and with one advantage an answer this is the mean over answers of the
    clipped loss of each, as RLOO trainers do it. It is the exact importance weight of an answer; its variance grows
    with the answer's length, which `gspo` trades for a bias.

    Special cases:
        One token: equals `clipped_surrogate`. All ratios 1: the value is -A, and after `sequence_mean_token_mean` the
        gradient is that of -A * (sum of the answer's logprobs), averaged over answers.

    Args:
        logprobs: [batch, time] of the policy that is trained, nats.
        old_logprobs: [batch, time] of the policy that sampled, nats.
        advantages: [batch, time] or [batch, 1], without unit; one an answer, the same at each of its tokens.
        mask: [batch, time] bool; the other tensors may hold anything where it is false.
        clip_low: bound below the ratio 1, in (0, 1).
        clip_high: bound above the ratio 1, above 0.

    Returns:
        (loss, is_clipped), each [batch, time]: 0 and false at masked positions. `is_clipped` marks the tokens of a
        clipped answer; it passes no gradient.

    Gradient:
        To `logprobs` only; a token's loss has a gradient to every token of its row.

    Raises:
        ValueError: clip bounds out of range.

    Source:
        Ahmadian et al. 2024, RLOO, arXiv 2402.14740 (answers as single actions, section 3), with the clip of Schulman
        et al. 2017, equation 7, arXiv 1707.06347.

    Example:
        >>> import torch
        >>> logprobs, mask = torch.full((1, 2), 0.5), torch.ones(1, 2, dtype=torch.bool)
        >>> loss, _ = sequence_surrogate(logprobs, 0 * logprobs, -mask.float(), mask, clip_low=0.2, clip_high=0.2)
        >>> loss.round(decimals=4).tolist()
        [[2.7183, 2.7183]]
    """
    check_clip_bounds(clip_low, clip_high)
    log_ratios = answer_log_ratios(token_log_ratios(logprobs, old_logprobs, mask), mask, per_token=False)
    weight = token_advantages(advantages, mask)
    return clipped_objective(log_ratios, weight, mask, clip_low=clip_low, clip_high=clip_high)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Compute GSPO's loss: the clipped surrogate on the geometric mean of an answer's token ratios.

    s_i = exp(mean_t (logprobs - old_logprobs)); at every token of the row,
    loss = max(-A * s_i, -A * clip(s_i, 1 - clip_low, 1 + clip_high)).

    Aggregated by `sequence_mean_token_mean` and with one advantage an answer this is the paper's objective; another
    aggregation gives longer answers more weight. The gradient goes through the mean.

    Special cases:
        One token: equals `clipped_surrogate`. All ratios 1: the value is -A, and after `sequence_mean_token_mean` the
        gradient is that of -A * logprobs (REINFORCE). One advantage an answer: value, clipping and, after
        `sequence_mean_token_mean`, gradient of `gspo_token`.

    Args:
        logprobs: [batch, time] of the policy that is trained, nats.
        old_logprobs: [batch, time] of the policy that sampled, nats.
        advantages: [batch, time] or [batch, 1], without unit; one an answer, the same at each of its tokens. Take
            `gspo_token` when they differ.
        mask: [batch, time] bool; the other tensors may hold anything where it is false.
        clip_low: bound below the ratio 1, in (0, 1). Far smaller than PPO's: the paper takes 3e-4.
        clip_high: bound above the ratio 1, above 0. The paper takes 4e-4.

    Returns:
        (loss, is_clipped), each [batch, time]: 0 and false at masked positions. `is_clipped` marks the tokens of a
        clipped answer; it passes no gradient.

    Gradient:
        To `logprobs` only; a token's loss has a gradient to every token of its row.

    Raises:
        ValueError: clip bounds out of range.

    Source:
        Zheng et al. 2025, "Group Sequence Policy Optimization", equations 5 to 7, arXiv 2507.18071.

    Example:
        >>> import torch
        >>> logprobs, mask = torch.tensor([[0.5, -0.3]]), torch.ones(1, 2, dtype=torch.bool)
        >>> loss, clipped = gspo(logprobs, 0 * logprobs, mask.float(), mask, clip_low=0.2, clip_high=0.2)
        >>> loss.round(decimals=4).tolist(), clipped.any().item()
        ([[-1.1052, -1.1052]], False)
    """
    check_clip_bounds(clip_low, clip_high)
    log_ratios = answer_log_ratios(token_log_ratios(logprobs, old_logprobs, mask), mask, per_token=True)
    weight = token_advantages(advantages, mask)
    return clipped_objective(log_ratios, weight, mask, clip_low=clip_low, clip_high=clip_high)


def gspo_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Compute GSPO-token's loss: the answer's ratio as value, each token its own gradient and advantage.

    s_{i,t} = sg(s_i) * exp(logprobs - sg(logprobs)) with s_i as in `gspo` and sg for "no gradient";
    loss = max(-A_t * s_{i,t}, -A_t * clip(s_{i,t}, 1 - clip_low, 1 + clip_high)).

    Special cases:
        One token: equals `clipped_surrogate`. All ratios 1: the value is -A_t and the gradient that of -A_t * logprobs
        (REINFORCE), whatever the aggregation. One advantage an answer: see `gspo`.

    Args:
        logprobs: [batch, time] of the policy that is trained, nats.
        old_logprobs: [batch, time] of the policy that sampled, nats.
        advantages: [batch, time] or [batch, 1], without unit; may differ between the tokens of an answer.
        mask: [batch, time] bool; the other tensors may hold anything where it is false.
        clip_low: bound below the ratio 1, in (0, 1).
        clip_high: bound above the ratio 1, above 0.

    Returns:
        (loss, is_clipped), each [batch, time]: 0 and false at masked positions. `is_clipped` marks tokens whose loss is
        a bound, so that they pass no gradient.

    Gradient:
        To `logprobs` only, each token to itself.

    Raises:
        ValueError: clip bounds out of range.

    Source:
        Zheng et al. 2025, "Group Sequence Policy Optimization", equations 13 and 14, arXiv 2507.18071.

    Example:
        >>> import torch
        >>> logprobs, mask = torch.tensor([[0.5, -0.3]]), torch.ones(1, 2, dtype=torch.bool)
        >>> advantages = torch.tensor([[1.0, 2.0]])
        >>> loss, _ = gspo_token(logprobs, 0 * logprobs, advantages, mask, clip_low=0.2, clip_high=0.2)
        >>> loss.round(decimals=4).tolist()
        [[-1.1052, -2.2103]]
    """
    check_clip_bounds(clip_low, clip_high)
    answer = answer_log_ratios(token_log_ratios(logprobs, old_logprobs, mask), mask, per_token=True).detach()
    policy = masked_fill_zero(logprobs, mask)
    weight = token_advantages(advantages, mask)
    # The difference is 0 in value and carries the token's gradient.
    return clipped_objective(answer + (policy - policy.detach()), weight, mask, clip_low=clip_low, clip_high=clip_high)
