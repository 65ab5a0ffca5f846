"""The coefficient of a KL penalty that steers towards a KL instead of staying as set."""

from __future__ import annotations

import math

ERROR_LIMIT = 0.2
"""Largest relative error that the controller acts on."""


def adaptive_kl_coefficient(
    coefficient: float, observed_nats: float, target_nats: float, horizon_answers: int, num_answers: int
) -> float:
    """Compute the next coefficient of the KL penalty.

    error = clip(observed / target - 1, -0.2, 0.2); next = coefficient * (1 + error * num_answers / horizon_answers).

    Special cases:
        Observed equal to target: unchanged. No answers: unchanged. An error beyond 20 % acts as 20 %, so the
        coefficient grows by at most a factor 1.2 over a horizon of answers taken at once. A negative estimate of the KL
        counts as an error of -20 %.

    Args:
        coefficient: the present one, above 0: 0 could never change.
        observed_nats: mean KL to the reference over the step's answers, nats an answer (or a token, if the target is).
        target_nats: the KL to reach, same unit, above 0.
        horizon_answers: answers over which an error of 20 % acts in full, at least 1.
        num_answers: answers since the last call, below 5 * horizon_answers (beyond that the coefficient could reach 0).

    Returns:
        The next coefficient, above 0.

    Raises:
        ValueError: an argument is out of range or not finite.

    Source:
        Ziegler et al. 2019, section 2.2, arXiv 1909.08593, with K_beta = num_answers / horizon_answers.

    Example:
        >>> round(adaptive_kl_coefficient(0.1, 9.0, 6.0, horizon_answers=1000, num_answers=500), 6)
        0.11
    """
    for name, value in (("coefficient", coefficient), ("target_nats", target_nats)):
        if not (math.isfinite(value) and value > 0.0):
            raise ValueError(f"{name} must be finite and above 0, got {value}")
    if not math.isfinite(observed_nats):
        raise ValueError(f"observed_nats must be finite, got {observed_nats}")
    if horizon_answers < 1 or not 0 <= num_answers < horizon_answers / ERROR_LIMIT:
        raise ValueError(
            f"num_answers ({num_answers}) must lie in [0, 5 * horizon_answers) and horizon_answers ({horizon_answers}) "
            "be at least 1"
        )
    error = min(max(observed_nats / target_nats - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
    return coefficient * (1.0 + error * num_answers / horizon_answers)
