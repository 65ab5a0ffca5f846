"""Scores on another scale: constants, or moments of all scores so far, which are state of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from training_core.config.reward_parts import FixedScale, RunningScale
from training_core.ops.normalising import RunningMoments
from training_core.records import Record

Scale = FixedScale | RunningScale


class RewardState(Record):
    """What rewards remember from step to step; part of a trainer's checkpoint. JSON-able.

    >>> state = RewardState(moments={"length": RunningMoments(2, 0.5, 0.5)})
    >>> RewardState.model_validate(state.model_dump(mode="json")) == state
    True
    """

    version: Literal[1] = 1
    moments: dict[str, RunningMoments] = Field(default_factory=dict)
    """Of the parts with a running scale, by their names."""


def with_scores(moments: RunningMoments, scores: Sequence[float | None]) -> RunningMoments:
    """Return the moments with the present scores added."""
    present = [score for score in scores if score is not None]
    return moments.updated(torch.tensor(present, dtype=torch.float64))


def scaled(value: float, scale: Scale | None, moments: RunningMoments | None, clip: float | None) -> float:
    """Return a score on its part's scale and within its bound.

    Special cases: a running scale that has seen fewer than two values, or only equal ones, only centres.

    Args:
        value: the score.
        scale: None leaves it as it is.
        moments: of a running scale; not read by others.
        clip: bound on the absolute value; None for none.

    >>> fixed = FixedScale(kind="fixed", mean=1.0, std=2.0)
    >>> scaled(5.0, fixed, None, None), scaled(5.0, fixed, None, 1.5), scaled(-9.0, None, None, 1.5)
    (2.0, 1.5, -1.5)
    """
    if isinstance(scale, FixedScale):
        value = (value - scale.mean) / scale.std
    elif isinstance(scale, RunningScale) and moments is not None:
        value = (value - moments.mean) / (moments.std or 1.0)
    return value if clip is None else min(max(value, -clip), clip)
