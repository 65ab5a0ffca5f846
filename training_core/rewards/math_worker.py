"""A process that compares mathematics: `python -m training_core.rewards.math_worker MAX_MEMORY_BYTES`.

One JSON object a line on standard input, `{"gold": text, "answer": text, "alarm_seconds": n}`, one JSON text a line
back: a `Verdict`. The first line out is `"ready"`. The library's own time-outs are off: whoever started this process
ends it when it takes too long; the alarm is for the case that nobody is left who would.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What comparing found."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNREADABLE_GOLD = "unreadable_gold"
    """No expression in the reference."""
    UNREADABLE_ANSWER = "unreadable_answer"
    """No expression in the answer."""
    ERROR = "error"
    """The library failed, so nothing is known."""


def compare(gold: str, answer: str) -> Verdict:
    r"""Return whether math-verify finds `answer` equal to `gold`. The order matters to it.

    A pair of readings that fails does not hide another one that is equal.

    >>> compare("$1 < x < 2$", "$(1, 2)$"), compare("$(1, 2)$", "$1 < x < 2$")
    (<Verdict.EQUAL: 'equal'>, <Verdict.DIFFERENT: 'different'>)
    """
    from math_verify import parse

    try:
        golds = read(parse, gold)
        if not golds:
            return Verdict.UNREADABLE_GOLD
        answers = read(parse, answer)
    except Exception:  # Whatever the parser raises, MemoryError and RecursionError too: nothing is known then.
        return Verdict.ERROR
    if not answers:
        return Verdict.UNREADABLE_ANSWER
    found = [equal(one, other) for one in golds for other in answers]
    if True in found:
        return Verdict.EQUAL
    return Verdict.ERROR if None in found else Verdict.DIFFERENT


def read(parse: Any, text: str) -> list[Any]:
    """Return the readings of a text: with nothing that looks like mathematics, none."""
    return list(parse(text, parsing_timeout=None, raise_on_error=True))


def equal(gold: Any, answer: Any) -> bool | None:
    """Return whether two readings are equal; None when comparing failed."""
    from math_verify import verify

    try:
        return bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True))
    except Exception:
        return None


def main() -> None:
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # The library may print; answers to the parent have a descriptor of their own.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # It warns once that its time-outs are off, which is meant.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    compare("$1$", "$1$")  # Loads what the first comparison would wait for.
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(request["alarm_seconds"])
        verdict = compare(request["gold"], request["answer"])
        signal.alarm(0)
        print(json.dumps(verdict.value), file=replies, flush=True)


if __name__ == "__main__":
    main()
