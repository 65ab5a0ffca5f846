"""One reward model or several trained from different seeds, as one scorer with a mean and a disagreement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from torch import nn

from training_core.errors import ArtifactError
from training_core.models.heads import REWARD_CONFIG, RewardModel, load_reward_model, score_token_ids
from training_core.models.loading import copy_tokenizer_files
from training_core.protocol.atomic import read_json, write_json


@dataclass(frozen=True)
class EnsembleScores:
    """Scores of some answers, in their order."""

    means: list[float]
    disagreements: list[float]
    """Standard deviation over the members; 0 with one member."""


def combine_scores(scores: Sequence[Sequence[float]], scales: Sequence[tuple[float, float]]) -> EnsembleScores:
    """Put the members' scores of the same answers together.

    Each member's scores are brought to its own scale first, z = (score - mean) / std: pairs say nothing about a score's
    zero and little about its unit, so members differ in both. The ensemble's score is the mean of z over the members,
    its disagreement their standard deviation (divided by the number of members). One member is left as it is.

    Args:
        scores: one list a member, equally long.
        scales: (mean, std) of each member over its validation answers.

    >>> combine_scores([[1.0, 3.0], [10.0, 10.0]], [(1.0, 1.0), (10.0, 5.0)])
    EnsembleScores(means=[0.0, 1.0], disagreements=[0.0, 1.0])
    """
    if len(scores) == 1:
        return EnsembleScores(list(scores[0]), [0.0] * len(scores[0]))
    z = numpy.array([(numpy.asarray(row) - mean) / std for row, (mean, std) in zip(scores, scales, strict=True)])
    return EnsembleScores(z.mean(axis=0).tolist(), z.std(axis=0).tolist())


class RewardEnsemble(nn.Module):
    """What a reward-model stage saved, ready to score.

    Attributes:
        score_mean, score_std: of the ensemble's score over the validation answers.
    """

    def __init__(self, members: Sequence[RewardModel], score_mean: float, score_std: float) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.score_mean = score_mean
        self.score_std = score_std

    @property
    def num_positions(self) -> int:
        """Most tokens of a sequence that it can score."""
        first: Any = self.members[0]
        return int(first.backbone.config.max_position_embeddings)

    def normalise(self, score: float) -> float:
        """Return the score in standard deviations above the mean of the validation answers."""
        return (score - self.score_mean) / self.score_std

    def score(
        self, sequences: Sequence[Sequence[int]], pad_token_id: int, max_tokens_per_batch: int = 4096
    ) -> EnsembleScores:
        """Score token ids, each read at its last one. Args and Raises: as `score_token_ids`."""
        members: list[Any] = list(self.members)
        scores = [score_token_ids(member, sequences, pad_token_id, max_tokens_per_batch) for member in members]
        return combine_scores(scores, [(member.score_mean, member.score_std) for member in members])


def member_directory(directory: Path, member: int) -> Path:
    """Return where member `member` (from 0) of the ensemble in `directory` lies."""
    return directory / f"member_{member}"


def member_directories(directory: Path) -> list[Path]:
    """Return the folders that `load_reward_model` reads: the one itself, or one a member of an ensemble.

    Raises:
        ArtifactError: there is no readable reward_config.json.
    """
    try:
        num_members = read_json(directory / REWARD_CONFIG).get("num_members")
    except (OSError, ValueError, AttributeError) as error:
        raise ArtifactError(f"no reward model can be loaded from {directory}: {error!r}") from error
    return [directory] if num_members is None else [member_directory(directory, i) for i in range(int(num_members))]


def save_ensemble_files(directory: Path, num_members: int) -> None:
    """Write beside the saved members what makes their folder a scorer with a tokenizer; its scale is to follow."""
    first = member_directory(directory, 0)
    copy_tokenizer_files(first, directory)
    # Some tokenizers are recognised by the model's config only.
    write_json(directory / "config.json", read_json(first / "config.json"))
    write_json(directory / REWARD_CONFIG, {"num_members": num_members})


def load_reward_ensemble(directory: Path) -> RewardEnsemble:
    """Return what a reward-model stage saved, one model or several, in evaluation mode and in the saved dtype.

    Raises:
        ArtifactError: a file is missing or damaged, or weights do not fit their config.
    """
    members = [load_reward_model(path) for path in member_directories(directory)]
    if len(members) == 1:
        return RewardEnsemble(members, members[0].score_mean, members[0].score_std)
    stored = read_json(directory / REWARD_CONFIG)
    try:
        return RewardEnsemble(members, float(stored["score_mean"]), float(stored["score_std"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{directory / REWARD_CONFIG} gives no scale of the ensemble's scores: {error!r}"
        ) from error


def as_ensemble(model: RewardModel | RewardEnsemble) -> RewardEnsemble:
    """Return the scorer itself, or a single model as an ensemble of one."""
    if isinstance(model, RewardEnsemble):
        return model
    return RewardEnsemble([model], model.score_mean, model.score_std)
