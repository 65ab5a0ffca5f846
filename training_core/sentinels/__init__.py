"""What watches a training run: checks inside a step, and sentinels that look at the metrics of every step."""

from training_core.sentinels.alarms import (
    ALARMS_FILE,
    NON_FINITE,
    Alarm,
    append_alarms,
    describe,
    non_finite_metric,
    truncate_alarms,
)
from training_core.sentinels.checks import (
    MAX_KL_AT_START_NATS,
    check_any_baseline,
    check_any_score,
    check_finite_loss,
    check_reference_is_start,
    check_sampler_agrees,
)
from training_core.sentinels.history import History
from training_core.sentinels.knobs import KnobChanges, next_changes
from training_core.sentinels.watch import CHECKS, unreported, watch

__all__ = [
    "ALARMS_FILE",
    "CHECKS",
    "MAX_KL_AT_START_NATS",
    "NON_FINITE",
    "Alarm",
    "History",
    "KnobChanges",
    "append_alarms",
    "check_any_baseline",
    "check_any_score",
    "check_finite_loss",
    "check_reference_is_start",
    "check_sampler_agrees",
    "describe",
    "next_changes",
    "non_finite_metric",
    "truncate_alarms",
    "unreported",
    "watch",
]
