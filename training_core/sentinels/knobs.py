"""What a roll-back changes in a trainer."""

from __future__ import annotations

from training_core.config.sentinels import RollBackConfig
from training_core.records import Record


class KnobChanges(Record):
    """How the knobs of a run differ from its config, after all roll-backs so far. Part of a trainer's saved state.

    The factors are those on the config's values, not on the values before the last roll-back: setting the same changes
    twice is setting them once.
    """

    num_roll_backs: int = 0
    """Roll-backs that led to this state."""
    since_step: int = 0
    """The step that the last of them went back to: later steps were done with these knobs."""
    learning_rate_factor: float = 1.0
    """On the learning rate of every update."""
    kl_coefficient_factor: float = 1.0
    """On the coefficient of the KL term, where there is one."""


def next_changes(config: RollBackConfig, num_roll_backs: int, to_step: int) -> KnobChanges:
    """Return the changes after one more roll-back.

    Args:
        config: the factors of one roll-back.
        num_roll_backs: those before.
        to_step: the step that training goes back to.

    >>> next_changes(RollBackConfig(), 1, 30).learning_rate_factor
    0.25
    """
    times = num_roll_backs + 1
    return KnobChanges(
        num_roll_backs=times,
        since_step=to_step,
        learning_rate_factor=config.learning_rate_factor**times,
        kl_coefficient_factor=config.kl_coefficient_factor**times,
    )
