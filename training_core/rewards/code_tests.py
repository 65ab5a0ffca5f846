"""Code in answers, held to the row's tests."""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, Literal

from training_core.config.verifiers import CodeTestsReward
from training_core.records import Message
from training_core.rewards.base import Cause, RewardContext, RewardFunction, Scores
from training_core.rewards.matching import Judgement, as_scores
from training_core.rewards.polling import map_polled
from training_core.rewards.sandbox import Sandbox

logger = logging.getLogger(__name__)

FENCE = re.compile(r"^[ \t]*```[ \t]*(?P<language>[\w+-]*)[^\n`]*\n(?P<code>.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.M | re.S)
PYTHON = ("python", "python3", "py")
TEST_KEYS = {"stdin", "expected_stdout"}


@dataclass(frozen=True)
class CodeTest:
    """One test: either what a program prints for an input, or code that checks it."""

    stdin: str = ""
    expected_stdout: str | None = None
    check: str | None = None


def fenced_code(answer: str) -> str | None:
    r"""Return the last fenced block marked as Python, else the last one; None without any.

    One that is left open ends with the answer. One that is indented as a whole, as in a list, loses that.

    >>> fenced_code("a\n```python\nx = 1\n```\nprints\n```\n1\n```\n"), fenced_code("```\ny"), fenced_code("x = 1")
    ('x = 1\n', 'y', None)
    """
    blocks = [(match["language"].lower(), textwrap.dedent(match["code"])) for match in FENCE.finditer(answer)]
    marked = [code for language, code in blocks if language in PYTHON]
    found = marked or [code for _, code in blocks]
    return found[-1] if found else None


def code_of(answer: str, code: Literal["fenced", "fenced_or_whole", "whole"]) -> str | None:
    """Return what is run of an answer; None when it has no code."""
    if code == "whole":
        return answer
    found = fenced_code(answer)
    return answer if found is None and code == "fenced_or_whole" else found


def read_tests(value: Any) -> list[CodeTest] | None:
    """Return a row's tests; None when they cannot be read.

    >>> read_tests("assert f(1) == 2")
    [CodeTest(stdin='', expected_stdout=None, check='assert f(1) == 2')]
    >>> read_tests([{"stdin": "1", "expected_stdout": "2"}, {"stdin": "1"}]), read_tests([])
    (None, None)
    >>> read_tests("not a test"), read_tests(["assert f(1) =="])
    (None, None)
    """
    values = value if isinstance(value, list) else [value]
    tests = []
    for test in values:
        if isinstance(test, str) and test.strip():
            if not is_python(test):
                return None
            tests.append(CodeTest(check=test))
        elif isinstance(test, dict) and set(test) <= TEST_KEYS and isinstance(test.get("expected_stdout"), str):
            # A missing column of a table reads as None.
            stdin = test.get("stdin") or ""
            if not isinstance(stdin, str):
                return None
            tests.append(CodeTest(stdin=stdin, expected_stdout=test["expected_stdout"]))
        else:
            return None
    return tests or None


def is_python(text: str) -> bool:
    """Return whether a snippet can be compiled: a test that cannot is a fault of the data, not of the answer."""
    try:
        compile(text, "test", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def same_output(output: str, expected: str) -> bool:
    r"""Return whether two outputs agree but for white space at line ends and empty lines at the end.

    >>> same_output("1 \n2\n\n", "1\n2"), same_output("1 2", "1\n2"), same_output(" 1", "1")
    (True, False, False)
    """

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().split("\n")]

    return lines(output) == lines(expected)


def passed(test: CodeTest, code: str, sandbox: Sandbox, stop: Event) -> bool | Cause:
    """Return whether code passes one test, or why that is not known."""
    outcome = sandbox.run(code, stdin=test.stdin, check=test.check, stop=stop)
    if outcome.status == "timeout":
        return Cause.TIMEOUT
    if outcome.status in ("error", "refused"):
        logger.warning("the sandbox failed: %s", outcome.detail)
        return Cause.ERROR
    if outcome.status == "limit":
        return False
    if test.expected_stdout is None:
        return outcome.proved
    return outcome.detail == "0" and same_output(outcome.output, test.expected_stdout)


def judge_code(code: str | None, value: Any, sandbox: Sandbox, config: CodeTestsReward, stop: Event) -> Judgement:
    """Return an answer's score, or why it has none.

    Args:
        code: None when the answer has none.
        value: the row's tests as they stand in `extra`.
        sandbox: runs the code.
        config: how tests add up.
        stop: ends a test under way.

    Raises:
        StoppedError: `stop` is set.
    """
    if value is None:
        return Cause.NO_REFERENCE
    tests = read_tests(value)
    if tests is None:
        return Cause.UNREADABLE_REFERENCE
    if code is None:
        return 0.0
    num_passed = 0
    for test in tests:
        found = passed(test, code, sandbox, stop)
        if isinstance(found, Cause):
            return found
        num_passed += found
    return num_passed / len(tests) if config.score == "share" else float(num_passed == len(tests))


def build_code_tests(config: CodeTestsReward) -> RewardFunction:
    """Return the rule.

    Raises:
        ConfigurationError: the sandbox does not work here.
    """
    sandbox = Sandbox(config)

    def one(item: tuple[str, dict[str, Any]], stop: Event) -> Judgement:
        answer, extra = item
        return judge_code(code_of(answer, config.code), extra.get(config.tests_key), sandbox, config, stop)

    def score(prompts: Sequence[Sequence[Message]], answers: Sequence[str], context: RewardContext) -> Scores:
        items = list(zip(answers, context.extras, strict=True))
        return as_scores(map_polled(one, items, config.num_workers, context.poll, "code-tests"))

    return score
