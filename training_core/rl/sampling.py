"""The sampling half of a step: which prompts, their answers, and what these are worth. No weights change here.

Shapes: N answers of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from training_core.config.online import OnlineConfig
from training_core.models.chat import decode_answer
from training_core.records import PromptRow, StopReason
from training_core.rewards.base import RewardContext
from training_core.rewards.combine import CombinedScores, RewardPart, score_answers
from training_core.rewards.scaling import RewardState
from training_core.rollout.base import (
    NamedTensors,
    Rollout,
    RolloutEngine,
    RolloutRequest,
    SamplingSettings,
    WeightReport,
    check_rollouts,
    hand_over_weights,
)
from training_core.seeding import batch_indices, derive_seed, permutation

GREEDY_INDEX = -1
"""`sample_index` of a prompt's most probable answer."""


@dataclass(frozen=True)
class Prompts:
    """The prompts to train on."""

    rows: list[PromptRow]
    token_ids: list[tuple[int, ...]]
    """Of each row, ready to sample from."""


@dataclass(frozen=True)
class ScoredGroup:
    """The answers to one prompt of one step."""

    row: PromptRow
    requests: list[RolloutRequest]
    rollouts: list[Rollout]
    texts: list[str]
    scores: list[float | None]
    parts: dict[str, list[float | None]]
    baseline_score: float | None = None
    """Of the most probable answer, when the estimator asks for it; None without or when it has no score."""

    @property
    def is_mixed(self) -> bool:
        """Whether two answers have different scores: only then do they teach anything about each other."""
        return len({score for score in self.scores if score is not None}) > 1


@dataclass(frozen=True)
class SampledStep:
    """What a step's sampling gave."""

    groups: list[ScoredGroup]
    """To learn from."""
    num_rounds: int
    num_sampled_groups: int
    scores: CombinedScores
    """Of every sampled answer, those of left-out groups too: means over the others would be of a selection."""
    reward_state: RewardState
    rollouts: list[Rollout]
    """All of them."""
    num_without_baseline: int | None = None
    """Sampled groups whose most probable answer has no score; None where none is sampled."""
    is_dynamic: bool = False
    """Whether groups without a difference in scores are replaced."""

    def metrics(self) -> dict[str, float]:
        """Return rewards, lengths and truncation of the step's answers; the end-of-turn token counts as a token.

        `rollout/greedy_reward_mean` is the mean score of the prompts' most probable answers, where those are sampled.
        """
        count = len(self.rollouts)
        num_truncated = sum(rollout.stop_reason == StopReason.LENGTH for rollout in self.rollouts)
        values = {
            **self.scores.metrics(),
            "rollout/length_mean_tokens": sum(len(rollout.token_ids) for rollout in self.rollouts) / count,
            "rollout/truncated_fraction": num_truncated / count,
        }
        greedy = [group.baseline_score for group in self.groups if group.baseline_score is not None]
        if self.num_without_baseline is not None:
            values["reward/greedy_missing_fraction"] = self.num_without_baseline / self.num_sampled_groups
        if greedy:
            values["rollout/greedy_reward_mean"] = sum(greedy) / len(greedy)
        if self.is_dynamic:
            values["rollout/num_rounds"] = self.num_rounds
            # Where none is mixed the step has groups all the same, but nothing is learned from them.
            num_learned = sum(group.is_mixed for group in self.groups)
            values["rollout/kept_group_fraction"] = num_learned / self.num_sampled_groups
        return values


