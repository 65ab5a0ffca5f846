"""Tests of code: what is run, how tests add up, what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from training_core.config.verifiers import CodeTestsReward
from training_core.errors import ConfigurationError
from training_core.records import StopReason
from training_core.registries import REWARD_RULES
from training_core.rewards import sandbox
from training_core.rewards.base import Cause, RewardContext, Scores
from training_core.rewards.code_tests import CodeTest, code_of, read_tests, same_output
from training_core.rewards.sandbox import Sandbox, SandboxOutcome

FOUND_IN_MEMORY = """
import gc, os, re, sys
texts, frame = [], sys._getframe()
while frame:
    texts += [repr(dict(frame.f_locals)), repr(dict(frame.f_globals))]
    frame = frame.f_back
for found in gc.get_objects():
    if isinstance(found, (dict, list, tuple)):
        try: texts.append(repr(found))
        except Exception: pass
for text in re.findall("[0-9a-f]{32}", " ".join(texts)):
    os.write(3, text.encode())
    os._exit(0)
"""
"""Looks for what would prove that a check has passed."""
ADD = "```python\ndef add(a, b):\n    return a + b\n```"
ECHO = "```python\nprint(input()[::-1])\n```"
ECHO_TESTS = [{"stdin": "ab\n", "expected_stdout": "ba\n"}, {"stdin": "x\n", "expected_stdout": "y\n"}]


def judge(answers: list[str], tests: Any, **knobs: Any) -> Scores:
    # What is tested here does not need namespaces; test_rewards_sandbox.py does.
    config = CodeTestsReward.model_validate({"kind": "code_tests", "network": "allow", **knobs})
    size = len(answers)
    extras = [{} if tests is None else {config.tests_key: tests}] * size
    about = RewardContext([1] * size, [StopReason.EOS] * size, extras, max_new_tokens=16)
    found = REWARD_RULES["code_tests"](config)([[]] * size, answers, about)
    assert isinstance(found, Scores)
    return found


def test_share_of_tests_and_all_or_nothing() -> None:
    answers = [ADD, "```python\ndef add(a, b):\n    return 2\n```", "def add(a, b): return b + a", "no code"]
    tests = ["assert add(1, 1) == 2", "assert add(1, 2) == 3"]
    assert judge(answers, tests) == [1, 0.5, 1, 0]
    assert judge(answers, tests, score="all_or_nothing", tests_key="checks") == [1, 0, 1, 0]
    assert judge(answers[:1], tests[0]) == [1]


def test_programs_read_and_print() -> None:
    assert judge([ECHO, "print('ba')", "print('ba'); raise SystemExit(1)", "'"], ECHO_TESTS) == [0.5, 0.5, 0, 0]


def test_a_module_is_not_run_as_a_program_and_a_program_is() -> None:
    guarded = "def f(): return 1\nif __name__ == '__main__':\n    print(f() + int(input()))"
    assert judge([guarded], ["assert f() == 1", {"stdin": "2", "expected_stdout": "3"}]) == [1]


@pytest.mark.parametrize(
    "cheat",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "import sys; sys.exit()",
        "import os\nfor n in range(3, 20):\n    try: os.write(n, b'0' * 32)\n    except OSError: pass\nos._exit(0)",
        "import builtins; builtins.exec = lambda *a: None; import os; os.execv('/bin/true', ['true'])",
        "import builtins; builtins.exec = lambda *a: None",
        "import sys, os; f = sys._getframe(1); os.write(3, f.f_locals['proof'].encode()); os._exit(0)",
        FOUND_IN_MEMORY,
    ],
)
def test_code_that_ends_early_has_not_passed(cheat: str) -> None:
    assert judge([cheat], "assert add(1, 1) == 2", code="whole") == [0]


def test_an_assertion_that_fails_or_raises_has_not_passed() -> None:
    assert judge([ADD], ["assert add(1, 1) == 3", "undefined", "raise ValueError", "assert add(1, 1) == 2"]) == [0.25]


@pytest.mark.parametrize("tests", ["not a test", ["assert add(1, 1) == 2", "add("], [], [{"stdin": "1"}], 7])
def test_a_test_that_cannot_be_read_says_nothing_of_the_answer(tests: Any) -> None:
    """A fault of the data: a right answer must not score 0 for it."""
    found = judge([ADD], tests)
    assert found == [None]
    assert found.causes == [Cause.UNREADABLE_REFERENCE]


def test_a_time_out_is_missing_and_ends_the_answers_tests() -> None:
    slow = "```python\nimport time\nn = input()\nif n != 'x': time.sleep(60)\nprint('y')\n```"
    spin = "while True: pass"
    found = judge([slow, ECHO], ECHO_TESTS[::-1], timeout_seconds=3.0)
    assert found == [None, 0.5]
    assert found.causes == [Cause.TIMEOUT, None]
    assert judge([spin], ECHO_TESTS, timeout_seconds=30.0, max_cpu_seconds=1).causes == [Cause.TIMEOUT]


def test_a_failure_of_the_sandbox_is_missing_and_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([SandboxOutcome("ended", proved=True), SandboxOutcome("error", detail="broken")])
    monkeypatch.setattr(Sandbox, "run", lambda *arguments, **keywords: next(outcomes))
    found = judge([ADD], "assert add(1, 1) == 2")
    assert found == [None]
    assert found.causes == [Cause.ERROR]


@pytest.mark.parametrize(
    ("tests", "cause"),
    [
        (None, Cause.NO_REFERENCE),
        ([], Cause.UNREADABLE_REFERENCE),
        ([{"stdin": "1"}], Cause.UNREADABLE_REFERENCE),
        ([{"expected_stdout": "1", "timeout": 3}], Cause.UNREADABLE_REFERENCE),
        ([{"expected_stdout": "1", "stdin": 1}], Cause.UNREADABLE_REFERENCE),
        (["  "], Cause.UNREADABLE_REFERENCE),
        (7, Cause.UNREADABLE_REFERENCE),
    ],
)
def test_rows_without_usable_tests_are_missing_whatever_the_answer(tests: Any, cause: Cause) -> None:
    found = judge([ADD, "no code at all"], tests, code="fenced")
    assert found == [None, None]
    assert found.causes == [cause] * 2


def test_tests_as_rows_hold_them() -> None:
    one = {"expected_stdout": "1"}
    assert read_tests(one) == [CodeTest(expected_stdout="1")]
    assert read_tests([{**one, "stdin": None}, "assert f()"]) == [
        CodeTest(expected_stdout="1"),
        CodeTest(check="assert f()"),
    ]


@pytest.mark.parametrize(
    ("answer", "fenced", "fenced_or_whole"),
    [
        ("x = 1", None, "x = 1"),
        ("Here:\n```python\nx = 1\n```\ndone", "x = 1\n", "x = 1\n"),
        ("```\nx = 1\n```\n```\nx = 2\n```", "x = 2\n", "x = 2\n"),
        ("```py\nx = 1\n```\nIt prints\n```text\n1\n```", "x = 1\n", "x = 1\n"),
        ("1.\n   ```Python title\n   x = 1\n   ```", "x = 1\n", "x = 1\n"),
        ("```python\nx = 1", "x = 1", "x = 1"),
        ("use `x`", None, "use `x`"),
    ],
)
def test_which_code_is_run(answer: str, fenced: str | None, fenced_or_whole: str) -> None:
    assert code_of(answer, "fenced") == fenced
    assert code_of(answer, "fenced_or_whole") == fenced_or_whole
    assert code_of(answer, "whole") == answer


def test_output_is_compared_by_lines() -> None:
    assert same_output("a \r\nb\n\n", "a\nb")
    assert not same_output("a\n\nb", "a\nb")
    assert not same_output("a", "a\nb")
    assert same_output("", "\n")


def test_where_the_kernel_refuses_the_config_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def run(self: Sandbox, code: str, **keywords: Any) -> SandboxOutcome:
        tried.append(self.isolated)
        refused = SandboxOutcome("refused", detail="unshare: Operation not permitted")
        return refused if self.isolated else SandboxOutcome("ended", proved=True)

    monkeypatch.setattr(Sandbox, "run", run)
    with pytest.raises(ConfigurationError, match=r"unshare: Operation not permitted.*network: allow"):
        judge([ADD], "assert True", network="require_isolation")
    tried.clear()
    assert judge([ADD], "assert True", network="allow") == [1]
    assert tried == [True, False, False]


def test_limits_within_which_nothing_runs_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sandbox, "run", lambda *arguments, **keywords: SandboxOutcome("timeout"))
    with pytest.raises(ConfigurationError, match=r"does not run in the sandbox of code_tests \(timeout"):
        judge([ADD], "assert True")


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(ConfigurationError, match="needs Linux"):
        judge([ADD], "assert True")
