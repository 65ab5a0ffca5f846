"""What a step of reward-model training minimises: pairs, ratings or ordered levels, one loss an item.

An objective names its items by number and reads their tokens when they are needed. Its losses are summed and divided by
the number of items of the whole optimizer step, so a step's gradient does not depend on how the items are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from training_core.config.reward_model import BradleyTerryLoss, OrdinalLoss, RegressionLoss
from training_core.data.tables import FeedbackTable, PairTable
from training_core.errors import DataError
from training_core.metrics import MetricSums
from training_core.ops.reward_losses import (
    bradley_terry,
    centring,
    ordered_thresholds,
    ordinal,
    squared_error,
    threshold_parameters,
)
from training_core.reward_modelling.data import Floats, pair_margins, present_rows, rating_targets
from training_core.reward_modelling.ratings import LinearScale, OrdinalScale, level_indices


class Objective(Protocol):
    """One kind of loss over one set of items."""

    lengths: Sequence[int]
    """Tokens of each item's longest sequence."""
    sequences_per_item: int
    parameters: dict[str, nn.Parameter]
    """What is learned besides the reward model."""

    def sequences(self, items: Sequence[int]) -> list[list[int]]:
        """Return the token ids that the losses of these items need scores of."""
        ...

    def losses(self, scores: Tensor, items: Sequence[int], sums: MetricSums) -> Tensor:
        """Return one loss an item [items] from the scores of `sequences(items)`, and add the step's metrics."""
        ...

    def report(self) -> dict[str, Any]:
        """Return counts and learned numbers, as JSON."""
        ...


class PairObjective:
    """Bradley-Terry over pairs, with a margin and a centring penalty where the config says so."""

    sequences_per_item = 2

    def __init__(self, table: PairTable, loss: BradleyTerryLoss) -> None:
        self.table = table
        self.loss = loss
        self.lengths: Sequence[int] = table.lengths  # type: ignore[assignment]
        self.margins = pair_margins(table, loss)
        self.parameters: dict[str, nn.Parameter] = {}

    def sequences(self, items: Sequence[int]) -> list[list[int]]:
        """Return the chosen answers and after them the rejected ones."""
        return [column[item] for column in (self.table.chosen, self.table.rejected) for item in items]

    def losses(self, scores: Tensor, items: Sequence[int], sums: MetricSums) -> Tensor:
        chosen, rejected = scores.chunk(2)
        losses = bradley_terry(chosen, rejected, margin=self._margins(scores, items, sums))
        if self.loss.centring_coefficient > 0.0:
            penalty = centring(chosen, rejected)
            losses = losses + self.loss.centring_coefficient * penalty
            sums.add("train/centring_mean", total(penalty), len(items))
        add_pair_metrics(sums, losses, chosen, rejected)
        return losses

    def _margins(self, scores: Tensor, items: Sequence[int], sums: MetricSums) -> Tensor | None:
        if self.margins is None:
            return None
        margins = torch.from_numpy(self.margins[list(items)]).to(scores)
        present = ~torch.isnan(margins)
        # How much better the chosen answer is, is not known here: the plain loss asks no more than that it is better.
        margins = torch.where(present, margins, torch.zeros_like(margins))
        num_present = int(present.sum())
        sums.add("train/data_margin_mean", total(margins), num_present)
        sums.add("train/missing_margin_fraction", len(items) - num_present, len(items))
        return margins

    def report(self) -> dict[str, Any]:
        counts: dict[str, Any] = {"num_train_pairs": len(self.table)}
        if self.margins is not None:
            counts["num_pairs_without_margin"] = int(np.isnan(self.margins).sum())
            counts["num_pairs_with_negative_margin"] = int((self.margins < 0).sum())
        return counts


class _RatedRows:
    """The rows of a feedback table that have a target; items are numbered over these."""

    sequences_per_item = 1

    def __init__(self, table: FeedbackTable, target: str) -> None:
        targets = rating_targets(table, target)
        self.table = table
        self.rows: NDArray[np.int64] = present_rows(targets)
        self.ratings: Floats = targets[self.rows]
        self.lengths: Sequence[int] = table.lengths[self.rows]  # type: ignore[assignment]

    def sequences(self, items: Sequence[int]) -> list[list[int]]:
        return [self.table.ids[int(self.rows[item])] for item in items]

    def counts(self) -> dict[str, Any]:
        return {
            "num_train_rows": len(self.rows),
            "num_rows_without_target": len(self.table) - len(self.rows),
        }


