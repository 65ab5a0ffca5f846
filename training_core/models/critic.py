"""A critic: a value for each state of an answer, from a decoder of its own and a scalar head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from training_core.data.batching import pad_sequences
from training_core.errors import ArtifactError, ConfigurationError
from training_core.models.heads import REWARD_CONFIG, RewardModel, last_positions, load_reward_model
from training_core.models.loading import load_causal_lm, tokenizer_digest
from training_core.models.reward_ensemble import member_directories
from training_core.protocol.atomic import read_json
from training_core.rollout.batch import MicroBatch

MAX_READING_DIFFERENCE = 1e-3
"""A critic made from a reward model may read this much differently, in its own units: the same sum in another order."""
NUM_PROBE_TOKENS = (3, 7)


class ValueModel(nn.Module):
    """Backbone hidden states times a float32 vector plus a number: one value a position.

    The value at the position that predicts an answer token is that of the state before the token: what is still to
    come. The bias lets the mean of the returns be learned without moving the backbone.

    Args:
        backbone: a decoder without its language-model head, float32; it is the critic's own, shared with no policy.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, 1, bias=True, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.requires_grad_(True)
        self.train(False)

    def forward(self, micro: MicroBatch) -> Tensor:
        """Return float32 values [tokens] of the states before the answer tokens, in row-major order of `micro.mask`.

        `micro.scatter` makes them [B, t]. Padding ids change nothing.
        """
        hidden = self.backbone(input_ids=micro.input_ids, use_cache=False).last_hidden_state
        return self.read(hidden[micro.predict_rows, micro.predict_positions])

    def read(self, hidden: Tensor) -> Tensor:
        """Return float32 values [...] of last hidden states [..., D], in float32 also under autocast.

        For forward passes that get the hidden states in another way, prompts shared by their answers for one.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)
        return values

    @property
    def device(self) -> torch.device:
        return self.head.weight.device


def new_critic(model_directory: Path) -> ValueModel:
    """Return a critic on the float32 backbone of a causal model, whose values are all 0.

    Nothing is drawn: a head of zeros is the same for every seed, and the first update moves it.

    Raises:
        ArtifactError: the checkpoint cannot be loaded.
    """
    causal = load_causal_lm(model_directory, dtype=torch.float32)
    backbone: Any = causal.base_model
    return ValueModel(backbone)


def critic_from_reward_model(
    reward_directory: Path,
    policy_directory: Path,
    *,
    normalise: bool,
    weight: float = 1.0,
    scale: tuple[float, float] = (0.0, 1.0),
) -> ValueModel:
    """Return a critic that starts as the reward model: its value of a state is the reward for ending there.

    value = weight * (reading - score_mean) / score_std with `normalise`, else weight * (reading - mean) / std of the
    fixed scale: the units of the reward that the policy is trained on. A bound on the reward (`clip`) does not bound
    values; a running `scale` is refused with the config. Of an ensemble it is the first member, on the ensemble's
    scale.

    Args:
        reward_directory: written by the reward model's stage.
        policy_directory: the policy's checkpoint, for its tokenizer.
        normalise: as in the config of the reward.
        weight: of the reward model among the parts of the reward.
        scale: (mean, std) of the reward's fixed scale.

    Raises:
        ConfigurationError: the policy's tokenizer is another one: its ids would mean nothing to the critic.
        ArtifactError: the reward model cannot be loaded, or the critic does not read what it reads.
    """
    if tokenizer_digest(reward_directory) != tokenizer_digest(policy_directory):
        raise ConfigurationError(
            f"the reward model {reward_directory} and the policy {policy_directory} have different tokenizers, so the "
            "critic cannot start from the reward model. Set algorithm.critic.initialise_from: policy"
        )
    reward = load_reward_model(member_directories(reward_directory)[0]).float()
    factor, offset = reward_units(reward, reward_directory, normalise=normalise)
    mean, std = scale
    factor, offset = factor / std, (offset - mean) / std
    critic = ValueModel(reward.backbone)
    with torch.no_grad():
        critic.head.weight.copy_(reward.head.weight * (weight * factor))
        critic.head.bias.fill_(weight * offset)
    check_reads_the_same(critic, reward, weight * factor, weight * offset)
    return critic


def reward_units(reward: RewardModel, directory: Path, *, normalise: bool) -> tuple[float, float]:
    """Return (factor, offset): what is trained on is factor * reading + offset of this reward model.

    Args:
        reward: the model of `directory`, or the first member of its ensemble.
        directory: written by the reward model's stage.
        normalise: as in the config of the reward.
    """
    factor, offset = 1.0, 0.0
    mean, std = reward.score_mean, reward.score_std
    if len(member_directories(directory)) > 1:  # An ensemble averages its members' standardised scores.
        factor, offset = 1.0 / std, -mean / std
        stored = read_json(directory / REWARD_CONFIG)
        mean, std = float(stored["score_mean"]), float(stored["score_std"])
    return (factor / std, (offset - mean) / std) if normalise else (factor, offset)


@torch.no_grad()
def check_reads_the_same(critic: ValueModel, reward: RewardModel, factor: float, offset: float) -> None:
    """Check on two short made-up rows that the critic's value at the last token is factor * score + offset.

    Raises:
        ArtifactError: it is not.
    """
    ids, mask = pad_sequences(probe_sequences(int(critic.backbone.config.vocab_size)), pad_token_id=0)
    ids, mask = ids.to(critic.device), mask.to(critic.device)
    hidden = critic.backbone(input_ids=ids, use_cache=False).last_hidden_state
    values = critic.read(hidden[torch.arange(len(ids), device=ids.device), last_positions(mask)]).tolist()
    for value, score in zip(values, reward(ids, mask).tolist(), strict=True):
        expected = factor * score + offset
        if not abs(value - expected) <= MAX_READING_DIFFERENCE * max(1.0, abs(factor * score), abs(offset)):
            raise ArtifactError(
                f"the critic made from the reward model reads {value:.6f} where that gives {expected:.6f}: its files "
                "do not belong together. Train the reward model again"
            )


def probe_sequences(vocab_size: int) -> Sequence[Sequence[int]]:
    """Return rows of different lengths whose ids are spread over the vocabulary."""
    return [[(17 + 31 * position) % vocab_size for position in range(length)] for length in NUM_PROBE_TOKENS]
