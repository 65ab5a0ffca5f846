"""How token losses become one number: L = sum over tokens of w * loss.

The weights w are computed once for a whole optimizer step from its mask. Every micro-batch adds its own part of the
sum, so gradients do not depend on how rows are split, padded or ordered. Over several ranks each computes the weights
of its own rows, and `all_sum` adds up what is counted: the parts of all ranks then add up to the step's loss.

All have one signature: (mask, group_ids, *, all_sum, num_groups, **knobs) -> weights; most read only a part of it.

Shapes: B rows (answers) of the whole optimizer step on this rank, one row an answer; T answer tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from training_core.ops.masking import check_mask, masked_fill_zero

AllSum = Callable[[Tensor], Tensor]
"""Returns the elementwise sum of a tensor over all ranks; each of them must call it, with a tensor of one shape."""


def keep(counts: Tensor) -> Tensor:
    """Return the counts as they are: the `all_sum` of a single rank."""
    return counts


def token_mean_weights(
    mask: Tensor, group_ids: Tensor | None = None, *, all_sum: AllSum = keep, num_groups: int | None = None
) -> Tensor:
    """Weigh every token of the step the same. More weight: long answers, by their length.

    w = 1 / (number of tokens of the step).

    Special cases:
        All rows of one length: equals `sequence_mean_token_mean_weights`. No token: all weights are 0.

    Args:
        mask: [batch, time] bool over the whole optimizer step.
        group_ids: not read.
        all_sum: adds a tensor of counts up over ranks.
        num_groups: not read.

    Returns:
        [batch, time] float64, summing to 1 (over all ranks); 0 at masked positions.

    Source:
        Yu et al. 2025, DAPO, equation 12, arXiv 2503.14476.

    Example:
        >>> token_mean_weights(torch.tensor([[True, True], [True, False]])).sum().item()
        1.0
    """
    lengths = _row_lengths(mask)
    num_tokens = all_sum(lengths.sum())
    return _spread(torch.ones_like(lengths) / num_tokens.clamp(min=1.0), mask)


def sequence_mean_token_mean_weights(
    mask: Tensor, group_ids: Tensor | None = None, *, all_sum: AllSum = keep, num_groups: int | None = None
) -> Tensor:
    """Weigh every answer the same, and every token within it. More weight: each token of a short answer.

    w = 1 / (rows with a token * tokens of the row).

    Special cases:
        Rows without a token do not count. No token at all: all weights are 0.

    Args:
        mask: [batch, time] bool over the whole optimizer step.
        group_ids: not read.
        all_sum: adds a tensor of counts up over ranks.
        num_groups: not read.

    Returns:
        [batch, time] float64, summing to 1 (over all ranks); 0 at masked positions.

    Source:
        Shao et al. 2024, equation 3, arXiv 2402.03300.

    Example:
        >>> sequence_mean_token_mean_weights(torch.tensor([[True, True], [True, False]])).tolist()
        [[0.25, 0.25], [0.5, 0.0]]
    """
    lengths = _row_lengths(mask)
    return _spread(1.0 / (_rows_with_a_token(lengths, all_sum) * lengths.clamp(min=1.0)), mask)


def batch_mean_weights(
    mask: Tensor, group_ids: Tensor | None = None, *, all_sum: AllSum = keep, num_groups: int | None = None
) -> Tensor:
    """Weigh every answer as one of all answers of the step. More weight: each token of a short answer.

    w = 1 / (rows * tokens of the row).

    A row without a token counts in the number of rows: a step with many answers left out (cut ones, say) moves the
    weights less, where `sequence_mean_token_mean_weights` lets the others make up for them.

    Special cases:
        Every row has a token: equals `sequence_mean_token_mean_weights`. Half of the rows have none: half of that. No
        token at all: all weights are 0.

    Args:
        mask: [batch, time] bool over the whole optimizer step, one row an answer, without rows that only fill up.
        group_ids: not read.
        all_sum: adds a tensor of counts up over ranks.
        num_groups: not read.

    Returns:
        [batch, time] float64, summing to the share of rows with a token; 0 at masked positions.

    Source:
        Shao et al. 2024, equation 3, arXiv 2402.03300, with the number of sampled answers kept as the divisor.

    Example:
        >>> batch_mean_weights(torch.tensor([[True, True], [False, False]])).tolist()
        [[0.25, 0.25], [0.0, 0.0]]
    """
    lengths = _row_lengths(mask)
    num_rows = all_sum(lengths.new_tensor(float(len(lengths)))).clamp(min=1.0)
    return _spread(1.0 / (num_rows * lengths.clamp(min=1.0)), mask)


def sequence_mean_token_sum_weights(
    mask: Tensor, group_ids: Tensor | None = None, *, all_sum: AllSum = keep, num_groups: int | None = None
) -> Tensor:
    """Take the mean over answers of the sum over tokens. More weight: long answers, by their length.

    w = 1 / (rows with a token).

    Special cases:
        Rows without a token do not count. No token at all: all weights are 0.

    Args:
        mask: [batch, time] bool over the whole optimizer step.
        group_ids: not read.
        all_sum: adds a tensor of counts up over ranks.
        num_groups: not read.

    Returns:
        [batch, time] float64; 0 at masked positions.

    Source:
        The policy gradient of whole answers (Williams 1992, REINFORCE).

    Example:
        >>> sequence_mean_token_sum_weights(torch.tensor([[True, True], [True, False]])).tolist()
        [[0.5, 0.5], [0.5, 0.0]]
    """
    lengths = _row_lengths(mask)
    return _spread(torch.ones_like(lengths) / _rows_with_a_token(lengths, all_sum), mask)


def constant_weights(
    mask: Tensor,
    group_ids: Tensor | None = None,
    *,
    num_tokens: int,
    all_sum: AllSum = keep,
    num_groups: int | None = None,
) -> Tensor:
    """Divide the sum over tokens by rows times a constant. More weight: long answers, by their length.

    w = 1 / (rows with a token * num_tokens).

    Special cases:
        Equals `sequence_mean_token_sum_weights` divided by `num_tokens`, and `token_mean_weights` when every row has
        `num_tokens` tokens. No token at all: all weights are 0.

    Args:
        mask: [batch, time] bool over the whole optimizer step.
        group_ids: not read.
        num_tokens: the constant, at least 1, in tokens.
        all_sum: adds a tensor of counts up over ranks.
        num_groups: not read.

    Returns:
        [batch, time] float64; 0 at masked positions.

    Raises:
        ValueError: `num_tokens` is below 1.

    Source:
        Liu et al. 2025, Dr. GRPO, section 3.2, arXiv 2503.20783.

    Example:
        >>> constant_weights(torch.tensor([[True, True]]), num_tokens=4).tolist()
        [[0.25, 0.25]]
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
    return sequence_mean_token_sum_weights(mask, all_sum=all_sum) / num_tokens


