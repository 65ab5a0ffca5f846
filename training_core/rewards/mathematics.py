"""Equality of mathematics, as math-verify finds it."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from training_core.config.verifiers import MathVerifyReward
from training_core.errors import ConfigurationError
from training_core.records import Message
from training_core.rewards.base import Cause, RewardContext, RewardFunction, Scores
from training_core.rewards.matching import Judgement, as_scores, extract, extract_pattern
from training_core.rewards.math_worker import Verdict
from training_core.rewards.worker_pool import WorkerPool

MARKS = ("$", r"\boxed", r"\(", r"\[", r"\begin")
"""What shows math-verify where mathematics starts."""
PASSED_ON = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG")

JUDGEMENTS: dict[Any, Judgement] = {
    Verdict.EQUAL: 1.0,
    Verdict.DIFFERENT: 0.0,
    Verdict.UNREADABLE_ANSWER: 0.0,
    Verdict.UNREADABLE_GOLD: Cause.UNREADABLE_REFERENCE,
    Verdict.ERROR: Cause.ERROR,
    Cause.ERROR: Cause.ERROR,
    Cause.TIMEOUT: Cause.TIMEOUT,
}


def as_expression(text: str) -> str:
    r"""Return a text that is read as one expression; without marks, only a number in it might be.

    >>> as_expression("2x"), as_expression(r"so \boxed{2x}"), as_expression("")
    ('$2x$', 'so \\boxed{2x}', '')
    """
    return text if not text.strip() or any(mark in text for mark in MARKS) else f"${text.strip()}$"


def new_pool(config: MathVerifyReward) -> WorkerPool:
    command = [sys.executable, "-m", "training_core.rewards.math_worker", str(config.max_memory_bytes)]
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    # The worker finds this package where this process found it; the same order of hashing gives the same verdicts.
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [package_root, environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONHASHSEED": "0"}
    return WorkerPool(command, environment, config.num_workers)


def build_math_verify(config: MathVerifyReward) -> RewardFunction:
    """Return the rule; its processes start with the first answer and end with the returned function.

    Raises:
        ConfigurationError: math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigurationError("the reward math_verify needs the package math-verify: `pip install math-verify`")
    pool, pattern = new_pool(config), extract_pattern(config)

    def form(text: str) -> str:
        return as_expression(text) if config.reference_form == "expression" else text

    def request(answer: str, reference: Any) -> dict[str, Any]:
        text = extract(answer, pattern) or ""
        shown = text if pattern is None else form(text)
        alarm = math.ceil(2 * config.timeout_seconds) + 1
        return {"gold": form(str(reference)), "answer": shown, "alarm_seconds": alarm}

    def score(prompts: Sequence[Sequence[Message]], answers: Sequence[str], context: RewardContext) -> Scores:
        references = [extra.get(config.reference_key) for extra in context.extras]
        requests = [
            request(answer, reference)
            for answer, reference in zip(answers, references, strict=True)
            if reference is not None
        ]
        replies = iter(pool.map(requests, config.timeout_seconds, context.poll))
        return as_scores(
            [Cause.NO_REFERENCE if reference is None else JUDGEMENTS[next(replies)] for reference in references]
        )

    return score
