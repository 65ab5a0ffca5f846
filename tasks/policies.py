"""Which failures of a stage are tried again within the same run, how often, and why.

Everything else ends the run with its exit code; the same command again continues it.
"""

from __future__ import annotations

from dataclasses import dataclass

from training_core.errors import (
    DiskFullError,
    PreemptedError,
    ServerUnreachableError,
    StageLockedError,
    StageTimeoutError,
    TemporaryError,
    TidegateError,
)

RETRY_DELAY_SECONDS = 3.0
"""Between two attempts: long enough for a device or a server to come back, short enough not to idle."""


@dataclass(frozen=True)
class RetryPolicy:
    """What to do after one kind of failure."""

    retry: bool
    max_attempts: int | None
    """Attempts in all; None = `launch.retries` more after the first one."""
    reason: str


NEVER = RetryPolicy(False, 1, "the same input gives the same failure")

POLICIES: dict[type[TidegateError], RetryPolicy] = {
    PreemptedError: RetryPolicy(
        True, None, "the stage saved its state and continues from it; nothing is wrong with it"
    ),
    ServerUnreachableError: RetryPolicy(
        True, 2, "a server that restarts is back in seconds; a longer outage needs a person"
    ),
    StageLockedError: RetryPolicy(
        False, 1, "another run is at work on the same stage, maybe for hours; waiting would hold this one"
    ),
    StageTimeoutError: RetryPolicy(False, 1, "the limit was set on purpose; starting again would double it in silence"),
    DiskFullError: RetryPolicy(False, 1, "space does not come back by itself"),
    TemporaryError: RetryPolicy(
        False, 1, "killed or out of memory: the next attempt would most likely end the same way"
    ),
}


def policy_for(error: BaseException) -> RetryPolicy:
    """Return the policy of the most specific class of `error`."""
    for kind in type(error).__mro__:
        if kind in POLICIES:
            return POLICIES[kind]
    return NEVER


def should_retry(error: BaseException, attempt: int, retries: int) -> bool:
    """Return whether to start a stage again after its `attempt`-th attempt (from 1) in this run.

    Args:
        error: how the attempt ended.
        attempt: number of the attempt that ended.
        retries: `launch.retries`.
    """
    policy = policy_for(error)
    max_attempts = retries + 1 if policy.max_attempts is None else policy.max_attempts
    return policy.retry and attempt < max_attempts
