"""Which failures are tried again."""

from __future__ import annotations

import pytest

from tasks.policies import should_retry
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


def test_only_temporary_errors_have_policies_of_their_own() -> None:
    # A new error class is not retried unless somebody says so; one that is must be worth the same command again.
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    found = [kind for kind in kinds if issubclass(kind, errors.TidegateError)]
    retried = {kind for kind in found if should_retry(kind(""), 1, 9)}
    assert retried == {errors.PreemptedError, errors.ServerUnreachableError}
    assert {kind.exit_code for kind in retried} == {errors.EXIT_TEMPORARY}