class RegressionObjective(_RatedRows):
    """The squared error of the rating, in standard deviations of the training ratings unless the config says not."""

    def __init__(self, table: FeedbackTable, loss: RegressionLoss) -> None:
        super().__init__(table, loss.target)
        self.scale = LinearScale.of(self.ratings, standardise=loss.standardise)
        self.targets = self.scale.to_targets(self.ratings)
        self.parameters: dict[str, nn.Parameter] = {}

    def losses(self, scores: Tensor, items: Sequence[int], sums: MetricSums) -> Tensor:
        targets = torch.from_numpy(self.targets[list(items)]).to(scores)
        losses = squared_error(scores, targets)
        sums.add("train/loss", total(losses), len(items))
        sums.add("train/score_mean", total(scores), len(items))
        sums.add("train/target_mean", total(targets), len(items))
        return losses

    def report(self) -> dict[str, Any]:
        return {**self.counts(), **self.scale.to_json()}


class OrdinalObjective(_RatedRows):
    """The likelihood of ordered levels; the thresholds between them are learned at the head's rate."""

    def __init__(self, table: FeedbackTable, loss: OrdinalLoss, device: torch.device | None = None) -> None:
        super().__init__(table, loss.target)
        self.values = loss.levels
        self.levels = torch.from_numpy(level_indices(self.ratings, loss.levels))
        if self.ratings.min() == self.ratings.max():
            raise DataError(
                f"all {len(self.levels)} training ratings are {self.ratings[0]:g}: nothing can be learned from them. "
                "Give rows with different ratings"
            )
        first, widths = threshold_parameters(torch.bincount(self.levels, minlength=len(loss.levels)))
        self.first, self.widths = (nn.Parameter(value.float().to(device)) for value in (first, widths))
        self.parameters = {"first": self.first, **({"widths": self.widths} if len(widths) else {})}

    def losses(self, scores: Tensor, items: Sequence[int], sums: MetricSums) -> Tensor:
        levels = self.levels[list(items)].to(scores.device)
        thresholds = ordered_thresholds(self.first, self.widths)
        losses = ordinal(scores, levels, thresholds)
        # The median level: each threshold below the score is one that the level more probably exceeds than not.
        guessed = (scores.detach()[:, None] > thresholds.detach()[None, :]).sum(dim=1)
        sums.add("train/loss", total(losses), len(items))
        sums.add("train/score_mean", total(scores), len(items))
        sums.add("train/level_accuracy", total(guessed == levels), len(items))
        return losses

    def report(self) -> dict[str, Any]:
        thresholds = ordered_thresholds(self.first.detach(), self.widths.detach()).tolist()
        return {**self.counts(), **OrdinalScale(tuple(self.values), tuple(thresholds)).to_json()}


def make_objective(
    loss: BradleyTerryLoss | RegressionLoss | OrdinalLoss,
    table: PairTable | FeedbackTable,
    device: torch.device | None = None,
) -> PairObjective | RegressionObjective | OrdinalObjective:
    """Return the objective that the config names.

    Args:
        loss: from the config.
        table: the training rows.
        device: where scores will be; what the objective learns itself lies there too. Default: the CPU.

    Raises:
        DataError: the rows have nothing that it could learn from.
        TypeError: the table holds the other kind of rows.
    """
    if isinstance(loss, BradleyTerryLoss) and isinstance(table, PairTable):
        return PairObjective(table, loss)
    if isinstance(loss, RegressionLoss) and isinstance(table, FeedbackTable):
        return RegressionObjective(table, loss)
    if isinstance(loss, OrdinalLoss) and isinstance(table, FeedbackTable):
        return OrdinalObjective(table, loss, device)
    raise TypeError(f"the loss {loss.kind} is not for a {type(table).__name__}")


def total(values: Tensor) -> float:
    return float(values.detach().double().sum().item())


def add_pair_metrics(sums: MetricSums, losses: Tensor, chosen: Tensor, rejected: Tensor) -> None:
    """Add one micro-batch's pairs to the step's metrics; all tensors are [pairs], a tie counts half as right."""
    margins = (chosen - rejected).detach().double()
    right = (margins > 0).double() + 0.5 * (margins == 0).double()
    values = {
        "train/loss": losses,
        "train/accuracy": right,
        "train/margin_mean": margins,
        "train/chosen_score_mean": chosen,
        "train/rejected_score_mean": rejected,
    }
    for name, tensor in values.items():
        sums.add(name, total(tensor), len(losses))
