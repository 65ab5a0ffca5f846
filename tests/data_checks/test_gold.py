"""Whether prompts can be rewarded: ground truths that their verifier rejects, prompts always or never solved."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from data_checks import gold
from data_checks.gold import GoldChecker, gold_findings
from data_checks.ground_truths import shape_of
from data_checks.pass_rates import NO_PASS_RATES, PassRates
from data_checks.rows import PromptItem, Reason, Turn
from training_core.config.reward_rules import ExactMatchReward
from training_core.config.verifiers import MathVerifyReward, NumericMatchReward
from training_core.rewards.base import Cause, Scores

READ = "the verifier cannot read the ground truth"
BOTH = "the verifier accepts a wrong or empty answer as well"
NOT = "the verifier does not accept the ground truth as an answer"


def prompt(truth: Any = None, ability: str | None = None, **extra: Any) -> PromptItem:
    text = None if truth is None else json.dumps(truth)
    return PromptItem(None, (Turn("user", "q"),), "id", json.dumps(extra), ground_truth=text, ability=ability)


def details(items: list[PromptItem], *rewards: Any, **limits: Any) -> list[str | None]:
    found = gold_findings(items, rewards, **limits)
    assert all(finding is None or finding.reason == Reason.GOLD_REJECTED for finding in found)
    return [None if finding is None else finding.detail for finding in found]


@pytest.mark.parametrize(
    "truth",
    [
        *(18, -2.5, "18", "-5", "−5", "1,234.5", "50%", "$18", "3/4", "1.5e-3"),
        *(
            "Paris",
            "He said: 3/0",
            True,
            False,
            "2024-05-01",
            r"\text{Friday}",
            "{1, 2",
            "a heading #### of " + "w " * 40,
        ),
        *("Half of 36 is 18.\n#### 18", ["Paris", "paris"], ["18", 19], ["3/0", "inf"], ["x", None]),
    ],
)
def test_a_good_ground_truth(truth: Any) -> None:
    checker = GoldChecker()
    assert checker.findings([prompt(truth)]) == [None]
    assert (checker.num_judged, dict(checker.unjudged)) == (1, {})


@pytest.mark.parametrize(
    ("truth", "detail"),
    [
        ("3/0", READ),
        ("1e999", READ),
        (["3/0", "1/0"], READ),
        ("", BOTH),
        (" \n", BOTH),
        (["Paris", ""], BOTH),
        ("It is 18.\n#### unknown", NOT),
        ([], "the ground truth is an empty list: no answer is right"),
        ([None], "the ground truth is an empty list: no answer is right"),
        (r"\frac{1}{", "the ground truth has braces that do not match"),
        (r"2}\cdot{3", "the ground truth has braces that do not match"),
        (r"\dfrac", "the ground truth has a fraction or root without arguments"),
        (r"\left(1, 2", r"the ground truth has \left and \right that do not match"),
    ],
)
def test_a_ground_truth_that_is_rejected(truth: Any, detail: str) -> None:
    assert details([prompt("fine"), prompt(truth), prompt(3)]) == [None, detail, None]


def test_what_is_not_asked_about_is_told() -> None:
    checker = GoldChecker()
    structured = [{"inputs": ["1"]}, [["1"], ["2"]], '{"inputs": ["\\\\n"]}']
    items = [prompt(), *(prompt(truth) for truth in structured), prompt("assert f(2) ^ 1", ability="code"), prompt(1)]
    items.append(PromptItem(None, (), "", ground_truth="null"))
    assert checker.findings(items) == [None] * 7
    assert checker.num_judged == 1
    assert checker.unjudged == {gold.NO_GROUND_TRUTH: 2, gold.STRUCTURED: 3, gold.CODE: 1}


def test_mathematics_runs_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gold, "WRONG_SHARE", 1.0)  # Wrong answers for all.
    good = [
        r"\frac{1}{2}",
        r"$x^2 + 1$",
        r"(1, 2] \cup [3, \infty)",
        r"\left(1, 2\right]",
        "90^\\circ",
        [r"\frac{", "2^3"],
    ]
    items = [prompt(truth) for truth in [*good, r"\boxed{}"]]
    assert details(items) == [None] * len(good) + [READ]


def test_a_sample_of_mathematics_depends_on_the_text_alone() -> None:
    items = [prompt(rf"\sqrt{{{i + 2}}}") for i in range(40)]
    shares = []
    for order in (items, items[::-1]):
        checker = GoldChecker(math_share=0.1)
        assert not any(checker.findings(order))
        shares.append((checker.num_judged, checker.unjudged[gold.NOT_SAMPLED]))
    assert shares[0] == shares[1]
    assert 0 < shares[0][0] < 20
    assert sum(shares[0]) == 40


@pytest.mark.parametrize(
    ("cause", "detail", "unjudged"),
    [(Cause.TIMEOUT, None, {gold.TOO_SLOW: 1}), (Cause.ERROR, "the verifier fails on the ground truth", {})],
)
def test_no_verdict(cause: Cause, detail: str | None, unjudged: dict[str, int]) -> None:
    checker = GoldChecker()
    checker.rules[3] = lambda prompts, answers, context: Scores([None] * len(answers), [cause] * len(answers))
    (found,) = checker.findings([prompt(r"\sqrt{2}")])
    assert ((found and found.detail), dict(checker.unjudged)) == (detail, unjudged)


EXACT = ExactMatchReward(kind="exact_match")
MARKED = NumericMatchReward(kind="numeric_match", marker="####")
BOXED = NumericMatchReward(kind="numeric_match", marker=r"\boxed", extract_pattern="<answer>(.*)</answer>")
LOOSE = NumericMatchReward(kind="numeric_match", absolute_tolerance=1e12)


@pytest.mark.parametrize(
    ("reward", "reference", "detail"),
    [
        (EXACT, "Paris", None),
        (EXACT, "", BOTH),
        # The rule compares with the whole list as a text: no answer of it is ever right.
        (EXACT, ["Paris", "Rome"], NOT),
        (MARKED, 18, None),
        (MARKED, "so\n#### 18", None),
        (MARKED, "Paris", READ),
        (MARKED, True, READ),
        (BOXED, "18", None),
        (BOXED, r"so \boxed{18}", None),
        (LOOSE, 18, BOTH),
    ],
)
def test_the_rewards_of_the_config_are_asked(reward: Any, reference: Any, detail: str | None) -> None:
    # What the shape would say of the ground truth does not count.
    assert details([prompt("3/0", reference=reference)], reward) == [detail]


def test_each_reward_reads_its_own_column_and_all_must_accept() -> None:
    number = NumericMatchReward(kind="numeric_match", reference_key="value")
    items = [
        prompt(reference="a", value=1),
        prompt(reference="a", value="a"),
        prompt(reference="", value=1),
        prompt(reference="a"),
        prompt(),
    ]
    checker = GoldChecker([EXACT, number])
    found = [finding and finding.detail for finding in checker.findings(items)]
    assert found == [None, READ, BOTH, None, None]
    assert (checker.num_judged, checker.unjudged) == (4, {gold.NO_GROUND_TRUTH: 1})


def test_math_verify_of_the_config() -> None:
    reward = MathVerifyReward(kind="math_verify", reference_key="solution", extract_pattern="<a>(.*)</a>")
    truths = ["2x + 1", 7, r"\frac{1}{3}", "$ $"]
    assert details([prompt(solution=truth) for truth in truths], reward) == [None, None, None, READ]
    words = reward.model_copy(update={"reference_form": "text"})
    assert details([prompt(solution=truth) for truth in ("so $x = 2$", "no mathematics")], words) == [None, READ]


def test_findings_do_not_depend_on_chunks_or_repeats() -> None:
    truths = ["3/0", 18, "", "Paris", "3/0", 18, []] * 3
    items = [prompt(truth) for truth in truths]
    whole, parts = GoldChecker(), GoldChecker()
    expected = whole.findings(items)
    assert [finding for start in range(0, 21, 2) for finding in parts.findings(items[start : start + 2])] == expected
    assert (parts.num_judged, whole.num_judged) == (21, 21)


def test_no_value_is_quoted() -> None:
    secret = "sk-planted-4711/0"
    items = [prompt(truth) for truth in (f"\\frac{{{secret}", f"{secret}\n#### none", f"\\sqrt{secret}{{")]
    for finding in gold_findings(items):
        assert finding is not None
        assert "planted" not in finding.detail


def test_a_hundred_thousand_numbers_take_three_seconds() -> None:
    items = [prompt(str(i)) for i in range(20_000)]
    start = time.process_time()
    assert not any(GoldChecker().findings(items))
    # A fifth of the rows in a fifth of the time, and as much again for a busy machine.
    assert time.process_time() - start < 2 * 3.0 / 5


def test_shapes_are_found_in_linear_time() -> None:
    start = time.process_time()
    for text in ("{" * 200_000, "\\" * 200_000, "$" * 200_000, "1," * 100_000, "\\text{" * 50_000):
        shape_of(text)
        details([prompt(text)])
    assert time.process_time() - start < 2


def test_pass_rates() -> None:
    rows: list[dict[str, Any]] = [
        {"pass_rate": 0},
        {"pass_rate": 1.0},
        {"pass_rate": 0.5},
        {"pass_rates": [0, 0.0]},
        {"pass_rates": [1, 0]},
        {"pass_rates": {"small": 1, "large": 1}},
        {"num_correct": 0, "num_samples": 8},
        {"num_correct": 8, "num_samples": 8},
        {"num_correct": 3, "num_samples": 8},
        {"extra_info": {"pass_rate": 0.25, "index": 3}},
    ]
    unreadable: list[dict[str, Any]] = [
        {"pass_rate": 37},
        {"pass_rate": "0"},
        {"pass_rate": True},
        {"num_correct": 3},
        {"num_correct": 0, "num_samples": 0},
        {"pass_rates": [0, None]},
        {"pass_rates": []},
    ]
    items = [prompt(**row) for row in [*rows, *unreadable, {"answer": 1}]]
    rates = PassRates()
    rates.add(items)
    assert (rates.num_prompts, rates.num_known, rates.num_unusable, rates.num_unreadable) == (18, 10, 6, 7)
    assert rates.unusable_fraction() == (0.6, None)
    first, second = PassRates(), PassRates()
    first.add(items[:5])
    second.add(items[5:])
    first.merge(second)
    assert first == rates


def test_no_pass_rates() -> None:
    rates = PassRates()
    rates.add([prompt(answer="the pass_rate"), prompt()])
    assert rates.unusable_fraction() == (None, NO_PASS_RATES)
    assert NO_PASS_RATES.startswith("no pass rates in the data: ")
    rates.add([prompt(pass_rate=37)])
    value, why = rates.unusable_fraction()
    assert value is None
    assert why == "no pass rate from 0 to 1 in the data: 1 rows have a column of that name"