def prompt_mean_weights(
    mask: Tensor, group_ids: Tensor | None = None, *, all_sum: AllSum = keep, num_groups: int | None = None
) -> Tensor:
    """Weigh every prompt the same, and every token of its answers. More weight: tokens of tersely answered prompts.

    w = 1 / (prompts with a token * tokens of the prompt's answers).

    Special cases:
        One prompt: equals `token_mean_weights`. One answer a prompt: equals `sequence_mean_token_mean_weights`. Prompts
        without a token do not count. No token at all: all weights are 0.

    Args:
        mask: [batch, time] bool over the whole optimizer step.
        group_ids: [batch] integer, the prompt of each row. On one rank any integers will do.
        all_sum: adds a tensor of counts up over ranks.
        num_groups: number of prompts over all ranks, whose ids are then 0 to num_groups - 1 and mean the same prompt on
            every rank. Needed with an `all_sum`: an answer group may be split over ranks.

    Returns:
        [batch, time] float64, summing to 1 (over all ranks); 0 at masked positions.

    Raises:
        ValueError: no `group_ids`, of another length than the mask's rows, or outside `num_groups`; an `all_sum`
            without `num_groups`.

    Source:
        As the per-prompt objective of Shao et al. 2024, equation 3, arXiv 2402.03300, with the mean over the tokens of
        a prompt's answers in the place of the mean over answers.

    Example:
        >>> mask = torch.tensor([[True, True], [True, False], [True, False]])
        >>> prompt_mean_weights(mask, torch.tensor([7, 7, 3])).sum(dim=1).round(decimals=4).tolist()
        [0.3333, 0.1667, 0.5]
    """
    lengths = _row_lengths(mask)
    groups, size = _dense_groups(group_ids, len(lengths), num_groups, all_sum)
    tokens = all_sum(torch.zeros(size, dtype=torch.float64, device=mask.device).index_add_(0, groups, lengths))
    num_prompts = (tokens > 0).sum().double().clamp(min=1.0)
    return _spread(1.0 / (num_prompts * tokens.clamp(min=1.0)[groups]), mask)


def weighted_sum(losses: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Add up token losses with the step's weights: this micro-batch's part of the step's loss.

    L_part = sum over unmasked tokens of weights * losses.

    Args:
        losses: [batch, time]; may hold anything where the mask is false.
        weights: [batch, time], the rows of the step's weights that belong to this micro-batch.
        mask: [batch, time] bool.

    Returns:
        A scalar of the losses' dtype.

    Gradient:
        To `losses` where the mask is true.

    Example:
        >>> weighted_sum(torch.tensor([[2.0, float("nan")]]), torch.ones(1, 2), torch.tensor([[True, False]])).item()
        2.0
    """
    return (masked_fill_zero(losses, mask) * masked_fill_zero(weights, mask).to(losses.dtype)).sum()


def _row_lengths(mask: Tensor) -> Tensor:
    """Return [batch] float64, the tokens of each row."""
    check_mask(mask)
    return mask.sum(dim=1).double()


def _rows_with_a_token(lengths: Tensor, all_sum: AllSum) -> Tensor:
    """Return how many rows of all ranks have a token, float64, at least 1."""
    return all_sum((lengths > 0).sum().double()).clamp(min=1.0)


def _spread(row_weights: Tensor, mask: Tensor) -> Tensor:
    """Give every unmasked token of a row the row's weight; 0 elsewhere."""
    return masked_fill_zero(row_weights[:, None].expand(mask.shape), mask)


def _dense_groups(
    group_ids: Tensor | None, num_rows: int, num_groups: int | None, all_sum: AllSum
) -> tuple[Tensor, int]:
    """Return (index of each row's group, number of groups)."""
    if group_ids is None or group_ids.shape != (num_rows,):
        found = None if group_ids is None else tuple(group_ids.shape)
        raise ValueError(f"prompt_mean needs group_ids, one integer for each of the {num_rows} rows, got {found}")
    if num_groups is None:
        if all_sum is not keep:
            raise ValueError(
                "prompt_mean over several ranks needs num_groups: a prompt's answers may be on any of them"
            )
        unique, groups = torch.unique(group_ids, return_inverse=True)
        return groups, len(unique)
    if num_rows and not 0 <= int(group_ids.min()) <= int(group_ids.max()) < num_groups:
        raise ValueError(
            f"group_ids must lie in [0, {num_groups}) (num_groups), got {int(group_ids.min())} to "
            f"{int(group_ids.max())}"
        )
    return group_ids.long(), num_groups
