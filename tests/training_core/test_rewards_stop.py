"""A stop request while rewards are scored is seen within a second or so, and leaves no process behind."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from local_scorer import local_scorer
from policy_trainers import answers_of, build_trainer

from training_core.config.verifiers import CodeTestsReward, HttpReward, MathVerifyReward
from training_core.records import StopReason
from training_core.registries import REWARD_RULES
from training_core.rewards import mathematics, sandbox
from training_core.rewards.base import RewardContext
from training_core.rewards.combine import RewardPart, score_answers
from training_core.rewards.polling import map_polled
from training_core.rewards.worker_pool import WorkerPool
from training_core.rollout.scripted import ScriptedEngine

QUICK_SECONDS = 15.0
"""Far below what would be waited for without a stop, far above what a busy machine takes."""


class AskedToStopError(Exception):
    """What a stop request raises."""


class Poll:
    """Raises once `is_time` holds, and counts."""

    def __init__(self, is_time: Callable[[], bool]) -> None:
        self.is_time = is_time
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        if self.is_time():
            raise AskedToStopError


def about(size: int, poll: Callable[[], None], extra: dict[str, Any] | None = None) -> RewardContext:
    return RewardContext([1] * size, [StopReason.EOS] * size, [extra or {}] * size, 16, poll=poll)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the processes that sandboxes start from now on."""
    found: list[Any] = []
    original = sandbox.subprocess.Popen

    def spy(*arguments: Any, **keywords: Any) -> Any:
        found.append(original(*arguments, **keywords))
        return found[-1]

    monkeypatch.setattr(sandbox.subprocess, "Popen", spy)
    return found


def test_code_under_test_is_ended(started: list[Any]) -> None:
    config = CodeTestsReward(kind="code_tests", network="allow", timeout_seconds=60.0)
    rule = REWARD_RULES["code_tests"](config)
    num_probes = len(started)
    poll = Poll(lambda: len(started) >= num_probes + 2)
    answers = ["import time; time.sleep(60)"] * 6
    begun = time.monotonic()
    with pytest.raises(AskedToStopError):
        rule([[]] * 6, answers, about(6, poll, {"tests": ["assert True", "assert True"]}))
    assert time.monotonic() - begun < QUICK_SECONDS
    # Two at the same time, and no other test of theirs and no other answer after the stop.
    assert len(started) == num_probes + 2
    assert [process.poll() is None for process in started] == [False] * len(started)


WORKER = """
import json, os, pathlib, sys, time
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    pathlib.Path(sys.argv[1], str(os.getpid())).touch()
    if request == "sleep":
        time.sleep(60)
    print(json.dumps(os.getpid()), flush=True)
"""


def test_workers_are_ended_busy_and_idle(tmp_path: Path) -> None:
    script, seen = tmp_path / "worker.py", tmp_path / "seen"
    script.write_text(WORKER)
    seen.mkdir()
    pool = WorkerPool([sys.executable, "-S", str(script), str(seen)], {}, num_workers=2)
    pool.map(["a", "b"], 10.0)
    poll = Poll(lambda: len(list(seen.iterdir())) > num_before)
    num_before = 1 << 20
    assert pool.map(["c"] * 3, 10.0, poll)
    assert poll.num_calls >= 3
    num_before = 0
    begun = time.monotonic()
    with pytest.raises(AskedToStopError):
        pool.map(["c", "sleep", "sleep", "c"], 60.0, poll)
    assert time.monotonic() - begun < QUICK_SECONDS
    assert [is_alive(int(path.name)) for path in seen.iterdir()] == [False] * len(list(seen.iterdir()))
    # The pool is as good as new.
    assert len(pool.map(["d"], 10.0)) == 1


def test_a_worker_that_does_not_get_ready_is_ended(tmp_path: Path) -> None:
    pool = WorkerPool([sys.executable, "-S", "-c", "import time; time.sleep(60)"], {}, num_workers=1)
    begun = time.monotonic()
    with pytest.raises(AskedToStopError):
        pool.map(["a"], 60.0, Poll(lambda: time.monotonic() - begun > 0.5))
    assert time.monotonic() - begun < QUICK_SECONDS


def test_mathematics_passes_the_poll_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(self: WorkerPool, requests: Sequence[Any], timeout_seconds: float, poll: Any) -> list[Any]:
        seen.append(poll)
        return ["equal"] * len(requests)

    monkeypatch.setattr(WorkerPool, "map", spy)
    monkeypatch.setattr(mathematics, "JUDGEMENTS", {"equal": 1.0})
    poll = Poll(lambda: False)
    rule = REWARD_RULES["math_verify"](MathVerifyReward(kind="math_verify"))
    assert rule([[]], ["$1$"], about(1, poll, {"reference": "1"})) == [1.0]
    assert seen == [poll]


def http_rule(url: str, **knobs: Any) -> Any:
    return REWARD_RULES["http"](HttpReward.model_validate({"kind": "http", "url": url, **knobs}))


def test_a_scorer_elsewhere_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with local_scorer() as server:
        poll = Poll(lambda: len(server.requests) == 2)
        with pytest.raises(AskedToStopError):
            http_rule(server.url, batch_size=1)([[]] * 5, ["a"] * 5, about(5, poll))
        assert len(server.requests) == 2
        # Asked to wait a minute.
        server.requests.clear()
        server.reply = lambda items: (503, {"Retry-After": "60"}, b"busy")
        poll, begun = Poll(lambda: len(server.requests) == 1), time.monotonic()
        with pytest.raises(AskedToStopError):
            http_rule(server.url)([[]], ["a"], about(1, poll))
        assert time.monotonic() - begun < QUICK_SECONDS
        assert len(server.requests) == 1


def test_parts_are_polled_between() -> None:
    called: list[str] = []

    def part(name: str) -> RewardPart:
        return RewardPart(name, 1.0, lambda prompts, answers, context: called.append(name) or [1.0])

    with pytest.raises(AskedToStopError):
        score_answers([part("a"), part("b")], [[]], ["x"], about(1, Poll(lambda: called == ["a"])))
    assert called == ["a"]


def test_the_first_failure_ends_the_work_and_is_what_is_raised() -> None:
    done: list[int] = []

    def work(item: int, stop: Any) -> int:
        done.append(item)
        if item == 1:
            raise ValueError("one")
        return item

    with pytest.raises(ValueError, match="one"):
        map_polled(work, range(100), 1, lambda: None, "test")
    assert done[:2] == [0, 1]
    assert map_polled(work, [3, 2], 2, lambda: None, "test") == [3, 2]
    assert map_polled(work, [], 2, lambda: None, "test") == []


def test_a_step_gives_rewards_its_poll(tiny_checkpoint: Path, rl_stage: Any) -> None:
    trainer = build_trainer(tiny_checkpoint, rl_stage.prompts, rl_stage.config(), ScriptedEngine(answers_of, []))
    sampler, seen, requested = trainer.sampler, [], False

    def poll() -> None:
        if requested:
            raise AskedToStopError

    def asked_while_scoring(prompts: Any, answers: Sequence[str], context: RewardContext) -> list[float]:
        nonlocal requested
        requested = True
        context.poll()
        seen.append(len(answers))
        return [0.0] * len(answers)

    sampler.poll, sampler.rewards = poll, [RewardPart("slow", 1.0, asked_while_scoring)]
    with pytest.raises(AskedToStopError):
        trainer.train_step(1)
    assert seen == []
