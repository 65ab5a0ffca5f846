"""The shortcut probe, null baselines and length bias: planted shortcuts are found, and only those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from sample_tables import Answers, random_pairs, sample_table

from data_checks.config import CheckDataConfig
from data_checks.samples import NUMBERS, SampleAnalysis, analyse
from data_checks.samples.baselines import baselines
from data_checks.samples.length import length_bias
from data_checks.samples.noise import label_noise
from data_checks.samples.pairs import FEATURES, Pairs, in_stable_order, pairs_of
from data_checks.samples.probe import best_feature, design, probe, validation_scores

CONFIG = CheckDataConfig.model_validate({"preferences": [{"path": "x.jsonl"}]})


def longer(first: str, second: str) -> Answers:
    return (first, second) if len(first) >= len(second) else (second, first)


def shorter(first: str, second: str) -> Answers:
    return longer(first, second)[::-1]


def bullets(first: str, second: str) -> Answers:
    return f"- {first}\n- that is all", second.replace("- ", "")


def refuses(first: str, second: str) -> Answers:
    """Refuse in the chosen answer only; the rejected one says as much in as many characters."""
    refusal = "I'm sorry, but I can't help with that. "
    other = "Here is what I found out about it all. "
    assert len(refusal) == len(other)
    return refusal + first.removeprefix(refusal), other + second.removeprefix(refusal)


def beyond(analysis: SampleAnalysis) -> dict[str, str]:
    """Return the numbers that are beyond a limit."""
    found = {}
    for name, number in NUMBERS.items():
        value = analysis.numbers[name]
        if value is not None and number.fail is not None and value >= number.fail:
            found[name] = "fail"
        elif value is not None and number.warn is not None and value >= number.warn:
            found[name] = "warn"
    return found


def made(num_pairs: int, seed: int, plant: Callable[[str, str], Answers] | None = None, per_prompt: int = 1) -> Pairs:
    return pairs_of(in_stable_order(random_pairs(num_pairs, seed, plant=plant, per_prompt=per_prompt)))


@pytest.mark.parametrize("size", [60, 300])
@pytest.mark.parametrize(
    ("plant", "features", "prefers"),
    [
        (longer, {"characters", "words"}, "more"),
        (shorter, {"characters", "words"}, "less"),
        (bullets, {"bullets"}, "more"),
        (refuses, {"refusal"}, "more"),
    ],
    ids=["longer", "shorter", "bullets", "refuses"],
)
def test_a_planted_shortcut_fails(size: int, plant: Callable, features: set[str], prefers: str):
    analysis = analyse(random_pairs(size, 1, plant=plant), CONFIG)
    found = beyond(analysis)
    assert found["shortcut_accuracy_lower_bound"] == found["shortcut_auc_lower_bound"] == "fail"
    assert analysis.probe["best_feature"] in features
    assert analysis.probe["best_feature_prefers"] == prefers
    assert analysis.numbers["shortcut_best_feature_accuracy"] > 0.95
    assert ("length_accuracy_lower_bound" in found) == (plant in (longer, shorter))
    if plant is shorter:
        assert analysis.numbers["length_chosen_longer_share"] < 0.05
        assert analysis.numbers["length_slope_per_100_characters"] < 0


def test_random_labels_are_no_shortcut():
    """300 pairs, again and again: about half are right, and no data set fails or warns."""
    accuracies = []
    for seed in range(60):
        pairs = made(300, seed, per_prompt=1 + seed % 3)
        numbers = probe(pairs).numbers | length_bias(pairs) | label_noise(pairs).numbers
        assert numbers["shortcut_accuracy_lower_bound"] < NUMBERS["shortcut_accuracy_lower_bound"].warn
        assert numbers["shortcut_auc_lower_bound"] < NUMBERS["shortcut_auc_lower_bound"].fail
        assert numbers["length_accuracy_lower_bound"] < NUMBERS["length_accuracy_lower_bound"].warn
        accuracies.append(numbers["shortcut_accuracy"])
    assert np.mean(accuracies) == pytest.approx(0.5, abs=0.02)


def test_a_weak_shortcut_warns_when_there_are_enough_pairs():
    numbers = {}
    for size in (60, 3000):
        coin = np.random.default_rng(5)

        def mostly_longer(first: str, second: str, coin: np.random.Generator = coin) -> Answers:
            return longer(first, second) if coin.random() < 0.65 else shorter(first, second)

        table = random_pairs(size, 3, plant=mostly_longer)
        numbers[size] = analyse(table, CONFIG)
        assert 0.5 < numbers[size].numbers["length_accuracy"] < 0.7
    assert beyond(numbers[60]) == {}
    found = beyond(numbers[3000])
    assert found["shortcut_accuracy_lower_bound"] == found["length_accuracy_lower_bound"] == "warn"


def test_pairs_of_a_prompt_never_are_on_both_sides():
    """In each prompt's pairs another feature alone tells the chosen answer: only who saw the prompt could know."""
    pairs = made(100, 8, per_prompt=10)
    for sides in (pairs.chosen, pairs.rejected):
        for name in FEATURES:
            sides[name][:] = 0
    for name, cluster in zip(FEATURES, np.unique(pairs.cluster), strict=False):
        pairs.chosen[name][pairs.cluster == cluster] = 1
    result = probe(pairs)
    assert result.numbers["shortcut_accuracy"] == result.numbers["shortcut_auc"] == 0.5
    assert result.numbers["shortcut_best_feature_accuracy"] == 0.5


