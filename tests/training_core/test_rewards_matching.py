"""Numbers, extraction, sections: read as people write them."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from training_core.config.rewards import RewardConfig
from training_core.records import Message, StopReason
from training_core.registries import REWARD_RULES
from training_core.rewards.base import Cause, RewardContext, Scores
from training_core.rewards.number_text import braced, nearly_equal, number_at, numbers_in

CONFIGS: TypeAdapter[Any] = TypeAdapter(RewardConfig)
MISSING = object()


def judge(config: dict[str, Any], answers: list[str], reference: Any = MISSING) -> Scores:
    parsed = CONFIGS.validate_python(config)
    extra = {} if reference is MISSING else {"reference": reference}
    size = len(answers)
    about = RewardContext([1] * size, [StopReason.EOS] * size, [extra] * size, max_new_tokens=16)
    found = REWARD_RULES[parsed.kind](parsed)([[Message(role="user", content="?")]] * size, answers, about)
    return found if isinstance(found, Scores) else Scores(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", "42"),
        ("-42.", "-42"),
        ("+4", "4"),
        ("−4", "-4"),
        ("it is 1,234,567.5 in all", "2469135/2"),
        ("1{,}234", "1234"),
        (r"1\,234", "1234"),
        ("$1,000", "1000"),
        (r"-\$3.50", "-7/2"),
        ("€7", "7"),
        (".5", "1/2"),
        ("50%", "1/2"),
        (r"12.5\%", "1/8"),
        ("3/4", "3/4"),
        ("-3 / 4", "-3/4"),
        (r"\frac{3}{4}", "3/4"),
        (r"-\dfrac{3}{4}", "-3/4"),
        (r"\tfrac{-1,000}{3}", "-1000/3"),
        ("1.5e-3", "3/2000"),
        ("2E3", "2000"),
        (r"2 \times 10^{-2}", "1/50"),
        ("6.02×10^3", "6020"),
        ("7 * 10**2", "700"),
        ("5km", "5"),
        ("x=-5", "-5"),
        ("10-5", "5"),
        ("1,2", "2"),
        ("12,34", "34"),
        ("007", "7"),
    ],
)
def test_numbers_as_people_write_them(text: str, expected: str) -> None:
    assert numbers_in(text)[-1] == Fraction(expected)


@pytest.mark.parametrize("text", ["", "none", "H2", "x_1", "1/0", "1e999999999", "9" * 401, r"\frac{1}{0}", "v1.2"])
def test_what_is_no_number(text: str) -> None:
    assert numbers_in(text) == []


@given(st.text(alphabet=st.characters(codec="utf-8")) | st.text(alphabet="0123456789.,-+/eE%\\{}^*x $×"))
def test_any_text_can_be_read(text: str) -> None:
    for marker in (None, "####", r"\boxed"):
        number_at(text, marker, "hundredth")
    assert all(isinstance(value, Fraction) for value in numbers_in(text))


@given(st.integers(-(10**30), 10**30), st.integers(0, 6))
def test_printed_numbers_come_back(number: int, decimals: int) -> None:
    value = Fraction(number, 10**decimals)
    digits = f"{abs(number):0{decimals + 1}d}"
    whole, part = digits[: len(digits) - decimals], digits[len(digits) - decimals :]
    text = f"{'-' if number < 0 else ''}{int(whole):,}{'.' + part if part else ''}"
    assert numbers_in(f"so {text} it is") == [value]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_shortest_text_of_a_float_is_that_float(value: float) -> None:
    [found] = numbers_in(repr(value))
    assert float(found) == value


def test_where_the_number_stands() -> None:
    text = r"first 1, \boxed{x_2 = 3}, #### 4 and 5"
    assert [number_at(text, marker, "ignore") for marker in (None, "####", r"\boxed", "Answer:")] == [5, 4, 3, None]
    assert number_at(r"\boxed{} 7", r"\boxed", "ignore") is None
    assert number_at("#### 1 #### 2", "####", "ignore") == 2
    assert braced(r"\boxed{a{b}c} \boxed{1") is None


@given(st.fractions(), st.fractions(), st.floats(0, 1e3), st.floats(0, 0.99))
def test_tolerances_as_math_isclose_but_exact(value: Fraction, reference: Fraction, a: float, r: float) -> None:
    expected = abs(value - reference) <= max(Fraction(a), Fraction(r) * abs(reference))
    assert nearly_equal(value, reference, absolute=a, relative=r) == expected
    assert nearly_equal(reference, reference, absolute=0.0, relative=0.0)


def test_numeric_match() -> None:
    rule = {"kind": "numeric_match"}
    assert judge(rule, ["it is 42", "42.0", "41", "no number", ""], "42") == [1, 1, 0, 0, 0]
    assert judge(rule, ["1/3", "0.3333", "0.333333333333"], "1/3") == [1, 0, 1]
    assert judge({**rule, "absolute_tolerance": 0.01}, ["0.3333", "0.34"], "1/3") == [1, 1]
    assert judge({**rule, "relative_tolerance": 0.1}, ["110", "111", "90"], 100) == [1, 0, 1]
    assert judge(rule, ["100000000000000000001"], "100000000000000000000") == [1]
    assert judge({**rule, "relative_tolerance": 0.0}, ["100000000000000000001"], "100000000000000000000") == [0]


def test_references_may_be_numbers_or_texts() -> None:
    marked = {"kind": "numeric_match", "marker": "####"}
    assert judge(marked, ["#### 5", "5"], "2 + 3 = 5\n#### 5, not 6") == [1, 0]
    assert judge(marked, ["#### 5"], 5) == [1]
    assert judge({"kind": "numeric_match"}, ["0.1"], 0.1) == [1]
    assert judge({"kind": "numeric_match", "percent": "ignore"}, ["50%", "0.5"], "50") == [1, 0]
    assert judge({"kind": "numeric_match"}, ["50%", "50"], "0.5") == [1, 0]


@pytest.mark.parametrize("kind", ["exact_match", "numeric_match"])
def test_no_reference_is_missing_whatever_the_answer(kind: str) -> None:
    pattern = {"kind": kind, "extract_pattern": "<(.*)>"}
    found = judge(pattern, ["<1>", "nothing"])
    assert found == [None, None]
    assert found.causes == [Cause.NO_REFERENCE] * 2


@pytest.mark.parametrize("reference", ["no number", "", True, math.nan])
def test_a_reference_without_a_number_is_missing_and_counted(reference: Any) -> None:
    found = judge({"kind": "numeric_match", "extract_pattern": "<(.*)>"}, ["<1>", "nothing"], reference)
    assert found == [None, None]
    assert found.causes == [Cause.UNREADABLE_REFERENCE] * 2


def test_what_is_extracted_is_compared() -> None:
    rule = {"kind": "exact_match", "extract_pattern": "<answer>(.*?)</answer>"}
    answers = ["I think <answer> red\n</answer>", "red", "<answer>red</answer> or <answer>blue</answer>"]
    assert judge(rule, answers, "red") == [1, 0, 0]
    numeric = {"kind": "numeric_match", "extract_pattern": "<answer>(.*?)</answer>"}
    assert judge(numeric, ["<answer>7 apples</answer> of 9", "7"], 7) == [1, 0]
    optional = {"kind": "exact_match", "extract_pattern": "a(b)?"}
    assert judge(optional, ["a", "ab"], "b") == [0, 1]


TAGS = [{"start": "<think>", "end": "</think>"}, {"start": "<answer>", "end": "</answer>"}]


@pytest.mark.parametrize(
    ("answer", "strict", "loose"),
    [
        ("<think>a</think><answer>b</answer>", 1, 1),
        ("<think>a</think>\n\n<answer>\nb\n</answer>\n", 1, 1),
        ("well <think>a</think><answer>b</answer>", 0, 1),
        ("<think>a</think> so <answer>b</answer>", 0, 1),
        ("<think>a</think><answer>b</answer>!", 0, 1),
        ("<answer>b</answer><think>a</think>", 0, 0),
        ("<think>a<answer>b</answer></think>", 0, 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0, 0),
        ("<think>a</think><answer>b", 0, 0),
        ("<think></think><answer>b</answer>", 0, 0),
        ("</think>a<think><answer>b</answer>", 0, 0),
        ("", 0, 0),
    ],
)
def test_sections_in_order_exactly_once(answer: str, strict: float, loose: float) -> None:
    rule = {"kind": "format", "sections": TAGS}
    assert judge(rule, [answer]) == [strict]
    assert judge({**rule, "text_outside": True}, [answer]) == [loose]


def test_sections_without_an_end_run_to_the_next() -> None:
    rule = {"kind": "format", "sections": [{"start": "Steps:"}, {"start": "Result:"}]}
    answers = ["Steps: a\nResult: b", "Steps: Result: b", "Result: b Steps: a", "Steps: a", "x Steps: a Result: b"]
    assert judge(rule, answers) == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"kind": "format", "sections": []}, "at least 1"),
        ({"kind": "format", "sections": [{"start": "#"}, {"start": "##"}]}, "occurs in another marker"),
        ({"kind": "format", "sections": [{"start": "#"}, {"start": "#"}]}, "occurs in another marker"),
        ({"kind": "exact_match", "extract_pattern": "no group"}, "needs a group"),
        ({"kind": "numeric_match", "extract_pattern": "("}, "not a regular expression"),
        ({"kind": "numeric_match", "absolute_tolerance": -1.0}, "greater than or equal to 0"),
    ],
)
def test_bad_configs_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        CONFIGS.validate_python(config)
