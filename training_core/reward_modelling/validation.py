"""Held-out scores of a reward model, and the proof that a score does not depend on its batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy
import scipy.stats
import torch

from training_core.data.tables import FeedbackTable, PairTable
from training_core.errors import EvaluationError
from training_core.models.heads import RewardModel, score_token_ids

NUM_SELF_TEST_SEQUENCES = 16
MAX_SCORE_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Largest accepted difference of one score between batches by dtype of the backbone, in the unit that the test names.
Measured with 135 M parameters on 16 answers at a time: bfloat16 rounds by up to 0.07 of a standard deviation, and a
mask that is not respected moves some answer by 0.9 or more."""


@dataclass(frozen=True)
class PairScores:
    """Scores of the held-out pairs, in the order of the pairs."""

    chosen: list[float]
    rejected: list[float]

    @property
    def margins(self) -> list[float]:
        return [c - r for c, r in zip(self.chosen, self.rejected, strict=True)]

    @property
    def accuracy(self) -> float:
        """Share of pairs whose chosen answer scores higher; a tie counts half.

        >>> PairScores(chosen=[1.0, 0.0], rejected=[0.0, 0.0]).accuracy
        0.75
        """
        return math.fsum(1.0 if m > 0 else 0.5 if m == 0 else 0.0 for m in self.margins) / len(self.margins)

    @property
    def loss(self) -> float:
        """Mean of −log σ(margin), in nats."""
        return float(numpy.logaddexp(0.0, -numpy.asarray(self.margins)).mean())

    @property
    def chosen_mean(self) -> float:
        return math.fsum(self.chosen) / len(self.chosen)

    @property
    def rejected_mean(self) -> float:
        return math.fsum(self.rejected) / len(self.rejected)

    def summary(self) -> dict[str, float]:
        return {
            "accuracy": self.accuracy,
            "validation_loss": self.loss,
            "margin_mean": math.fsum(self.margins) / len(self.margins),
            "chosen_score_mean": self.chosen_mean,
            "rejected_score_mean": self.rejected_mean,
        }


@dataclass(frozen=True)
class RatingScores:
    """Predicted and given ratings of the held-out answers that have one, in the data's unit."""

    predicted: list[float]
    ratings: list[float]

    @property
    def rmse(self) -> float:
        """Root of the mean squared error.

        >>> RatingScores(predicted=[1.0, 5.0], ratings=[1.0, 3.0]).rmse
        1.4142135623730951
        """
        errors = numpy.asarray(self.predicted) - numpy.asarray(self.ratings)
        return float(numpy.sqrt(numpy.mean(errors**2)))

    @property
    def spearman(self) -> float | None:
        """Rank correlation, ties at their mean rank (Spearman 1904); None where one side has a single value.

        >>> RatingScores(predicted=[1.0, 2.0, 9.0], ratings=[3.0, 4.0, 5.0]).spearman
        1.0
        """
        if len(set(self.predicted)) < 2 or len(set(self.ratings)) < 2:
            return None
        ranks = [scipy.stats.rankdata(values) for values in (self.predicted, self.ratings)]
        deviations = [rank - rank.mean() for rank in ranks]
        covariance = math.fsum(deviations[0] * deviations[1])
        return covariance / math.sqrt(math.fsum(deviations[0] ** 2) * math.fsum(deviations[1] ** 2))

    def summary(self) -> dict[str, float | None]:
        return {"rmse": self.rmse, "spearman": self.spearman}


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and population standard deviation of the validation scores.

    Raises:
        EvaluationError: all scores are equal, so there is no scale.
    """
    scores = numpy.asarray(values, dtype=numpy.float64)
    if scores.max() == scores.min():
        raise EvaluationError(
            f"all {len(scores)} validation scores are {scores[0]}: the reward model tells no answers apart. Check "
            "that learning rates are not zero and that answers differ"
        )
    return float(scores.mean()), float(scores.std())


class Joined(Sequence[list[int]]):
    """Several sequences of token ids laid end to end, read when they are asked for."""

    def __init__(self, parts: Sequence[Sequence[list[int]]]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        for part in self.parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(index)


def validation_sequences(pairs: PairTable | None, feedback: FeedbackTable | None) -> Joined:
    """Return what validation scores: chosen answers, rejected answers, rated answers."""
    columns = [pairs.chosen, pairs.rejected] if pairs is not None else []
    return Joined([*columns, *([feedback.ids] if feedback is not None else [])])


def split_pairs(scores: Sequence[float], pairs: PairTable | None) -> PairScores | None:
    """Return the pairs' part of the scores of `validation_sequences`."""
    if pairs is None:
        return None
    return PairScores(list(scores[: len(pairs)]), list(scores[len(pairs) : 2 * len(pairs)]))


def check_batch_invariance(
    model: RewardModel, sequences: Sequence[Sequence[int]], pad_token_id: int, unit: float | None = None
) -> dict[str, Any]:
    """Score a few sequences alone, together, and together with the padding on the left; return the differences.

    Args:
        model: trained or not. Before training this finds an architecture that cannot do it, at once.
        sequences: the first few are used; lengths that differ make the test mean something.
        pad_token_id: any id.
        unit: what differences are measured in. Default: the root mean square of the scores, for a model whose scores
            have no known scale yet.

    Raises:
        EvaluationError: a score differs by more than `MAX_SCORE_DIFFERENCE` of the model's dtype, in `unit`.
    """
    chosen = [list(s) for s in sequences[:NUM_SELF_TEST_SEQUENCES]]
    together = sum(map(len, chosen)) * len(chosen)
    alone = [score_token_ids(model, [s], pad_token_id)[0] for s in chosen]
    differences = {}
    for side in ("right", "left"):
        batch = score_token_ids(model, chosen, pad_token_id, together, side=side)
        differences[side] = max(abs(a - b) for a, b in zip(alone, batch, strict=True))
    unit = unit or math.sqrt(math.fsum(score * score for score in alone) / len(alone))
    bound = MAX_SCORE_DIFFERENCE[model.dtype] * unit
    if max(differences.values()) > bound:
        raise EvaluationError(
            f"scores depend on the batch: alone and padded differ by {differences}, at most {bound:.2g} is rounding. "
            "The backbone does not respect the attention mask; use another attention implementation or architecture"
        )
    return {
        "num_sequences": len(chosen),
        "max_difference_allowed": bound,
        "max_difference_padded_right": differences["right"],
        "max_difference_padded_left": differences["left"],
    }
