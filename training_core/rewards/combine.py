"""Several rewards, one score an answer: a weighted sum in which missing is never zero.

A part's score is scaled, then bounded, then weighted. Moments of a running scale are updated with the step's scores
before these are scaled, so the first step has moments too, and no score is scaled by moments that never saw it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, overload

from training_core.config.reward_parts import RewardPartConfig, RunningScale
from training_core.errors import EvaluationError
from training_core.metrics import MetricSums
from training_core.ops.normalising import RunningMoments
from training_core.records import Message
from training_core.rewards.base import Cause, MeasuredScores, RewardContext, RewardFunction, Scores
from training_core.rewards.scaling import RewardState, Scale, scaled, with_scores

NO_VERDICT = (Cause.TIMEOUT, Cause.ERROR)
"""Causes that lie with the scorer or the answer, not with the data: an alarm watches their share."""
COUNTED = (*NO_VERDICT, Cause.UNREADABLE_REFERENCE)
"""Causes whose shares are logged."""


@dataclass(frozen=True)
class RewardPart:
    """One term of the sum."""

    name: str
    weight: float
    function: RewardFunction
    scale: Scale | None = None
    clip: float | None = None
    on_missing: Literal["missing", "skip"] = "missing"


def reward_part(config: RewardPartConfig, function: RewardFunction) -> RewardPart:
    """Return the part that `config` describes, with `function` for its scores."""
    return RewardPart(config.part_name, config.weight, function, config.scale, config.clip, config.on_missing)


@dataclass(frozen=True)
class CombinedScores:
    """Scores of a batch of answers."""

    totals: list[float | None]
    """Weighted sums; None where there is none."""
    parts: dict[str, Scores] = field(default_factory=dict)
    """Scores by part as its function gave them: not scaled, bounded or weighted."""
    scaled: dict[str, list[float | None]] = field(default_factory=dict)
    """Scores of the parts that have a scale or a bound, as they entered the sum, not weighted."""
    causal: frozenset[str] = frozenset()
    """Names of the parts whose functions say why scores are missing."""
    measures: dict[str, list[float | None]] = field(default_factory=dict)
    """What else functions say of each answer, by `<part>_<name>`."""

    @property
    def num_missing(self) -> int:
        return sum(total is None for total in self.totals)

    def silent_parts(self) -> dict[str, str]:
        """Return the parts that scored no answer, each with why as far as its function says."""
        silent = {name: scores for name, scores in self.parts.items() if scores.count(None) == len(scores)}
        return {
            name: ", ".join(sorted({cause.value.replace("_", " ") for cause in scores.causes if cause})) or "no reason"
            for name, scores in silent.items()
        }

    @property
    def num_without_verdict(self) -> int:
        """Answers for which at least one part ran out of time or failed."""
        causes = zip(*(scores.causes for scores in self.parts.values()), strict=True)
        return sum(any(cause in NO_VERDICT for cause in of_answer) for of_answer in causes)

    @staticmethod
    def joined(batches: Sequence[CombinedScores]) -> CombinedScores:
        """Return the scores of several batches by the same parts, one after another, as those of one."""
        first = batches[0]

        def all_of(name: str) -> Scores:
            causes = [cause for batch in batches for cause in batch.parts[name].causes]
            return Scores([score for batch in batches for score in batch.parts[name]], causes)

        return CombinedScores(
            totals=[total for batch in batches for total in batch.totals],
            parts={name: all_of(name) for name in first.parts},
            scaled={name: [score for batch in batches for score in batch.scaled[name]] for name in first.scaled},
            causal=first.causal,
            measures={name: [value for batch in batches for value in batch.measures[name]] for name in first.measures},
        )

    def metrics(self) -> dict[str, float]:
        """Return what a step logs of its scores; means over present scores.

        `reward/mean` and `reward/std`: of the totals. Of each part: `reward/<part>_mean` (unscaled),
        `_missing_fraction`, `_scaled_mean` where it has a scale or a bound, and where its function says why scores are
        missing `_timeout_fraction`, `_error_fraction` and `_unreadable_reference_fraction`; `_<measure>_mean` of what
        else it measures.
        `reward/missing_fraction`: answers without a total. `reward/error_fraction`: answers for which any part ran out
        of time or failed.
        """
        sums = MetricSums()
        totals = [total for total in self.totals if total is not None]
        sums.add("reward/mean", math.fsum(totals), len(totals))
        if totals:
            sums.add("reward/std", statistics.pstdev(totals), 1)
        for name, scores in self.parts.items():
            add_mean(sums, f"reward/{name}_mean", scores)
            sums.add(f"reward/{name}_missing_fraction", scores.count(None), len(scores))
            if name in self.scaled:
                add_mean(sums, f"reward/{name}_scaled_mean", self.scaled[name])
            if name in self.causal:
                for cause in COUNTED:
                    sums.add(f"reward/{name}_{cause.value}_fraction", scores.num_caused(cause), len(scores))
        for name, values in self.measures.items():
            add_mean(sums, f"reward/{name}_mean", values)
        sums.add("reward/missing_fraction", self.num_missing, len(self.totals))
        sums.add("reward/error_fraction", self.num_without_verdict, len(self.totals))
        return sums.means()


def add_mean(sums: MetricSums, name: str, scores: Sequence[float | None]) -> None:
    present = [score for score in scores if score is not None]
    sums.add(name, math.fsum(present), len(present))


@overload
def score_answers(
    parts: Sequence[RewardPart],
    prompts: Sequence[Sequence[Message]],
    answers: Sequence[str],
    context: RewardContext,
) -> CombinedScores: ...


@overload
def score_answers(
    parts: Sequence[RewardPart],
    prompts: Sequence[Sequence[Message]],
    answers: Sequence[str],
    context: RewardContext,
    state: RewardState,
    *,
    update: bool = True,
) -> tuple[CombinedScores, RewardState]: ...


def score_answers(
    parts: Sequence[RewardPart],
    prompts: Sequence[Sequence[Message]],
    answers: Sequence[str],
    context: RewardContext,
    state: RewardState | None = None,
    *,
    update: bool = True,
) -> CombinedScores | tuple[CombinedScores, RewardState]:
    """Score answers with every part and add them up with their weights.

    Args:
        parts: terms of the sum, names all different.
        prompts, answers: one an answer.
        context: what else parts may know of the answers.
        state: of the run so far, for parts with a running scale.
        update: whether these scores join the running statistics before they are scaled by them. False for answers that
            are only a yardstick, such as a greedy baseline.

    Returns:
        The scores; with a `state`, (scores, new state). The given one is not changed.

    Raises:
        EvaluationError: a part returned another number of scores, or a score that is not finite.
        ValueError: a part has a running scale and there is no state.
        What `context.poll` raises: it is called before each part, and by parts that take long.
    """
    found = {}
    for part in parts:
        context.poll()
        found[part.name] = part.function(prompts, answers, context)
    scores = {part.name: checked_scores(part, found[part.name], answers) for part in parts}
    before = {} if state is None else state.moments
    moments = dict(before)
    for part in parts:
        if isinstance(part.scale, RunningScale):
            if state is None:
                raise ValueError(f"reward {part.name!r} has a running scale: give the state of the run")
            if not update:
                continue
            moments[part.name] = with_scores(before.get(part.name, RunningMoments()), scores[part.name])
    entering = {part.name: scaled_scores(part, scores[part.name], moments.get(part.name)) for part in parts}
    combined = CombinedScores(
        totals=[total(parts, [entering[part.name][row] for part in parts]) for row in range(len(answers))],
        parts=scores,
        scaled={part.name: entering[part.name] for part in parts if part.scale is not None or part.clip is not None},
        causal=frozenset(part.name for part in parts if isinstance(found[part.name], Scores)),
        measures=measures_of(found),
    )
    return combined if state is None else (combined, state.model_copy(update={"moments": moments}))


def measures_of(found: Mapping[str, Sequence[float | None]]) -> dict[str, list[float | None]]:
    """Return what functions measure beside their scores, by `<part>_<name>`."""
    return {
        f"{part}_{name}": list(values)
        for part, scores in found.items()
        if isinstance(scores, MeasuredScores)
        for name, values in scores.measures.items()
    }


def total(parts: Sequence[RewardPart], scores: Sequence[float | None]) -> float | None:
    """Return one answer's sum; None when a part that may not be skipped has no score, or none has one."""
    present = [part.weight * score for part, score in zip(parts, scores, strict=True) if score is not None]
    lacking = any(part.on_missing == "missing" for part, score in zip(parts, scores, strict=True) if score is None)
    return math.fsum(present) if present and not lacking else None


def scaled_scores(part: RewardPart, scores: Scores, moments: RunningMoments | None) -> list[float | None]:
    return [None if score is None else scaled(score, part.scale, moments, part.clip) for score in scores]


def checked_scores(part: RewardPart, scores: Sequence[float | None], answers: Sequence[str]) -> Scores:
    if len(scores) != len(answers):
        raise EvaluationError(f"reward {part.name!r} returned {len(scores)} scores for {len(answers)} answers")
    for score, answer in zip(scores, answers, strict=True):
        if score is not None and not math.isfinite(score):
            raise EvaluationError(
                f"reward {part.name!r} gave {score} to the answer {answer[:80]!r}; a score must be finite, or "
                "None when there is none"
            )
    causes = scores.causes if isinstance(scores, Scores) else ()
    return Scores([None if score is None else float(score) for score in scores], causes)
