"""The whole analysis: complete, the same whatever the order of rows, and without any text."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from sample_tables import WORDS, pairs_of_worth, random_pairs, sample_table

from data_checks.config import CheckDataConfig
from data_checks.samples import NUMBERS, SampleAnalysis, analyse
from data_checks.samples.toxicity import probabilities, toxicity

CONFIG = CheckDataConfig.model_validate({"preferences": [{"path": "x.jsonl"}], "languages": ["en"]})
RUDE = "You are a stupid idiot and a worthless piece of shit, fuck you."
POLITE = "You may find the book that you are looking for on the second shelf."


def as_json(analysis: SampleAnalysis) -> str:
    return json.dumps(dataclasses.asdict(analysis), allow_nan=False)


def complete(analysis: SampleAnalysis) -> bool:
    """Return whether each number is there, and each that is not known has its reason."""
    assert list(analysis.numbers) == list(NUMBERS)
    unknown = {name for name, value in analysis.numbers.items() if value is None}
    assert unknown == set(analysis.skipped)
    assert all(analysis.skipped.values())
    return True


def test_every_number_of_a_full_sample_is_known():
    analysis = analyse(pairs_of_worth(800, 0.1, 1), CONFIG)
    assert complete(analysis)
    assert {name for name in analysis.skipped if not name.startswith("language")} == set()


def test_the_order_of_rows_does_not_matter():
    table = pairs_of_worth(700, 0.1, 1)
    order = np.random.default_rng(0).permutation(700)
    chunks = [table.take(order[part]) for part in np.array_split(np.arange(700), 7)]
    assert as_json(analyse(table, CONFIG)) == as_json(analyse(pa.concat_tables(chunks), CONFIG))


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_finds_the_same(hash_seed: str):
    program = "import test_samples_analysis as t; print(t.as_json(t.analyse(t.pairs_of_worth(600, 0.1, 1), t.CONFIG)))"
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.path.join(here, "..", "scripted")])
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == as_json(analyse(pairs_of_worth(600, 0.1, 1), CONFIG))


@pytest.mark.parametrize("num_pairs", [0, 1, 2, 21])
def test_small_samples_are_no_accident(num_pairs: int):
    analysis = analyse(random_pairs(num_pairs, 1), CONFIG)
    assert complete(analysis)
    assert analysis.numbers["sample_rows"] == analysis.numbers["sample_pairs"] == num_pairs
    assert json.loads(as_json(analysis))["baselines"]["train_num_pairs"] <= num_pairs


@pytest.mark.filterwarnings("error")
def test_odd_texts_are_no_accident():
    odd = ["", " ", "\n", "\u200b", "🙂" * 50, "a" * 100_000, "x\ty\r\nz", "ﷺ" * 30, "\u0007" * 40, "́" * 30, "``` " * 9]
    size = 60
    texts = [odd[number % len(odd)] for number in range(size)]
    prompts = [f"{text} {number}" for number, text in enumerate(texts)]
    assert complete(analyse(sample_table(prompts, texts, texts[3:] + texts[:3]), CONFIG))


def test_of_a_long_prompt_the_end_is_read():
    french = "Nous avons parlé longtemps du temps qu'il fait et de la santé de nos parents. " * 30
    prompts = [f"{french}\n{POLITE * 9} And number {number}?" for number in range(30)]
    numbers = analyse(sample_table(prompts, [POLITE] * 30, [RUDE] * 30), CONFIG).numbers
    assert numbers["language_num_compared"] == 30
    assert numbers["language_mismatch_fraction"] == numbers["language_outside_fraction"] == 0


def test_no_text_is_in_the_result():
    secret = "sk-planted-4f9a8c"
    table = random_pairs(600, 1, plant=lambda first, second: (f"{secret} {first} {first}", f"{second} {secret}x"))
    text = as_json(analyse(table, CONFIG))
    assert "planted" not in text
    assert not any(f'"{word}' in text for word in WORDS)


def test_columns_may_be_missing_or_null():
    table = random_pairs(50, 1)
    bare = table.drop_columns(["cluster_key", "split", "is_tie", "label"])
    assert analyse(bare, CONFIG).numbers == analyse(table, CONFIG).numbers
    position = table.column_names.index("cluster_key")
    unknown = table.set_column(position, "cluster_key", pa.nulls(50, pa.int64()))
    assert analyse(unknown, CONFIG).numbers == analyse(table, CONFIG).numbers


def test_each_source_has_its_own_numbers():
    first = random_pairs(120, 1, plant=lambda a, b: (a + " and so on and on and on" * 9, b))
    second = random_pairs(120, 2, plant=lambda a, b: (a, b + " and so on and on and on" * 9))
    few = random_pairs(30, 3)
    parts = []
    for name, table in (("longer", first), ("shorter", second), ("few", few)):
        at = table.column_names.index("source")
        parts.append(table.set_column(at, "source", pa.array([name] * table.num_rows)))
    analysis = analyse(pa.concat_tables(parts), CONFIG)
    found = {(row["source"], row["metric"]): row["value"] for row in analysis.by_source}
    assert {source for source, _ in found} == {"longer", "shorter"}
    assert found["longer", "length_chosen_longer_share"] == found["longer", "length_auc"] == 1
    assert found["shorter", "length_chosen_longer_share"] == found["shorter", "length_auc"] == 0
    assert found["shorter", "length_slope_per_100_characters"] < 0 < found["longer", "length_slope_per_100_characters"]
    assert analysis.numbers["length_accuracy"] < 0.6, "together they hide it"
    assert {metric for _, metric in found} >= {"shortcut_accuracy", "toxicity_gap", "language_outside_fraction"}


def test_toxic_chosen_answers_are_a_gap():
    prompts = [f"Where do I find it, number {number}?" for number in range(40)]
    worse = analyse(sample_table(prompts, [RUDE] * 40, [POLITE] * 40), CONFIG).numbers
    better = analyse(sample_table(prompts, [POLITE] * 40, [RUDE] * 40), CONFIG).numbers
    assert worse["toxicity_gap_lower_bound"] > 0.5 > NUMBERS["toxicity_gap_lower_bound"].warn
    assert worse["toxicity_chosen_high_fraction"] == 1 == better["toxicity_rejected_high_fraction"]
    assert worse["toxicity_rejected_high_fraction"] == 0 == better["toxicity_chosen_high_fraction"]
    assert better["toxicity_gap"] == -worse["toxicity_gap"]
    assert worse["toxicity_gap"] == pytest.approx(worse["toxicity_chosen_mean"] - worse["toxicity_rejected_mean"])


def test_a_few_toxic_answers_are_not_enough_for_a_bound():
    prompts = [f"Where do I find it, number {number}?" for number in range(40)]
    chosen, rejected = [RUDE] + [POLITE] * 39, [POLITE] * 40
    numbers = analyse(sample_table(prompts, chosen, rejected), CONFIG).numbers
    assert numbers["toxicity_gap"] > 0.02 > numbers["toxicity_gap_lower_bound"]
    one = toxicity(sample_table(["q"] * 9, [RUDE] * 9, [POLITE] * 9), np.zeros(9, np.int64))
    assert "1 prompts" in one.skipped["toxicity_gap_lower_bound"]


def test_answers_judged_alone_count_by_their_label():
    prompts = [f"Where do I find it, number {number}?" for number in range(60)]
    answers = [RUDE if number < 20 else POLITE for number in range(60)]
    labels = [True] * 20 + [False] * 30 + [None] * 10
    analysis = analyse(sample_table(prompts, answers, [None] * 60, labels=labels), CONFIG)
    assert complete(analysis)
    assert analysis.numbers["toxicity_gap_lower_bound"] > 0.5
    assert analysis.numbers["toxicity_chosen_high_fraction"] == 1
    assert analysis.numbers["sample_pairs"] == 0
    assert "no pairs" in analysis.skipped["length_auc"]
    assert analysis.numbers["language_known_fraction"] > 0.9


def test_toxicity_is_null_where_there_is_no_answer():
    scores = probabilities(pa.chunked_array([[RUDE, None, POLITE]]))
    assert scores[0] > 0.8 > 0.2 > scores[2]
    assert np.isnan(scores[1])


def test_limits_are_in_their_range():
    for number in NUMBERS.values():
        if number.warn is not None or number.fail is not None:
            assert number.source
            assert number.advice
        if number.warn is not None and number.fail is not None:
            assert number.warn < number.fail