@dataclass
class Sampler:
    """Samples and scores the answers of a step.

    Args:
        config: the algorithm.
        engine: rollout engine.
        settings: how tokens are drawn.
        rewards: parts of the reward.
        tokenizer: turns answers into text.
        prompts: to train on.
        seed: the run's.
        poll: called between tokens; what it raises ends the step.
        on_phase: told what was just finished ("rollout", "reward"), for the clock.
        attempt: how often training was rolled back: a step that is done again samples other answers.
    """

    config: OnlineConfig
    engine: RolloutEngine
    settings: SamplingSettings
    rewards: list[RewardPart]
    tokenizer: PreTrainedTokenizerBase
    prompts: Prompts
    seed: int
    poll: Callable[[], None]
    on_phase: Callable[[str], None] = field(default=lambda _: None)
    attempt: int = 0

    def hand_over(self, tensors: NamedTensors, step: int) -> WeightReport:
        """Give the engine the weights that step `step` samples with."""
        return hand_over_weights(self.engine, tensors, version=step - 1)

    def sample(self, step: int, report: WeightReport, reward_state: RewardState) -> SampledStep:
        """Return the scored answers of step `step`.

        With dynamic sampling, groups whose scores are all the same are left out and further prompts sampled in their
        place, for a bounded number of rounds. Where no group is mixed, the first ones are kept: there is nothing to
        learn, but the step is whole.

        Raises:
            WeightVersionError: the engine samples with other weights than it was given.
            EvaluationError: a score is not finite.
        """
        wanted, dynamic = self.config.prompts_per_step, self.config.dynamic_sampling
        sampled: list[ScoredGroup] = []
        kept: list[ScoredGroup] = []
        scores: list[CombinedScores] = []
        state, rounds = reward_state, 0
        for indices in self.rounds(step):
            groups, combined, state = self.sample_groups(step, len(sampled), indices, report, state)
            sampled += groups
            scores.append(combined)
            rounds += 1
            kept += [group for group in groups if dynamic is None or group.is_mixed]
            if len(kept) >= wanted:
                break
        chosen = (kept or sampled)[:wanted]
        rollouts = [rollout for group in sampled for rollout in group.rollouts]
        return SampledStep(
            chosen,
            rounds,
            len(sampled),
            CombinedScores.joined(scores),
            state,
            rollouts,
            num_without_baseline=self.count_missing_baselines(sampled),
            is_dynamic=dynamic is not None,
        )

    def count_missing_baselines(self, groups: Sequence[ScoredGroup]) -> int | None:
        if not self.config.advantage.needs_greedy_answer:
            return None
        return sum(group.baseline_score is None for group in groups)

    def rounds(self, step: int) -> list[list[int]]:
        """Return the prompts of each round of step `step`: the epoch's next ones, then others in an order of the step's
        own."""
        number, total = self.config.prompts_per_step, len(self.prompts.rows)
        first = batch_indices(step - 1, number, total, self.seed, "data_order")
        if self.config.dynamic_sampling is None:
            return [first]
        used = set(first)
        others = [index for index in permutation(total, self.seed, "refill", step) if index not in used]
        refills = [others[start : start + number] for start in range(0, len(others), number)]
        return [first, *refills[: self.config.dynamic_sampling.max_rounds - 1]]

    def sample_groups(
        self, step: int, num_before: int, indices: Sequence[int], report: WeightReport, state: RewardState
    ) -> tuple[list[ScoredGroup], CombinedScores, RewardState]:
        """Sample and score one round of prompts."""
        size = self.config.group_size
        requests = self.make_requests(step, num_before, indices)
        rollouts = self.generate(requests, self.settings, report)
        greedy: list[Rollout] = []
        if self.config.advantage.needs_greedy_answer:
            wanted = [replace(requests[i * size], sample_index=GREEDY_INDEX) for i in range(len(indices))]
            greedy = self.generate(wanted, replace(self.settings, temperature=0.0), report)
        self.on_phase("rollout")
        rows = [self.prompts.rows[index] for index in indices]
        per_answer = [row for row in rows for _ in range(size)]
        texts, scores, state = self.score(requests, per_answer, rollouts, state)
        baselines: Sequence[float | None] = [None] * len(rows)
        if greedy:
            of_groups = [requests[i * size] for i in range(len(rows))]
            # Baselines are scored on the scale that the step's own answers have: they do not move it.
            _, found, _ = self.score(of_groups, rows, greedy, state, frozen=True)
            baselines = found.totals
        self.on_phase("reward")
        groups = []
        for number, row in enumerate(rows):
            part = slice(number * size, (number + 1) * size)
            parts = {name: list(values[part]) for name, values in scores.parts.items()}
            groups.append(
                ScoredGroup(
                    row, requests[part], rollouts[part], texts[part], scores.totals[part], parts, baselines[number]
                )
            )
        return groups, scores, state

    def make_requests(self, step: int, num_before: int, indices: Sequence[int]) -> list[RolloutRequest]:
        """Return a round's requests, group after group.

        Args:
            step: of the training, from 1.
            num_before: groups of the step's earlier rounds.
            indices: of the prompts.
        """
        size = self.config.group_size
        requests = []
        for number, index in enumerate(indices, start=num_before):
            for sample in range(size):
                again = [self.attempt] if self.attempt else []
                seed = derive_seed(self.seed, "rollout", step, number * size + sample, *again)
                prompt = self.prompts.rows[index].prompt_id
                requests.append(RolloutRequest(prompt, sample, self.prompts.token_ids[index], seed))
        return requests

    def generate(
        self, requests: Sequence[RolloutRequest], settings: SamplingSettings, report: WeightReport
    ) -> list[Rollout]:
        rollouts = self.engine.generate(requests, settings, poll=self.poll)
        check_rollouts(rollouts, requests, report.version, report.sha256)
        self.poll()
        return rollouts

    def score(
        self,
        requests: Sequence[RolloutRequest],
        rows: Sequence[PromptRow],
        rollouts: Sequence[Rollout],
        state: RewardState,
        *,
        frozen: bool = False,
    ) -> tuple[list[str], CombinedScores, RewardState]:
        """Return the answers as text, without the end-of-turn token, their scores, and the new reward state.

        With `frozen`, running scales are those of `state`.
        """
        tokens = [rollout.answer_ids for rollout in rollouts]
        texts = [decode_answer(self.tokenizer, ids) for ids in tokens]
        context = RewardContext(
            num_tokens=[len(ids) for ids in tokens],
            stop_reasons=[rollout.stop_reason for rollout in rollouts],
            extras=[row.extra for row in rows],
            max_new_tokens=self.settings.max_new_tokens,
            sequences=[
                request.prompt_ids + rollout.token_ids for request, rollout in zip(requests, rollouts, strict=True)
            ],
            poll=self.poll,
        )
        prompts = [row.prompt for row in rows]
        scores, after = score_answers(self.rewards, prompts, texts, context, state, update=not frozen)
        return texts, scores, after


def sample_rows(groups: Sequence[ScoredGroup]) -> list[dict[str, Any]]:
    """Return the first answer of each group, for samples.jsonl."""
    return [
        {
            "prompt_id": group.row.prompt_id,
            "prompt": group.row.prompt[-1].content,
            "answer": group.texts[0],
            "num_tokens": len(group.rollouts[0].token_ids),
            "stop_reason": group.rollouts[0].stop_reason.value,
            "reward": group.scores[0],
            **{f"reward_{name}": values[0] for name, values in group.parts.items()},
        }
        for group in groups
    ]
