"""Label noise: flipped labels are estimated and pointed at, hard pairs are not taken for them."""

from __future__ import annotations

import numpy as np
import pytest
from sample_tables import pairs_of_worth, random_pairs, sample_table

from data_checks.samples.noise import NoiseResult, calibrate, calibration_error, label_noise, sigmoid
from data_checks.samples.pairs import in_stable_order, pairs_of


def noise_of(table) -> NoiseResult:
    return label_noise(pairs_of(in_stable_order(table)))


@pytest.mark.parametrize("flipped", [0.0, 0.1, 0.2])
def test_flipped_labels_are_counted(flipped: float):
    numbers = noise_of(pairs_of_worth(4000, flipped, 1)).numbers
    assert numbers["label_noise_rate"] == pytest.approx(flipped, abs=0.03)
    assert numbers["label_noise_fraction"] == pytest.approx(flipped, abs=0.07)
    assert numbers["label_noise_calibration_error"] < 0.03
    assert numbers["label_noise_model_accuracy"] > 0.7


def test_suspects_are_the_flipped_ones():
    table = pairs_of_worth(2000, 0.0, 2)
    wrong = set(range(0, 2000, 40))
    swap = [number in wrong for number in range(2000)]
    chosen, rejected = table["chosen_text"].to_pylist(), table["rejected_text"].to_pylist()
    flipped = sample_table(
        table["prompt_text"].to_pylist(),
        [r if s else c for c, r, s in zip(chosen, rejected, swap, strict=True)],
        [c if s else r for c, r, s in zip(chosen, rejected, swap, strict=True)],
    )
    suspects = noise_of(flipped).suspects
    assert len(suspects) == 100
    assert len(wrong & set(suspects[:50])) >= 25, "by chance 1 or 2 would be"


def test_text_is_not_changed_and_labels_are_not_flipped():
    table = pairs_of_worth(600, 0.2, 3)
    before = table.to_pydict()
    noise_of(table)
    assert table.to_pydict() == before


def test_random_labels_cannot_be_judged():
    result = noise_of(random_pairs(800, 1))
    assert result.numbers["label_noise_rate"] is None
    assert result.suspects == []
    assert "cannot tell" in result.skipped


def test_few_pairs_cannot_be_judged():
    result = noise_of(pairs_of_worth(499, 0.2, 1))
    assert "500 are needed" in result.skipped
    assert set(result.numbers.values()) == {None}


def scores_of(slope: float, floor: float, size: int = 20000) -> np.ndarray:
    draw = np.random.default_rng(7)
    strength = np.abs(draw.normal(size=size))
    right = draw.random(size) < floor + (1 - 2 * floor) * sigmoid(slope * strength)
    return np.where(right, strength, -strength)


@pytest.mark.parametrize("slope", [0.3, 1.0, 3.0])
def test_hard_pairs_are_not_noise(slope: float):
    """A model that is never sure, of labels that are what it says they are: no floor."""
    floor, found = calibrate(scores_of(slope, 0.0))
    assert floor == 0
    assert found == pytest.approx(slope, rel=0.1)


def test_floor_and_slope_are_those_that_made_the_scores():
    floor, slope = calibrate(scores_of(8.0, 0.2))
    assert floor == pytest.approx(0.2, abs=0.02)
    assert slope == pytest.approx(8.0, rel=0.25)


def test_calibration_does_not_depend_on_the_unit_of_scores():
    scores = scores_of(3.0, 0.1)
    floor, slope = calibrate(scores)
    assert calibrate(scores * 1000)[0] == floor
    assert calibrate(scores * 1000)[1] == pytest.approx(slope / 1000)


def test_calibration_error_of_a_boaster():
    draw = np.random.default_rng(1)
    honest = np.where(draw.random(10000) < 0.7, 0.7, 0.3)
    assert calibration_error(honest) == pytest.approx(0, abs=0.02)
    assert calibration_error(np.where(honest > 0.5, 0.99, 0.01)) == pytest.approx(0.29, abs=0.02)


def test_words_of_one_prompt_do_not_help_with_its_own_pairs():
    """Each prompt's chosen answers share a word that no other prompt has; near-duplicate prompts are one."""
    prompts = [f"prompt {number}" for number in range(600)]
    chosen = [f"word{number // 10} same" for number in range(600)]
    table = sample_table(prompts, chosen, ["same"] * 600, clusters=[f"cluster {number // 10}" for number in range(600)])
    assert "0.500" in noise_of(table).skipped
    assert noise_of(sample_table(prompts, chosen, ["same"] * 600)).numbers["label_noise_model_accuracy"] == 1


def test_answers_with_the_same_words_have_no_say():
    table = sample_table([f"q {n}" for n in range(600)], ["one two"] * 600, ["two one"] * 600)
    assert "0.500" in noise_of(table).skipped
