"""Sentinels: what stops a training, and what does not."""

from __future__ import annotations

import math

import pytest

from training_core.errors import ArtifactError, EvaluationError, TrainingDivergedError, WeightVersionError
from training_core.sentinels import (
    check_any_score,
    check_finite_loss,
    check_reference_is_start,
    check_sampler_agrees,
)


@pytest.mark.parametrize("kl", [0.11, math.inf, math.nan])
def test_a_disagreement_with_the_sampler_stops_and_so_does_no_number(kl: float) -> None:
    check_sampler_agrees(0.1, 0.1, step=3)
    with pytest.raises(WeightVersionError, match="step 3"):
        check_sampler_agrees(kl, 0.1, step=3)


@pytest.mark.parametrize("kl", [2e-3, math.inf, math.nan])
def test_a_start_away_from_the_reference_stops_and_so_does_no_number(kl: float) -> None:
    check_reference_is_start(1e-3, step=1)
    with pytest.raises(ArtifactError, match="must be 0"):
        check_reference_is_start(kl, step=1)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_stops(loss: float) -> None:
    check_finite_loss(1e30, step=2)
    with pytest.raises(TrainingDivergedError, match="step 2"):
        check_finite_loss(loss, step=2)


def test_a_step_without_any_score_stops() -> None:
    check_any_score(3, 4, step=1)
    with pytest.raises(EvaluationError, match="none of the 4 answers"):
        check_any_score(4, 4, step=1)
