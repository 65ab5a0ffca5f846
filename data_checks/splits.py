"""Which prompts are held out of training."""

from __future__ import annotations

from training_core.seeding import derive_seed

SEED_RANGE = 2**31
PURPOSE = "validation_split"


def is_validation(group_id: str, seed: int, validation_fraction: float) -> bool:
    """Return whether a prompt's pairs belong to the validation split.

    The answer depends on the prompt's group, the seed and the fraction only: adding or removing rows moves no other
    row, and a larger fraction moves prompts from training to validation only.

    >>> [is_validation("a", 1, fraction) for fraction in (0.0, 1.0)]
    [False, True]
    """
    return derive_seed(seed, f"{PURPOSE}/{group_id}") / SEED_RANGE < validation_fraction


def side_sql(first_key: str, second_key: str, seed: int, validation_fraction: float) -> str:
    """Return `is_validation` as SQL of DuckDB, for a million prompts at a time.

    Args:
        first_key: column with the first 8 bytes of the group's id, as a signed big-endian number.
        second_key: column with the other 8.
        seed: of the split.
        validation_fraction: share of prompts held out.
    """
    group = f"printf('%016x', {first_key}) || printf('%016x', {second_key})"
    digest = f"sha256('{seed}/{PURPOSE}/' || {group})"
    # The seed is the digest's first 8 bytes modulo 2**31: the last 31 bits of them.
    return (
        f"((('0x' || substr({digest}, 9, 8))::uinteger & {SEED_RANGE - 1})::double / {SEED_RANGE} "
        f"< {validation_fraction!r}::double)"
    )
