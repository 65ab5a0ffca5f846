"""Limits in force: the suite's, the config's, and what chance adds on few rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from feature_rows import checked, good_columns, write_features

from data_checks.checks import Measured, run_checks
from data_checks.checks.suite_files import catalogue, checks_of
from data_checks.checks.thresholds import allowance, bounds, check_names
from data_checks.config import CheckDataConfig
from training_core.errors import ConfigurationError

INFOS = checks_of("data_set")


def config(**thresholds: dict[str, float]) -> CheckDataConfig:
    return CheckDataConfig.model_validate({"preferences": [{"path": "p"}], "min_pairs": 2, "thresholds": thresholds})


def measured(name: str, rows: int, **numbers: Any) -> Measured:
    return Measured(numbers=numbers, support={name: rows})


def test_exact_limits_stand() -> None:
    assert bounds(INFOS["rows_kept"], "fail", measured("rows_kept", 3), config()) == (2, None)
    assert bounds(INFOS["secret_rows_kept"], "fail", measured("secret_rows_kept", 3), config()) == (None, 0)


def test_a_rate_warns_at_its_limit_and_fails_beyond_chance() -> None:
    few = measured("duplicate_fraction", 40)
    assert bounds(INFOS["duplicate_fraction"], "warn", few, config()) == (None, 0.001)
    (_, high) = bounds(INFOS["duplicate_fraction"], "fail", few, config()) or (0, 0)
    assert high == pytest.approx(0.01 + 3.29 * math.sqrt(0.01 * 0.99 / 40))
    assert 1 / 40 < high < 3 / 40
    (_, high) = bounds(INFOS["duplicate_fraction"], "fail", measured("duplicate_fraction", 10**6), config()) or (0, 0)
    assert high == pytest.approx(0.01, rel=0.04)


def test_an_estimate_is_widened_on_both_sides() -> None:
    low, high = bounds(INFOS["chosen_longer_share"], "warn", measured("chosen_longer_share", 400), config()) or (0, 0)
    assert (low, high) == pytest.approx((0.4 - 3.29 * math.sqrt(0.24 / 400), 0.6 + 3.29 * math.sqrt(0.24 / 400)))


def test_a_gap_is_widened_by_how_often_the_sides_differ() -> None:
    own = measured("truncated_gap", 400, truncated_one_side_fraction=0.3)
    low, high = bounds(INFOS["truncated_gap"], "fail", own, config()) or (0, 0)
    assert (low, high) == pytest.approx((-0.05 - 3.29 * math.sqrt(0.3 / 400), 0.05 + 3.29 * math.sqrt(0.3 / 400)))
    assert allowance(0.05, 0) == allowance(0.0, 10) == 0.0


@pytest.mark.parametrize(("share", "rows"), [(0.6, 40), (0.6, 400), (0.7, 40), (0.4, 1000), (0.05, 400)])
def test_a_set_on_the_limit_breaks_it_once_in_a_thousand(share: float, rows: int) -> None:
    draws = np.random.default_rng(4).binomial(rows, share, 200_000) / rows
    width = allowance(share, rows)
    assert np.mean(np.abs(draws - share) > width) < 0.0025


def test_limits_of_the_config_stand_as_they_are() -> None:
    own = config(chosen_longer_share={"warn": 0.65}, duplicate_fraction={"fail": 0.2}, position_p_value={"warn": 0.01})
    few = Measured()
    assert bounds(INFOS["chosen_longer_share"], "warn", few, own) == pytest.approx((0.35, 0.65))
    assert bounds(INFOS["chosen_longer_share"], "fail", few, own) == (0.3, 0.7)
    assert bounds(INFOS["duplicate_fraction"], "fail", few, own) == (None, 0.2)
    assert bounds(INFOS["duplicate_fraction"], "warn", few, own) == (None, 0.001)
    assert bounds(INFOS["position_p_value"], "warn", few, own) == (0.01, None)
    # Mirrored at the middle, whichever side is named.
    assert bounds(INFOS["chosen_longer_share"], "warn", few, config(chosen_longer_share={"warn": 0.3})) == (0.3, 0.7)
    gap = config(refusal_gap={"warn": 0.2})
    assert bounds(INFOS["refusal_gap"], "warn", few, gap) == (-0.2, 0.2)


def test_a_name_that_is_no_check_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"data\.thresholds\.duplicate_fractions: .*duplicate_fraction"):
        check_names(config(duplicate_fractions={"warn": 0.1}))
    with pytest.raises(ConfigurationError, match=r"data\.thresholds\.zzz: there is no check"):
        check_names(config(zzz={"warn": 0.1}))
    with pytest.raises(
        ConfigurationError, match=r"mojibake_fraction\.fail: this check has no such limit \(only `warn`\)"
    ):
        check_names(config(mojibake_fraction={"fail": 0.1}))
    with pytest.raises(ConfigurationError, match="none: it is a rule on rows"):
        check_names(config(kept_known={"fail": 0.1}))


def test_every_check_with_limits_takes_one_from_the_config() -> None:
    for info in catalogue():
        for side in ("warn", "fail"):
            if getattr(info, side) is None:
                continue
            own = config(**{info.name: {side: 0.123}})
            check_names(own)
            assert 0.123 in (bounds(info, side, Measured(), own) or ()), info.name


def test_forty_good_pairs_do_not_fail_by_chance_and_forty_bad_ones_fail(tmp_path: Path) -> None:
    columns = good_columns(40)
    columns["chosen_tokens"] = [16 if index % 3 else 12 for index in range(40)]
    columns["rejected_tokens"] = [14] * 40
    path = write_features(tmp_path / "p.parquet", columns)
    checks = {check.name: check for check in run_checks(checked({"preferences": path}), config()).checks}
    assert checks["chosen_longer_share"].value == 26 / 40
    assert checks["chosen_longer_share"].verdict == "pass"
    strict = config(chosen_longer_share={"warn": 0.6, "fail": 0.64})
    checks = {check.name: check for check in run_checks(checked({"preferences": path}), strict).checks}
    assert (checks["chosen_longer_share"].verdict, checks["chosen_longer_share"].threshold) == ("fail", [0.36, 0.64])
    columns["chosen_tokens"] = [16] * 40
    path = write_features(tmp_path / "q.parquet", columns)
    checks = {check.name: check for check in run_checks(checked({"preferences": path}), config()).checks}
    assert checks["chosen_longer_share"].verdict == "fail"
