"""Which failures are tried again."""

from __future__ import annotations

import pytest

from tasks.policies import POLICIES, policy_for, should_retry
from training_core import errors


@pytest.mark.parametrize(
    ("error", "attempt", "retries", "wanted"),
    [
        (errors.PreemptedError(""), 1, 3, True),
        (errors.PreemptedError(""), 4, 3, False),
        (errors.PreemptedError(""), 1, 0, False),
        (errors.ServerUnreachableError(""), 1, 0, True),
        (errors.ServerUnreachableError(""), 2, 9, False),
        (errors.StageLockedError(""), 1, 9, False),
        (errors.StageTimeoutError(""), 1, 9, False),
        (errors.DiskFullError(""), 1, 9, False),
        (errors.TemporaryError(""), 1, 9, False),
        (errors.ConfigurationError(""), 1, 9, False),
        (errors.TrainingDivergedError(""), 1, 9, False),
        (RuntimeError("bug"), 1, 9, False),
        (KeyboardInterrupt(), 1, 9, False),
    ],
)
def test_retries(error: BaseException, attempt: int, retries: int, wanted: bool) -> None:
    assert should_retry(error, attempt, retries) is wanted


def test_only_temporary_errors_are_ever_retried_and_every_policy_says_why() -> None:
    assert all(issubclass(kind, errors.TemporaryError) for kind in POLICIES)
    assert all(policy_for(kind("")).reason for kind in POLICIES)
    assert {policy.name for policy in POLICIES.values() if policy.retry} == {"preempted", "server"}
