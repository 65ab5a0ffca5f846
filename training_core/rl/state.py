"""Everything that changes while a policy is trained, besides weights, optimizer state and kept rollouts.

Seeds are functions of the step, so no generator state is needed; the learning rate's schedule is one of the step, too.
Checkpoints lie between steps, where no rollout is in flight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from training_core.errors import ArtifactError
from training_core.protocol.atomic import read_json, write_json
from training_core.records import Record
from training_core.rewards.scaling import RewardState
from training_core.sentinels import KnobChanges

STATE_FILE = "state.json"
STATE_VERSION = 2


class TrainerState(Record):
    """state.json of a checkpoint; files beside it hold weights, optimizer state and the replay buffer."""

    version: Literal[2] = 2
    algorithm: str
    """Name of the algorithm."""
    step: int
    """Steps done."""
    weight_version: int
    """Version of the weights that the next step samples with."""
    reference_sha256: str
    """Weights digest of the checkpoint that the policy started from, which is the reference too."""
    prompts_sha256: str
    """Digest of the prompts that the data order runs over."""
    kl_coefficient: float
    """Of the KL term, as its controller left it; 0 without one."""
    reward: RewardState
    """Running statistics of rewards."""
    knobs: KnobChanges
    """What roll-backs have changed."""
    has_critic: bool
    has_replay: bool

    def save(self, directory: Path) -> None:
        write_json(directory / STATE_FILE, self.model_dump(mode="json"))


def load_state(directory: Path) -> TrainerState:
    """Return the state in a checkpoint.

    Raises:
        ArtifactError: it is missing, damaged, of another version, or lacks a part: nothing is trained from it.
    """
    try:
        return TrainerState.model_validate(read_json(directory / STATE_FILE))
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{directory} holds no {STATE_FILE} that this code reads (version {STATE_VERSION}): {error}. Delete the "
            "stage directory to train again from the start"
        ) from error
