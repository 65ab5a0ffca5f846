"""One step of training on the policy's own answers: hand over weights, sample, score, update. The same for every
algorithm; what differs are the two plugs in `updater`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from training_core.config.kl import AdaptiveCoefficient, KlInLoss, KlInReward
from training_core.engines.single import SingleProcessEngine
from training_core.errors import ArtifactError
from training_core.loop import StepRecord
from training_core.memory import release_free_memory
from training_core.models.lora import merged_parameters
from training_core.ops.kl_control import adaptive_kl_coefficient
from training_core.records import StopReason
from training_core.rewards.scaling import RewardState
from training_core.rl.metrics import ANSWER_KL
from training_core.rl.replay import Drawn, KeptAnswer, KeptGroup, ReplayBuffer
from training_core.rl.sampling import Sampler, ScoredGroup, sample_rows
from training_core.rl.signal import ScoredBatch
from training_core.rl.state import TrainerState, load_state
from training_core.rl.update import PolicyUpdater
from training_core.rollout.base import NamedTensors
from training_core.rollout.batch import build_batch
from training_core.sentinels import KnobChanges, check_any_baseline, check_any_score

CRITIC_FOLDER = "critic"


@dataclass
class Clock:
    """Seconds between laps, added up by name."""

    seconds: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.monotonic)

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now


class PolicyTrainer:
    """A step, and the state on disk.

    Args:
        updater: the training half: policy, reference, critic and their optimizers.
        sampler: the sampling half.
        reference_sha256: weights digest of the checkpoint that the policy started from.
        prompts_sha256: digest of the prompts.
    """

    def __init__(
        self, updater: PolicyUpdater, sampler: Sampler, reference_sha256: str, prompts_sha256: str = ""
    ) -> None:
        self.updater = updater
        self.config = updater.config
        self.sampler = sampler
        self.reference_sha256 = reference_sha256
        self.prompts_sha256 = prompts_sha256
        self.reward_state = RewardState()
        kl = self.config.kl
        self.kl_coefficient = kl.coefficient if isinstance(kl, KlInReward | KlInLoss) else 0.0
        self.replay = None if self.config.replay is None else ReplayBuffer(self.config.replay)
        self.knobs = KnobChanges()

    def train_step(self, step: int) -> StepRecord:
        """Do step `step` (from 1). training_core/loop.py has the contract.

        Raises:
            WeightVersionError: the engine samples with other weights than the trainer's.
            EvaluationError: no answer has a score, or one is not finite.
        """
        clock = Clock()
        self.sampler.on_phase = lambda name: clock.lap(f"time/{name}_seconds")
        report = self.sampler.hand_over(self.weights(), step)
        clock.lap("time/sync_seconds")
        sampled = self.sampler.sample(step, report, self.reward_state)
        scores = sampled.scores
        check_any_score(scores.num_missing, len(sampled.rollouts), step, scores.silent_parts())
        if sampled.num_without_baseline is not None:
            check_any_baseline(sampled.num_without_baseline, sampled.num_sampled_groups, step)
        drawn = Drawn() if self.replay is None else self.replay.draw(step, self.updater.around.seed)
        coefficient = self.kl_coefficient * self.knobs.kl_coefficient_factor
        release_free_memory()
        scored = scored_batch(sampled.groups, drawn, with_baselines=self.config.advantage.needs_greedy_answer)
        trained, advantages = self.updater.update(step, scored, coefficient)
        release_free_memory()
        clock.lap("time/train_seconds")
        # From here on nothing can be given up: the weights have changed, and so does the rest of the state.
        self.reward_state = sampled.reward_state
        metrics = {**sampled.metrics(), **trained, **self.kl_metrics(coefficient)}
        if self.replay is not None:
            metrics.update(self.replay.metrics(step, drawn))
            if self.config.mask_truncated:  # Cut answers have advantages, but nothing is learned from them.
                advantages = advantages.masked_fill(scored.is_truncated[:, None], 0.0)
            priorities = group_priorities(scored.batch.mask, scored.group_ids, advantages)
            self.replay.learned(drawn, priorities[len(sampled.groups) :])
            self.replay.add(kept_groups(step, sampled.groups, priorities[: len(sampled.groups)]))
        self.follow_kl(metrics, len(sampled.rollouts))
        num_tokens = sum(len(rollout.token_ids) for rollout in sampled.rollouts)
        speed = {"rollout/tokens_per_second": num_tokens / max(clock.seconds["time/rollout_seconds"], 1e-9)}
        is_shown = step == 1 or step % self.config.samples_every_steps == 0
        return StepRecord(
            metrics=metrics,
            timings={**clock.seconds, **speed},
            samples=sample_rows(sampled.groups) if is_shown else [],
        )

    def weights(self) -> NamedTensors:
        """Return the policy's weights as its checkpoint names them, an adapter merged into them."""
        return merged_parameters(self.updater.policy)

    def kl_metrics(self, coefficient: float) -> dict[str, float]:
        return {"kl/coefficient": coefficient} if coefficient else {}

    def follow_kl(self, metrics: dict[str, float], num_answers: int) -> None:
        """Let the controller of the KL coefficient see the step's KL."""
        controller = getattr(self.config.kl, "controller", None)
        if isinstance(controller, AdaptiveCoefficient) and ANSWER_KL in metrics:
            self.kl_coefficient = adaptive_kl_coefficient(
                self.kl_coefficient,
                metrics[ANSWER_KL],
                controller.target_nats,
                controller.horizon_answers,
                num_answers,
            )

    def change_knobs(self, changes: KnobChanges) -> None:
        """Put what a roll-back changes in force, in place of what was."""
        self.knobs = changes
        self.sampler.attempt = changes.num_roll_backs
        for engine in self.engines():
            engine.learning_rate_factor = changes.learning_rate_factor

    def engines(self) -> list[SingleProcessEngine]:
        critic = self.updater.critic
        return [self.updater.optimizer, *([critic.optimizer] if critic else [])]

    def save(self, directory: Path, step: int) -> None:
        self.updater.optimizer.save(directory, step)
        if self.updater.critic is not None:
            (directory / CRITIC_FOLDER).mkdir()
            self.updater.critic.optimizer.save(directory / CRITIC_FOLDER, step)
        if self.replay is not None:
            self.replay.save(directory)
        self.state(step).save(directory)

    def state(self, step: int) -> TrainerState:
        return TrainerState(
            algorithm=self.config.name,
            step=step,
            weight_version=step,
            reference_sha256=self.reference_sha256,
            prompts_sha256=self.prompts_sha256,
            kl_coefficient=self.kl_coefficient,
            reward=self.reward_state,
            knobs=self.knobs,
            has_critic=self.updater.critic is not None,
            has_replay=self.replay is not None,
        )

    def load(self, directory: Path) -> int:
        """Restore a checkpoint; return the steps done.

        Raises:
            ArtifactError: a part is missing, of another version, or of a training on other inputs.
        """
        state = load_state(directory)
        expected = self.state(state.step)
        for name in ("algorithm", "reference_sha256", "prompts_sha256", "has_critic", "has_replay", "weight_version"):
            if getattr(state, name) != getattr(expected, name):
                raise ArtifactError(
                    f"{directory} belongs to a training from another checkpoint, on other prompts or by another "
                    f"algorithm: {name} is {getattr(state, name)!r} there and {getattr(expected, name)!r} here"
                )
        if self.updater.optimizer.load(directory) != state.step:
            raise ArtifactError(f"{directory}: weights and state.json were saved after different steps")
        critic = self.updater.critic
        if critic is not None and critic.optimizer.load(directory / CRITIC_FOLDER) != state.step:
            raise ArtifactError(f"{directory}: the critic's weights and state.json were saved after different steps")
        if self.replay is not None:
            self.replay.load(directory)
        self.kl_coefficient, self.reward_state = state.kl_coefficient, state.reward
        self.change_knobs(state.knobs)
        return state.step


