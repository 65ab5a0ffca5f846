"""Which prompts are held out of training."""

from __future__ import annotations

from training_core.seeding import derive_seed

SEED_RANGE = 2**31


def is_validation(group_id: str, seed: int, validation_fraction: float) -> bool:
    """Return whether a prompt's pairs belong to the validation split.

    The answer depends on the prompt's group, the seed and the fraction only: adding or removing rows moves no other
    row, and a larger fraction moves prompts from training to validation only.

    >>> [is_validation("a", 1, fraction) for fraction in (0.0, 1.0)]
    [False, True]
    """
    return derive_seed(seed, f"validation_split/{group_id}") / SEED_RANGE < validation_fraction
