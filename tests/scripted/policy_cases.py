"""Every policy loss, KL term and aggregation with knobs, and a small batch to cut, pad and reorder."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from training_core.ops import aggregation, kl, policy_losses
from training_core.ops.masking import lengths_to_mask, masked_fill_zero

PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

LOSSES: dict[str, PolicyLoss] = {
    "clipped_surrogate": functools.partial(policy_losses.clipped_surrogate, clip_low=0.2, clip_high=0.28),
    "dual_clip": functools.partial(policy_losses.clipped_surrogate, clip_low=0.2, clip_high=0.28, dual_clip=1.1),
    "reinforce": policy_losses.reinforce,
    "importance_weighted": policy_losses.importance_weighted,
    "sequence_surrogate": functools.partial(policy_losses.sequence_surrogate, clip_low=0.3, clip_high=0.3),
    "gspo": functools.partial(policy_losses.gspo, clip_low=0.1, clip_high=0.05),
    "gspo_token": functools.partial(policy_losses.gspo_token, clip_low=0.1, clip_high=0.05),
    "cispo": functools.partial(policy_losses.cispo, clip_low=0.2, clip_high=0.28),
    "cispo_without_lower_bound": functools.partial(policy_losses.cispo, clip_low=None, clip_high=0.28),
    "sapo": policy_losses.sapo,
}
WITH_A_RATIO = [name for name in LOSSES if name not in ("reinforce", "cispo", "cispo_without_lower_bound")]

KL_TERMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k2": lambda log_ratio, importance: kl.k2(log_ratio),
    "k3": lambda log_ratio, importance: kl.k3(log_ratio),
    "abs": lambda log_ratio, importance: kl.absolute(log_ratio),
    "k3_straight_through": lambda log_ratio, importance: kl.k3_straight_through(log_ratio),
    "k1_ratio": kl.k1_with_ratio,
    "k3_ratio": kl.k3_with_ratio,
}

AGGREGATIONS: dict[str, Callable[..., Tensor]] = {
    "token_mean": aggregation.token_mean_weights,
    "sequence_mean_token_mean": aggregation.sequence_mean_token_mean_weights,
    "sequence_mean_token_sum": aggregation.sequence_mean_token_sum_weights,
    "constant": functools.partial(aggregation.constant_weights, num_tokens=7),
    "batch_mean": aggregation.batch_mean_weights,
    "prompt_mean": aggregation.prompt_mean_weights,
}


class Batch:
    """Answers of different lengths, with what a loss needs; masked positions hold `fill`."""

    def __init__(
        self, lengths: Sequence[int] = (5, 2, 4, 0, 1, 3), seed: int = 3, drift: float = 0.3, fill: float = math.nan
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.fill = fill
        self.num_rows, self.num_columns = len(lengths), max(*lengths, 1)
        shape = (self.num_rows, self.num_columns)
        self.mask = lengths_to_mask(torch.tensor(lengths), self.num_columns)
        self.group_ids = torch.arange(self.num_rows) // 2
        self.parameter = random(*shape) - 2.0
        self.old = self.holed(self.parameter + drift * random(*shape))
        self.reference = self.holed(self.parameter + 0.5 * random(*shape))
        self.advantages = self.holed(random(self.num_rows, 1).expand(shape))
        self.token_advantages = self.holed(random(*shape))

    def holed(self, values: Tensor) -> Tensor:
        return torch.where(self.mask, values, self.fill)

    def gradient(
        self,
        loss: PolicyLoss,
        weights: Tensor,
        *,
        term: Callable[[Tensor, Tensor], Tensor] | None = None,
        splits: Sequence[Sequence[int]] | None = None,
        padding: tuple[int, int] = (0, 0),
    ) -> tuple[float, Tensor]:
        """Return (loss, gradient) of the whole step, its rows cut into micro-batches and padded left and right."""
        parameter = self.parameter.clone().requires_grad_(True)
        total = 0.0
        for rows in splits or [range(self.num_rows)]:
            part = self.part(loss, parameter, list(rows), weights, term, padding)
            part.backward()
            total += part.item()
        assert parameter.grad is not None
        return total, parameter.grad

    def part(
        self,
        loss: PolicyLoss,
        parameter: Tensor,
        rows: list[int],
        weights: Tensor,
        term: Callable[[Tensor, Tensor], Tensor] | None,
        padding: tuple[int, int],
    ) -> Tensor:
        def cut(values: Tensor, fill: Any = self.fill) -> Tensor:
            return torch.nn.functional.pad(values[rows], padding, value=fill)

        mask = cut(self.mask, False)
        logprobs = torch.where(mask, cut(parameter), self.fill)
        losses, is_clipped = loss(logprobs, cut(self.old), cut(self.advantages), mask)
        assert not (is_clipped & ~mask).any()
        if term is not None:
            log_ratio = masked_fill_zero(logprobs - cut(self.reference), mask)
            losses = losses + 0.1 * term(log_ratio, masked_fill_zero(logprobs - cut(self.old), mask))
        return aggregation.weighted_sum(losses, cut(weights), mask)