def scored_batch(groups: Sequence[ScoredGroup], drawn: Drawn, *, with_baselines: bool = False) -> ScoredBatch:
    """Return fresh groups, then replayed ones, as tensors."""
    prompts, answers, logprobs, scores, truncated, ids, baselines = [], [], [], [], [], [], []
    for number, group in enumerate(groups):
        for request, rollout, score in zip(group.requests, group.rollouts, group.scores, strict=True):
            prompts.append(request.prompt_ids)
            answers.append(rollout.token_ids)
            logprobs.append(rollout.logprobs)
            scores.append(score)
            truncated.append(rollout.stop_reason == StopReason.LENGTH)
            ids.append(number)
            baselines.append(group.baseline_score)
    num_fresh = len(answers)
    for number, kept in enumerate(drawn.groups, start=len(groups)):
        for answer in kept.answers:
            prompts.append(tuple(kept.prompt_ids))
            answers.append(tuple(answer.token_ids))
            logprobs.append(tuple(answer.logprobs))
            scores.append(answer.score)
            truncated.append(answer.stop_reason == StopReason.LENGTH)
            ids.append(number)
            baselines.append(kept.baseline_score)
    weights = [1.0] * num_fresh + [w for w, kept in zip(drawn.weights, drawn.groups, strict=True) for _ in kept.answers]
    return ScoredBatch(
        batch=build_batch(prompts, answers, logprobs),
        scores=torch.tensor([0.0 if score is None else score for score in scores], dtype=torch.float64),
        present=torch.tensor([score is not None for score in scores]),
        is_truncated=torch.tensor(truncated),
        group_ids=torch.tensor(ids),
        baseline_scores=torch.tensor([float("nan") if b is None else b for b in baselines], dtype=torch.float64)
        if with_baselines
        else None,
        is_replayed=torch.arange(len(answers)) >= num_fresh if drawn.groups else None,
        row_weights=torch.tensor(weights, dtype=torch.float64) if any(w != 1.0 for w in weights) else None,
    )


def group_priorities(mask: torch.Tensor, group_ids: torch.Tensor, advantages: torch.Tensor) -> list[float]:
    """Return each group's mean absolute advantage over the tokens of its answers.

    Args:
        mask: [N, T] bool, answer tokens.
        group_ids: [N], 0 to the number of groups - 1, each with an answer.
        advantages: [N, T], 0 where nothing is learned.
    """
    totals = group_ids.bincount(weights=advantages.double().abs().sum(dim=1))
    return (totals / group_ids.bincount(weights=mask.sum(dim=1).double()).clamp(min=1.0)).tolist()


def kept_groups(step: int, groups: Sequence[ScoredGroup], priorities: Sequence[float]) -> list[KeptGroup]:
    """Return those of a step's fresh groups for the replay buffer that had an advantage; with one priority each."""
    return [
        KeptGroup(
            step=step,
            prompt_id=group.row.prompt_id,
            prompt_ids=list(group.requests[0].prompt_ids),
            answers=[
                KeptAnswer(
                    token_ids=list(rollout.token_ids),
                    logprobs=list(rollout.logprobs),
                    stop_reason=rollout.stop_reason,
                    score=score,
                )
                for rollout, score in zip(group.rollouts, group.scores, strict=True)
            ],
            baseline_score=group.baseline_score,
            priority=priority,
        )
        for group, priority in zip(groups, priorities, strict=True)
        if priority > 0.0
    ]
