"""Advantage estimators: (EstimatorInputs, **knobs) -> Advantages.

Which answer is compared with what:

- with the other answers to its prompt: `group_normalised` (GRPO), `group_centred` (Dr. GRPO), `leave_one_out` (RLOO),
  `reinforce_plus_plus_baseline`;
- with the greedy answer to its prompt: `remax`;
- with all answers of the step: `reinforce_plus_plus`;
- with a critic: `gae` (PPO).
"""

from training_core.ops.advantages_common import Advantages, EstimatorInputs
from training_core.ops.advantages_group import (
    group_centred,
    group_normalised,
    leave_one_out,
)
from training_core.ops.advantages_token import gae, reinforce_plus_plus, reinforce_plus_plus_baseline, remax
from training_core.ops.normalising import STD_EPSILON

__all__ = [
    "STD_EPSILON",
    "Advantages",
    "EstimatorInputs",
    "gae",
    "group_centred",
    "group_normalised",
    "leave_one_out",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
]
