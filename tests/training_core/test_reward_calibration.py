"""Whether scores say how sure they are: slopes, errors, and what chance makes of a calibrated model."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit

from training_core.reward_modelling.calibration import (
    calibrate,
    calibration_error,
    cross_fitted,
    fitted_slope,
    halves,
    num_bins,
)


def prompts(num: int) -> list[str]:
    return [f"prompt {i}" for i in range(num)]


def test_the_slope_is_the_maximum_of_the_likelihood() -> None:
    draw = np.random.default_rng(2)
    margins = draw.normal(0.5, 2.0, 3000)
    sizes = np.abs(margins)
    true = np.where(draw.random(3000) < expit(0.7 * sizes), sizes, -sizes)
    assert fitted_slope(true) == pytest.approx(0.7, abs=0.06)
    assert fitted_slope(true * 10) == pytest.approx(fitted_slope(true) / 10)
    assert 0 < fitted_slope(np.ones(5)) < 2
    assert fitted_slope(-np.ones(5)) == fitted_slope(np.zeros(5)) == fitted_slope(np.array([2.0, -3.0])) == 0.0


def test_the_error_is_the_mean_distance_over_bins_of_equally_many() -> None:
    assert [num_bins(num) for num in (1, 39, 40, 199, 200, 5000)] == [1, 1, 2, 9, 10, 10]
    # Right in 3 of 4 with confidence 0.9: one bin.
    sure = np.log(9.0)
    assert calibration_error(sure * np.array([1, 1, 1, -1])) == pytest.approx(0.15)
    # Twenty sure ones, right in half; twenty that cannot tell.
    values = sure * np.array([1] * 10 + [-1] * 10 + [0] * 20)
    assert calibration_error(values) == pytest.approx((0.4 + 0.0) / 2)
    # Two hundred equally sure ones, right in 0.9: no order of the rows, and no bins, make an error of that.
    equal = sure * np.array([1] * 180 + [-1] * 20)
    for order in (equal, equal[::-1], np.random.default_rng(0).permutation(equal)):
        assert calibration_error(order) == pytest.approx(0.0, abs=1e-12)


def test_the_two_halves_are_of_prompts_whatever_the_order_of_the_rows() -> None:
    names = [f"g{i % 7}" for i in range(50)]
    second = halves(names)
    assert {name for name, side in zip(names, second, strict=True) if side}.isdisjoint(
        {name for name, side in zip(names, second, strict=True) if not side}
    )
    assert len({name for name, side in zip(names, second, strict=True) if side}) == 3
    assert halves(names[::-1]).tolist() == second[::-1].tolist()
    margins = np.arange(50.0) - 10
    fitted = cross_fitted(margins, second)
    assert fitted is not None
    assert fitted[second] == pytest.approx(fitted_slope(margins[~second]) * margins[second])
    assert cross_fitted(margins, halves(["one"] * 50)) is None
    assert calibrate(margins, ["one"] * 50, 0.95, 0).scaled_error is None


def drawn(slope: float, num: int, seed: int) -> np.ndarray:
    """Return margins that are right as often as their size times `slope` says."""
    draw = np.random.default_rng(seed)
    sizes = draw.exponential(1.5, num)
    return np.where(draw.random(num) < expit(slope * sizes), sizes, -sizes)


def test_a_factor_repairs_what_is_only_too_sure() -> None:
    found = calibrate(20 * drawn(1.0, 1000, 4), prompts(1000), 0.95, 0)
    assert found.error > 0.15
    assert found.scaled_error is not None
    assert found.chance_limit is not None
    assert found.scaled_error < 0.06
    assert found.slope == pytest.approx(1 / 20, rel=0.15)
    assert found == calibrate(20 * drawn(1.0, 1000, 4), prompts(1000), 0.95, 0)


def test_calibrated_models_stay_below_the_limit_by_chance() -> None:
    above = 0
    for seed in range(40):
        found = calibrate(drawn(1.0, 300, seed), prompts(300), 0.95, seed)
        assert found.scaled_error is not None
        assert found.chance_limit is not None
        assert found.chance_error is not None
        assert found.chance_error < found.chance_limit
        above += found.scaled_error > found.chance_limit
    assert above <= 6
