"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from training_core.config.optimizer import ConstantSchedule, LinearSchedule, ScheduleConfig


def learning_rate_factor(schedule: ScheduleConfig, step: int, num_steps: int) -> float:
    """Return the share of the full learning rate that optimizer step `step` uses.

    Warm-up: step / warmup_steps, for step < warmup_steps. Then, with f = `final_fraction` and
    p = (step − first) / (num_steps + 1 − first), first = max(warmup_steps, 1) the first step at the full rate:

    - constant: 1
    - linear: 1 − (1 − f)·p
    - cosine: f + (1 − f)·(1 + cos(π·p)) / 2

    The decay would reach f one step after the last, so that f = 0 wastes no step at a rate of zero. Linear and
    cosine reduce to constant at f = 1.

    Args:
        schedule: which one.
        step: optimizer step, from 1.
        num_steps: steps of the whole training.

    Raises:
        ValueError: `step` is not in 1..num_steps.

    >>> [learning_rate_factor(LinearSchedule(warmup_steps=2), step, 5) for step in (1, 2, 3, 4, 5)]
    [0.5, 1.0, 0.75, 0.5, 0.25]
    """
    if not 1 <= step <= num_steps:
        raise ValueError(f"step must be in 1..{num_steps}, got {step}")
    if step < schedule.warmup_steps:
        return step / schedule.warmup_steps
    if isinstance(schedule, ConstantSchedule):
        return 1.0
    first = max(schedule.warmup_steps, 1)
    progress = (step - first) / (num_steps + 1 - first)
    remaining = 1.0 - schedule.final_fraction
    if isinstance(schedule, LinearSchedule):
        return 1.0 - remaining * progress
    return schedule.final_fraction + remaining * (1.0 + math.cos(math.pi * progress)) / 2.0
