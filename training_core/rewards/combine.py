"""Several rewards, one score an answer: a weighted sum in which missing is never zero."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from training_core.errors import EvaluationError
from training_core.metrics import MetricSums
from training_core.records import Message
from training_core.rewards.base import RewardContext, RewardFunction


@dataclass(frozen=True)
class RewardPart:
    """One term of the sum."""

    name: str
    weight: float
    function: RewardFunction


@dataclass(frozen=True)
class CombinedScores:
    """Scores of a batch of answers."""

    totals: list[float | None]
    """Weighted sums; None where any part has no score."""
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    """Unweighted scores by part."""

    @property
    def num_missing(self) -> int:
        return sum(total is None for total in self.totals)

    def metrics(self) -> dict[str, float]:
        """Return mean and standard deviation of the totals, `reward/<part>_mean`, all over present scores, and
        `reward/missing_fraction`."""
        sums = MetricSums()
        totals = [total for total in self.totals if total is not None]
        sums.add("reward/mean", math.fsum(totals), len(totals))
        if totals:
            sums.add("reward/std", statistics.pstdev(totals), 1)
        for name, scores in self.parts.items():
            present = [score for score in scores if score is not None]
            sums.add(f"reward/{name}_mean", math.fsum(present), len(present))
        sums.add("reward/missing_fraction", self.num_missing, len(self.totals))
        return sums.means()


def score_answers(
    parts: Sequence[RewardPart],
    prompts: Sequence[Sequence[Message]],
    answers: Sequence[str],
    context: RewardContext,
) -> CombinedScores:
    """Score answers with every part and add them up with their weights.

    Raises:
        EvaluationError: a part returned another number of scores, or a score that is not finite.
    """
    scores = {part.name: checked_scores(part, part.function(prompts, answers, context), answers) for part in parts}
    totals: list[float | None] = []
    for row in range(len(answers)):
        weighted = [(part.weight, scores[part.name][row]) for part in parts]
        present = [weight * score for weight, score in weighted if score is not None]
        totals.append(math.fsum(present) if len(present) == len(parts) else None)
    return CombinedScores(totals, scores)


def checked_scores(part: RewardPart, scores: Sequence[float | None], answers: Sequence[str]) -> list[float | None]:
    if len(scores) != len(answers):
        raise EvaluationError(f"reward {part.name!r} returned {len(scores)} scores for {len(answers)} answers")
    for score, answer in zip(scores, answers, strict=True):
        if score is not None and not math.isfinite(score):
            raise EvaluationError(
                f"reward {part.name!r} gave {score} to the answer {answer[:80]!r}; a score must be finite, or "
                "None when there is none"
            )
    return [None if score is None else float(score) for score in scores]