def test_swapping_all_answers_mirrors_the_fit():
    pairs = made(200, 2, longer)
    swapped = Pairs(**{**vars(pairs), "chosen": pairs.rejected, "rejected": pairs.chosen})
    ours, theirs = probe(pairs), probe(swapped)
    assert np.allclose(ours.scores, theirs.scores, atol=1e-6)
    assert length_bias(pairs)["length_auc"] == pytest.approx(1 - length_bias(swapped)["length_auc"])


def test_best_feature_may_be_less_of_it():
    assert best_feature(np.array([[1.0, -1.0], [-1.0, -2.0], [0.5, -0.1]])) == (1, -1)


def test_columns_without_any_difference_get_no_weight():
    analysis = analyse(random_pairs(60, 4), CONFIG)
    weights = {entry["feature"]: entry["weight"] for entry in analysis.probe["features"]}
    assert set(weights) == set(FEATURES)
    assert weights["emoji"] == weights["headers"] == 0
    assert [abs(weight) for weight in weights.values()] == sorted(map(abs, weights.values()), reverse=True)


def test_baselines_of_both_splits():
    pairs = made(800, 6, longer)
    result = probe(pairs)
    report = baselines(pairs, result)
    assert report["train_num_pairs"] + report["validation_num_pairs"] == 800
    assert report["validation_num_pairs"] == int(pairs.validation.sum()) > 20
    for split, inside in (("train", ~pairs.validation), ("validation", pairs.validation)):
        difference = pairs.difference("characters")[inside]
        right = (difference > 0).mean() + (difference == 0).mean() / 2
        assert report[f"{split}_longest_accuracy"] == pytest.approx(right)
        assert report[f"{split}_longest_accuracy"] + report[f"{split}_shortest_accuracy"] == pytest.approx(1)
        assert (report[f"{split}_random_accuracy"], report[f"{split}_random_standard_error"]) == (0.5, 0)
        names = ("random", "longest", "shortest", "most_markdown", "shortcut_probe")
        best = max(report[f"{split}_{name}_accuracy"] for name in names)
        assert report[f"{split}_best_accuracy"] == best == report[f"{split}_{report[f'{split}_best_name']}_accuracy"]
    wrong = replace(result, validation_scores=-result.validation_scores)
    turned = baselines(pairs, wrong)
    assert report["validation_shortcut_probe_accuracy"] > 0.9 > 0.1 > turned["validation_shortcut_probe_accuracy"]
    assert report["train_shortcut_probe_accuracy"] == turned["train_shortcut_probe_accuracy"] > 0.9


def test_most_markdown_counts_all_kinds():
    pairs = made(40, 7, lambda first, second: (f"# Title\n**bold** {first}", second.replace("- ", "")))
    assert baselines(pairs, None)["train_most_markdown_accuracy"] == 1
    assert baselines(pairs, None)["train_shortcut_probe_accuracy"] is None


def test_validation_pairs_are_judged_by_a_model_of_the_training_pairs():
    """The shortcut is turned round in the validation split: the probe has to be wrong there."""
    pairs = made(600, 9, longer)
    rows = design(pairs)
    validation = np.arange(600) < 350
    rows[validation] *= -1
    scores = validation_scores(rows, validation)
    assert (scores[validation] < 0).mean() > 0.9
    assert np.isnan(scores[~validation]).all()


def test_no_validation_pairs_no_baseline():
    table = random_pairs(50, 1)
    report = analyse(table.drop_columns(["split"]), CONFIG).baselines
    assert report["train_num_pairs"] == 50
    assert report["validation_num_pairs"] == 0
    assert report["validation_best_name"] is report["validation_random_accuracy"] is None


@pytest.mark.parametrize(("num_pairs", "per_prompt"), [(19, 1), (200, 25)], ids=["few_pairs", "few_prompts"])
def test_too_little_to_learn_from_is_skipped(num_pairs: int, per_prompt: int):
    analysis = analyse(random_pairs(num_pairs, 1, plant=longer, per_prompt=per_prompt), CONFIG)
    assert analysis.numbers["shortcut_accuracy"] is None
    assert analysis.probe == {}
    assert f"{num_pairs} pairs" in analysis.skipped["shortcut_accuracy_lower_bound"]


def test_kept_ties_do_not_count():
    size = 60
    prompts = [f"question {number}" for number in range(size)]
    ties = [number % 2 == 0 for number in range(size)]
    chosen = ["short" if tie else "a much longer answer" for tie in ties]
    rejected = ["a much longer answer" if tie else "short" for tie in ties]
    analysis = analyse(sample_table(prompts, chosen, rejected, ties=ties), CONFIG)
    assert analysis.numbers["sample_pairs"] == 30
    assert analysis.numbers["length_chosen_longer_share"] == 1
