"""The adaptive KL coefficient: proportional within 20 %, bounded beyond, and it reaches its target."""

from __future__ import annotations

import math
from typing import Any

import pytest

from training_core.ops.kl_control import adaptive_kl_coefficient


def following(observed: float, num_answers: int = 100) -> float:
    return adaptive_kl_coefficient(0.2, observed, 6.0, horizon_answers=1000, num_answers=num_answers)


@pytest.mark.parametrize(
    ("observed", "error"),
    [(6.0, 0.0), (6.6, 0.1), (5.4, -0.1), (7.2, 0.2), (60.0, 0.2), (0.0, -0.2), (-3.0, -0.2)],
)
def test_is_proportional_to_the_error_and_bounded(observed: float, error: float) -> None:
    assert following(observed) == pytest.approx(0.2 * (1.0 + error * 0.1), rel=1e-12)


def test_no_answers_and_no_error_change_nothing() -> None:
    assert following(60.0, num_answers=0) == 0.2
    assert following(6.0) == 0.2


def test_a_whole_horizon_at_once_moves_it_by_a_fifth_at_most() -> None:
    assert following(1e9, num_answers=1000) == pytest.approx(0.24)
    assert following(-1e9, num_answers=1000) == pytest.approx(0.16)


def test_it_steers_towards_the_target() -> None:
    """A policy whose KL falls as the coefficient grows ends at the target."""
    coefficient = 0.05
    for _ in range(400):
        coefficient = adaptive_kl_coefficient(coefficient, 1.0 / coefficient, 4.0, 1000, 256)
    assert 1.0 / coefficient == pytest.approx(4.0, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coefficient": 0.0}, "coefficient"),
        ({"coefficient": math.nan}, "coefficient"),
        ({"target_nats": 0.0}, "target_nats"),
        ({"target_nats": math.inf}, "target_nats"),
        ({"observed_nats": math.nan}, "observed_nats"),
        ({"observed_nats": math.inf}, "observed_nats"),
        ({"horizon_answers": 0}, "horizon_answers"),
        ({"num_answers": -1}, "num_answers"),
        ({"num_answers": 5000}, "num_answers"),
    ],
)
def test_arguments_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    plain = {"coefficient": 0.2, "observed_nats": 5.0, "target_nats": 6.0, "horizon_answers": 1000, "num_answers": 10}
    assert adaptive_kl_coefficient(**plain) > 0.0
    with pytest.raises(ValueError, match=message):
        adaptive_kl_coefficient(**{**plain, **change})
