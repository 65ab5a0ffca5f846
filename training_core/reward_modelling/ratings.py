"""From a score to a rating in the data's own unit, and back from a rating to what a loss compares with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from training_core.errors import DataError
from training_core.ops.reward_losses import level_probabilities

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LinearScale:
    """rating = mean + std * score."""

    mean: float
    std: float

    @classmethod
    def of(cls, ratings: Floats, *, standardise: bool) -> LinearScale:
        """Return the scale of the training ratings; that of the score itself without `standardise`.

        Raises:
            DataError: all ratings are equal, so there is nothing to learn.
        """
        if ratings.min() == ratings.max():
            raise DataError(
                f"all {len(ratings)} training ratings are {ratings[0]}: nothing can be learned from them. Give rows "
                "with different ratings"
            )
        return cls(float(ratings.mean()), float(ratings.std())) if standardise else cls(0.0, 1.0)

    def to_targets(self, ratings: Floats) -> Floats:
        """Return what the score of an answer with each rating shall be."""
        return (ratings - self.mean) / self.std

    def predict(self, scores: Floats) -> Floats:
        return self.mean + self.std * scores

    def to_json(self) -> dict[str, Any]:
        return {"rating_mean": self.mean, "rating_std": self.std}


@dataclass(frozen=True)
class OrdinalScale:
    """rating = the mean of the levels' values under their probabilities given the score."""

    levels: tuple[float, ...]
    thresholds: tuple[float, ...]

    def predict(self, scores: Floats) -> Floats:
        probabilities = level_probabilities(
            torch.from_numpy(scores), torch.tensor(self.thresholds, dtype=torch.float64)
        )
        return np.asarray(probabilities @ torch.tensor(self.levels, dtype=torch.float64))

    def to_json(self) -> dict[str, Any]:
        return {"levels": list(self.levels), "thresholds": list(self.thresholds)}


RatingScale = LinearScale | OrdinalScale


def stored_scale(report: dict[str, Any]) -> RatingScale:
    """Return the scale that `to_json` put into a model's report.

    Raises:
        KeyError: the model was trained on pairs and has none.
    """
    if "thresholds" in report:
        return OrdinalScale(tuple(report["levels"]), tuple(report["thresholds"]))
    return LinearScale(float(report["rating_mean"]), float(report["rating_std"]))


def level_indices(ratings: Floats, levels: list[float]) -> NDArray[np.int64]:
    """Return the place of each rating among the levels.

    Raises:
        DataError: a rating is none of them.

    >>> level_indices(np.array([5.0, 1.0]), [1.0, 3.0, 5.0]).tolist()
    [2, 0]
    """
    values = np.asarray(levels)
    found = np.searchsorted(values, ratings).clip(max=len(values) - 1)
    wrong = np.flatnonzero(values[found] != ratings)
    if len(wrong):
        raise DataError(
            f"{len(wrong)} feedback rows have a rating that is no level, e.g. {ratings[wrong[0]]:g}; "
            f"reward_model.loss.levels is {levels}. Name all values that occur, or use the loss `regression`"
        )
    return found.astype(np.int64)
