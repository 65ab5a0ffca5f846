"""Rows of several answers: which pairs are made of them, in which order, and what becomes of the others."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pair_fixtures import convert, load, refusal

from data_checks.formats.ranked import ranked_candidates
from data_checks.rows import Dropped, PairRow, Policy, Reason


def shown(results: list[Any]) -> list[tuple[str, str, bool]]:
    """Return chosen, rejected and tie of the pairs."""
    return [
        (pair.chosen[0].content, pair.rejected[0].content, pair.is_tie) for pair in results if isinstance(pair, PairRow)
    ]


def ranks(*numbers: float) -> dict[str, Any]:
    return {"prompt": "Why?", "answers": [{"answer": f"a{i}", "rank": rank} for i, rank in enumerate(numbers)]}


def test_the_widest_gaps_come_first_and_the_others_are_accounted_for() -> None:
    results = convert(load("nectar")[0], "nectar")
    expected = [(0, 6), (0, 5), (1, 6), (0, 4), (1, 5), (2, 6)]
    assert shown(results) == [(f"Answer {i} to it.", f"Answer {j} to it.", False) for i, j in expected]
    assert results[6:] == [Dropped(Policy.PAIRS_PER_ROW, "max_pairs_per_row: 6")] * 15
    few = convert(load("nectar")[0], "nectar", max_pairs_per_row=2)
    assert shown(few) == shown(results)[:2]
    assert len(few) == len(results) == 21
    assert not any(isinstance(result, Dropped) for result in convert(load("nectar")[0], "nectar", max_pairs_per_row=21))


def test_equal_ranks_are_ties() -> None:
    assert shown(convert(ranks(2, 1.5, 1.5), "nectar")) == [
        ("a1", "a0", False),
        ("a2", "a0", False),
        ("a1", "a2", True),
    ]
    # Where all are equal, one tie says it.
    assert shown(convert(ranks(1, 1, 1, 1), "nectar")) == [("a0", "a1", True)]
    assert len(convert(ranks(1, 1, 1, 1), "nectar")) == 1


def test_ranks_and_models_stand_beside_the_pair() -> None:
    pair = convert(load("nectar")[3], "nectar")[0]
    assert [turn.role for turn in pair.prompt] == ["user", "assistant", "user"]
    assert json.loads(pair.extra) == {
        "chosen_answer": {"model": "model-1", "rank": 1.0},
        "rejected_answer": {"model": "model-0", "rank": 3.0},
        "good_natured": True,
        "turns": 2,
    }
    begun = {**ranks(1, 2), "prompt": "\n\nHuman: a\n\nAssistant: I say"}
    assert "ends with an answer" in refusal(begun, "nectar", Reason.LAST_TURN_NOT_USER)
    assert convert({**ranks(1, 2), "source": ["a", "b"]}, "nectar")[0].source == "a+b"


@given(st.lists(st.integers(0, 4), min_size=2, max_size=8))
def test_every_pair_is_made_once_and_none_is_turned_round(worth: list[int]) -> None:
    candidates = ranked_candidates(worth)
    if len(set(worth)) == 1:
        assert candidates == [(0, 0, 1)]
        return
    assert len({frozenset(places) for _, *places in candidates}) == len(worth) * (len(worth) - 1) // 2
    assert all(worth[i] - worth[j] == gap >= 0 for gap, i, j in candidates)
    assert [gap for gap, *_ in candidates] == sorted((gap for gap, *_ in candidates), reverse=True)


def test_best_of_four_and_many_correct() -> None:
    one, many, single, _ = load("rewardbench2")
    assert shown(convert(one, "rewardbench2")) == [("Seven minutes.", bad, False) for bad in one["rejected"]]
    results = convert(many, "rewardbench2", max_pairs_per_row=9)
    assert shown(results)[:6] == [
        ("Loire.", "Thames.", False),
        ("Loire.", "Nile.", False),
        ("Seine.", "Thames.", False),
        ("Seine.", "Nile.", False),
        ("Rhone.", "Thames.", False),
        ("Rhone.", "Nile.", False),
    ]
    # Correct answers of the subset Ties are declared equal; of other subsets nothing is said.
    assert shown(results)[6:] == [("Loire.", "Seine.", True), ("Loire.", "Rhone.", True), ("Seine.", "Rhone.", True)]
    assert len(convert(many, "rewardbench2")) == 9
    assert len(shown(convert(many, "rewardbench2"))) == 6
    assert shown(convert(single, "rewardbench2")) == [("Loire.", "Thames.", False)]
    others = {**many, "subset": "Focus", "id": "7"}
    assert len(convert(others, "rewardbench2")) == 6
    # Under a cap, different answers come before the same one again.
    square = {"prompt": "p", "chosen": ["a", "b", "c"], "rejected": ["x", "y", "z"]}
    capped = shown(convert(square, "rewardbench2", max_pairs_per_row=3))
    assert [pair[:2] for pair in capped] == [("a", "x"), ("a", "y"), ("b", "x")]
    assert json.loads(convert(one, "rewardbench2")[0].extra)["subset"] == "Factuality"


def ultrafeedback(index: int, **options: Any) -> list[Any]:
    return convert(load("ultrafeedback")[index], "ultrafeedback", **options)


def test_four_rated_answers_become_ranked_pairs() -> None:
    results = ultrafeedback(0)
    assert [(p.chosen_score, p.rejected_score) for p in results] == [(8, 3), (8, 5), (6, 3), (8, 6), (5, 3), (6, 5)]
    assert [p.margin for p in results] == [None] * 6
    assert [len(shown(ultrafeedback(0, max_pairs_per_row=n))) for n in (1, 4)] == [1, 4]
    kept = json.loads(results[0].extra)
    assert kept["chosen_answer"] == {
        "model": "m1",
        "custom_system_prompt": "Be a helpful assistant.",
        "overall_score": 8.0,
        "fine-grained_score": 4.5,
        "helpfulness": "5",
        "honesty": "4",
        "instruction_following": "5",
        "truthfulness": "4",
    }
    assert kept["models"] == ["m1", "m2", "m3", "m4"]


def test_the_rating_that_counts_can_be_chosen() -> None:
    assert {p.is_tie for p in ultrafeedback(1)[:3]} == {False}
    assert [p.is_tie for p in ultrafeedback(1)] == [False] * 3 + [True] * 3
    first = {
        score: (ultrafeedback(1, score=score)[0].chosen_score, ultrafeedback(1, score=score)[0].chosen[0].content)
        for score in ("fine-grained_score", "helpfulness", "honesty")
    }
    assert first == {
        "fine-grained_score": (4.25, "The Seine."),
        "helpfulness": (5.0, "The Seine."),
        "honesty": (4.0, "The Loire."),
    }
    value = copy.deepcopy(load("ultrafeedback")[0])
    value["completions"][0]["annotations"]["honesty"] = [{"Rating": "5"}, {"Rating": "2"}, {"Rating": "N/A"}]
    assert convert(value, "ultrafeedback", score="honesty")[0].chosen_score == 3.5


def test_answers_without_a_rating_are_not_compared() -> None:
    # The third answer's rating is N/A, which is a text as every rating of an aspect is.
    assert len(ultrafeedback(1, score="honesty")) == 3
    assert json.loads(ultrafeedback(1, score="honesty")[0].extra)["num_unrated"] == 1
    value = copy.deepcopy(load("ultrafeedback")[3])
    value["completions"][0]["overall_score"] = "N/A"
    detail = refusal(value, "ultrafeedback", Reason.MISSING_JUDGEMENT)
    assert detail == "1 of 3 answers have a rating (overall_score): two are compared"


@pytest.mark.parametrize(
    ("score", "detail"),
    [
        (0.5, "completions[2].overall_score is out of range; allowed: 1 to 10"),
        (11, "completions[2].overall_score is out of range"),
        ("high", "completions[2].overall_score is a text that is neither a number nor N/A"),
        ("nan", "completions[2].overall_score is not finite"),
        (True, "completions[2].overall_score is true or false"),
    ],
)
def test_ratings_that_are_none(score: Any, detail: str) -> None:
    value = copy.deepcopy(load("ultrafeedback")[0])
    value["completions"][2]["overall_score"] = score
    assert detail in refusal(value, "ultrafeedback")
    # They do no harm where another rating counts.
    assert len(convert(value, "ultrafeedback", score="helpfulness")) == 6


@pytest.mark.parametrize("score", [10**400, float("nan"), "4.5", True, [4]], ids=range(5))
def test_a_fine_grained_score_that_does_not_count_may_be_anything(score: Any) -> None:
    value = copy.deepcopy(load("ultrafeedback")[2])
    value["completions"][1]["fine-grained_score"] = score
    results = convert(value, "ultrafeedback")
    assert [(pair.chosen_score, pair.rejected_score) for pair in results[:2]] == [(10.0, 4.0), (9.0, 4.0)]


def test_a_one_that_was_stored_as_ten_shows_up_as_an_inversion() -> None:
    results = ultrafeedback(2)
    turned = [p for p in results if p.chosen_score < p.rejected_score]
    assert [p.chosen[0].content for p in turned] == ["The sea paints it."] * 3
    assert {(p.chosen_score, p.rejected_score) for p in turned} == {(1.25, 4.75), (1.25, 3.25), (1.25, 2.0)}
    both = json.loads(turned[0].extra)["chosen_answer"]
    assert (both["overall_score"], both["fine-grained_score"]) == (10.0, 1.25)
    assert not any(p.chosen_score < p.rejected_score for p in ultrafeedback(2, score="fine-grained_score"))
