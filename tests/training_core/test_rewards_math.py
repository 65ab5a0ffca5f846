"""math-verify in processes of its own: order of arguments, causes, time-outs off the main thread."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from training_core.config.verifiers import MathVerifyReward
from training_core.errors import ConfigurationError, TemporaryError
from training_core.records import StopReason
from training_core.registries import REWARD_RULES
from training_core.rewards import mathematics
from training_core.rewards.base import Cause, RewardContext, RewardFunction, Scores
from training_core.rewards.math_worker import Verdict, compare
from training_core.rewards.worker_pool import WorkerPool

ENDLESS = "$9^{9^{9^{9}}}$"


def rule(**knobs: Any) -> RewardFunction:
    return REWARD_RULES["math_verify"](MathVerifyReward(kind="math_verify", **knobs))


def judge(function: RewardFunction, answers: list[str], references: list[Any]) -> Scores:
    size = len(answers)
    extras = [{} if reference is None else {"reference": reference} for reference in references]
    found = function([[]] * size, answers, RewardContext([1] * size, [StopReason.EOS] * size, extras, 16))
    assert isinstance(found, Scores)
    return found


@pytest.fixture(scope="module")
def shared() -> RewardFunction:
    return rule()


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("$1 < x < 2$", "$(1, 2)$", Verdict.EQUAL),
        ("$(1, 2)$", "$1 < x < 2$", Verdict.DIFFERENT),
        ("no mathematics", "$1$", Verdict.UNREADABLE_GOLD),
        ("$1$", "no mathematics", Verdict.UNREADABLE_ANSWER),
    ],
)
def test_the_reference_comes_first(gold: str, answer: str, expected: Verdict) -> None:
    """The library compares an interval with a chain of inequalities in one order only."""
    assert compare(gold, answer) == expected


def test_scores(shared: RewardFunction) -> None:
    answers = [r"so $\frac{1}{2}$", r"\boxed{x+x}", "$2$", "I do not know", "$(1, 2)$", "$1 < x < 2$"]
    references = ["0.5", "2x", "2x", "2", "1 < x < 2", "(1, 2)"]
    assert judge(shared, answers, references) == [1, 1, 0, 0, 1, 0]


def test_missing_references_are_told_apart(shared: RewardFunction) -> None:
    found = judge(shared, ["$1$", "$1$", "$1$"], [None, "", 1])
    assert found == [None, None, 1]
    assert found.causes == [Cause.NO_REFERENCE, Cause.UNREADABLE_REFERENCE, None]


def test_an_expression_is_read_whole_and_words_for_the_number_in_them() -> None:
    """Without a mark the library would find only the 2 in 2x, and reward the answer 2."""
    answers, references = ["$2$", "$2x$", "$7$"], ["2x", "2x", "apples then 7"]
    assert judge(rule(reference_form="expression"), answers, references) == [0, 1, 0]
    assert judge(rule(reference_form="text"), answers, references) == [1, 0, 1]


def test_what_is_extracted_is_read_as_the_reference_is() -> None:
    function = rule(extract_pattern="<answer>(.*?)</answer>")
    assert judge(function, ["<answer>2x</answer>", "<answer>2</answer>", "2x"], ["2x"] * 3) == [1, 0, 0]


def test_a_time_out_off_the_main_thread_is_missing_and_the_rest_goes_on() -> None:
    function, found = rule(timeout_seconds=3.0, num_workers=1), []
    answers = ["$1$", ENDLESS, "$2$"]
    thread = threading.Thread(target=lambda: found.append(judge(function, answers, ["1", "9", "2"])))
    thread.start()
    thread.join(60)
    assert found == [[1, None, 1]]
    assert found[0].causes == [None, Cause.TIMEOUT, None]


def test_a_comparison_that_fails_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify

    def fail(*arguments: Any, **keywords: Any) -> bool:
        raise MemoryError

    monkeypatch.setattr(math_verify, "verify", fail)
    assert compare("$1$", "$2$") == Verdict.ERROR
    monkeypatch.setattr(math_verify, "parse", fail)
    assert compare("$1$", "$2$") == Verdict.ERROR


def test_without_the_package_the_config_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install math-verify"):
        rule()


WORKER = """
import json, os, sys, time
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request == "die":
        os._exit(1)
    if request == "sleep":
        time.sleep(60)
    print(json.dumps([os.getpid(), request]), flush=True)
"""


@pytest.fixture
def pool(tmp_path: Path) -> WorkerPool:
    (tmp_path / "worker.py").write_text(WORKER)
    return WorkerPool([sys.executable, "-S", str(tmp_path / "worker.py")], {}, num_workers=1)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_is_kept_until_it_fails_or_is_late(pool: WorkerPool) -> None:
    [[first, one], [same, two]] = pool.map(["a", "b"], 10.0)
    assert (one, two, same) == ("a", "b", first)
    started = time.monotonic()
    late, [second, three] = pool.map(["sleep", "c"], 0.3)
    assert time.monotonic() - started < 10
    assert (late, three) == (Cause.TIMEOUT, "c")
    assert second != first
    dead, [third, four] = pool.map(["die", "d"], 10.0)
    assert (dead, four) == (Cause.ERROR, "d")
    assert [is_alive(pid) for pid in (first, second, third)] == [False, False, True]
    assert pool.map([], 1.0) == []


def test_processes_end_with_the_pool(pool: WorkerPool) -> None:
    own = WorkerPool(pool.command, {}, num_workers=2)
    pids = {pid for pid, _ in own.map(["a", "b"], 10.0)}
    del own
    gc.collect()
    assert not any(is_alive(pid) for pid in pids)


def test_a_process_that_does_not_start_says_so(tmp_path: Path) -> None:
    own = WorkerPool([sys.executable, "-c", "raise SystemExit(3)"], {}, num_workers=1)
    with pytest.raises(TemporaryError, match="did not start"):
        own.map(["a"], 1.0)
