"""One step of GRPO: hand over weights, sample, score, update."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from training_core.errors import ArtifactError
from training_core.loop import StepRecord
from training_core.memory import release_free_memory
from training_core.models.chat import decode_answer
from training_core.protocol.atomic import read_json, write_json
from training_core.records import PromptRow, Record, StopReason
from training_core.rewards.base import RewardContext
from training_core.rewards.combine import CombinedScores, RewardPart, score_answers
from training_core.rollout.base import (
    Rollout,
    RolloutEngine,
    RolloutRequest,
    SamplingSettings,
    check_rollouts,
    hand_over_weights,
)
from training_core.rollout.batch import build_batch
from training_core.seeding import batch_indices, derive_seed
from training_core.sentinels import check_any_score
from training_core.stages.grpo_signal import ScoredBatch
from training_core.stages.grpo_update import GrpoUpdater

STATE_FILE = "state.json"


class GrpoState(Record):
    """state.json of a checkpoint: everything that is neither weights nor optimizer state.

    Seeds are functions of the step, so no generator state is needed.
    """

    version: Literal[1] = 1
    algorithm: Literal["grpo"] = "grpo"
    step: int
    """Steps done; also the version of the weights."""
    reference_sha256: str
    """Weights digest of the checkpoint that the policy started from, which is the reference too."""
    num_prompts: int
    """Prompts that the data order runs over."""


@dataclass(frozen=True)
class Prompts:
    """The prompts to train on."""

    rows: list[PromptRow]
    token_ids: list[tuple[int, ...]]
    """Of each row, ready to sample from."""


@dataclass
class Clock:
    """Seconds between laps, by name."""

    seconds: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.monotonic)

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = now - self.last
        self.last = now


class GrpoTrainer:
    """The sampling half of a step, and the state on disk; `updater` is the training half.

    Args:
        updater: owns policy, reference and optimizer.
        sampler: rollout engine.
        sampling: its settings.
        rewards: parts of the reward.
        tokenizer: turns answers into text.
        prompts: to train on.
        reference_sha256: weights digest of the checkpoint that the policy started from.
    """

    def __init__(
        self,
        updater: GrpoUpdater,
        sampler: RolloutEngine,
        sampling: SamplingSettings,
        rewards: list[RewardPart],
        tokenizer: PreTrainedTokenizerBase,
        prompts: Prompts,
        reference_sha256: str,
    ) -> None:
        self.updater = updater
        self.config = updater.config
        self.sampler = sampler
        self.sampling = sampling
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.reference_sha256 = reference_sha256

    def train_step(self, step: int) -> StepRecord:
        """Do step `step` (from 1). training_core/loop.py has the contract.

        Raises:
            WeightVersionError: the engine samples with other weights than the trainer's.
            EvaluationError: no answer has a score, or one is not finite.
        """
        clock = Clock()
        requests, rows = self.make_requests(step)
        report = hand_over_weights(self.sampler, list(self.updater.policy.named_parameters()), version=step - 1)
        clock.lap("time/sync_seconds")
        rollouts = self.sampler.generate(requests, self.sampling, poll=self.updater.give_up_if_stopped)
        check_rollouts(rollouts, requests, step - 1, report.sha256)
        clock.lap("time/rollout_seconds")
        self.updater.give_up_if_stopped()
        answers, scores = self.score(requests, rows, rollouts)
        check_any_score(scores.num_missing, len(answers), step)
        clock.lap("time/reward_seconds")
        self.updater.give_up_if_stopped()
        release_free_memory()
        trained = self.updater.update(step, scored_batch(requests, rollouts, scores))
        release_free_memory()
        clock.lap("time/train_seconds")
        num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
        speed = {"rollout/tokens_per_second": num_tokens / max(clock.seconds["time/rollout_seconds"], 1e-9)}
        return StepRecord(
            metrics={**scores.metrics(), **rollout_metrics(rollouts), **trained},
            timings={**clock.seconds, **speed},
            samples=self.samples(step, rows, rollouts, answers, scores),
        )

    def make_requests(self, step: int) -> tuple[list[RolloutRequest], list[PromptRow]]:
        """Return the step's requests, group after group, and the prompt row of each."""
        config, prompts, seed = self.config, self.prompts, self.updater.seed
        chosen = batch_indices(step - 1, config.prompts_per_step, len(prompts.rows), seed, "data_order")
        requests: list[RolloutRequest] = []
        rows: list[PromptRow] = []
        for index in chosen:
            for sample_index in range(config.group_size):
                rollout_seed = derive_seed(seed, "rollout", step, len(requests))
                row = prompts.rows[index]
                requests.append(RolloutRequest(row.prompt_id, sample_index, prompts.token_ids[index], rollout_seed))
                rows.append(row)
        return requests, rows

    def score(
        self, requests: Sequence[RolloutRequest], rows: Sequence[PromptRow], rollouts: Sequence[Rollout]
    ) -> tuple[list[str], CombinedScores]:
        """Return the answers as text, without the end-of-turn token, and their scores."""
        tokens = [rollout.answer_ids for rollout in rollouts]
        texts = [decode_answer(self.tokenizer, ids) for ids in tokens]
        context = RewardContext(
            num_tokens=[len(ids) for ids in tokens],
            stop_reasons=[rollout.stop_reason for rollout in rollouts],
            extras=[row.extra for row in rows],
            max_new_tokens=self.sampling.max_new_tokens,
            sequences=[
                request.prompt_ids + rollout.token_ids for request, rollout in zip(requests, rollouts, strict=True)
            ],
        )
        return texts, score_answers(self.rewards, [row.prompt for row in rows], texts, context)

    def samples(
        self,
        step: int,
        rows: Sequence[PromptRow],
        rollouts: Sequence[Rollout],
        answers: Sequence[str],
        scores: CombinedScores,
    ) -> list[dict[str, Any]]:
        """Return the first answer of each group, at the first step and every `samples_every_steps`."""
        if step != 1 and step % self.config.samples_every_steps:
            return []
        return [
            {
                "prompt_id": rows[i].prompt_id,
                "prompt": rows[i].prompt[-1].content,
                "answer": answers[i],
                "num_tokens": len(rollouts[i].token_ids),
                "stop_reason": rollouts[i].stop_reason.value,
                "reward": scores.totals[i],
                **{f"reward_{name}": values[i] for name, values in scores.parts.items()},
            }
            for i in range(0, len(rows), self.config.group_size)
        ]

    def save(self, directory: Path, step: int) -> None:
        self.updater.optimizer.save(directory, step)
        state = GrpoState(step=step, reference_sha256=self.reference_sha256, num_prompts=len(self.prompts.rows))
        write_json(directory / STATE_FILE, state.model_dump(mode="json"))

    def load(self, directory: Path) -> int:
        """Restore a checkpoint; return the steps done.

        Raises:
            ArtifactError: a part is missing, of another version, or of a training on other inputs.
        """
        try:
            state = GrpoState.model_validate(read_json(directory / STATE_FILE))
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{directory} holds no readable {STATE_FILE}: {error}") from error
        if (state.reference_sha256, state.num_prompts) != (self.reference_sha256, len(self.prompts.rows)):
            raise ArtifactError(f"{directory} belongs to a training from another checkpoint or on other prompts")
        if self.updater.optimizer.load(directory) != state.step:
            raise ArtifactError(f"{directory}: weights and {STATE_FILE} were saved after different steps")
        return state.step


def scored_batch(
    requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout], scores: CombinedScores
) -> ScoredBatch:
    return ScoredBatch(
        batch=build_batch(requests, rollouts),
        scores=torch.tensor([0.0 if total is None else total for total in scores.totals], dtype=torch.float64),
        present=torch.tensor([total is not None for total in scores.totals]),
        is_truncated=torch.tensor([rollout.stop_reason == StopReason.LENGTH for rollout in rollouts]),
    )


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return length and truncation of a step's answers; the end-of-turn token counts as a token."""
    num_truncated = sum(rollout.stop_reason == StopReason.LENGTH for rollout in rollouts)
    return {
        "rollout/length_mean_tokens": sum(len(rollout.token_ids) for rollout in rollouts) / len(rollouts),
        "rollout/truncated_fraction": num_truncated / len(rollouts),
    }
