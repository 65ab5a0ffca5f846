"""From some items to their losses and metrics: pairs (DPO and its family) and judged answers (KTO)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from training_core.config.preference import DpoConfig, KtoConfig
from training_core.data.batching import micro_batches
from training_core.errors import ArtifactError
from training_core.metrics import MetricSums
from training_core.ops.preference_losses import PairLogprobs, implicit_rewards, kto
from training_core.preference.forward import AnswerScorer, PromptedAnswer
from training_core.preference.items import Indices, JudgedItems, PairItems
from training_core.preference.losses import build_pair_loss, reward_knobs

LOSS = "train/loss"
ACCURACY = "rewards/accuracy"
MARGIN = "rewards/margin_mean"
CHOSEN, REJECTED = "rewards/chosen_mean", "rewards/rejected_mean"
NUM_TOKENS = "train/num_tokens"

ItemsT = TypeVar("ItemsT", PairItems, JudgedItems)


@dataclass(frozen=True)
class Split(Generic[ItemsT]):
    """A training or validation set with the reference's log-probabilities."""

    items: ItemsT
    reference: Tensor | None
    """[2, items] float64, nats: of the two answers of each item (see `Items.forwards`). None when no loss asks."""

    def reference_of(self, answer: int, indices: Indices) -> Tensor:
        """Return the reference's log-probabilities of the first (0) or second (1) answer of these items."""
        if self.reference is None:
            raise ArtifactError("the loss needs a reference, and none was computed")
        return self.reference[answer, list(indices)]


class Objective(Protocol[ItemsT]):
    """What a trainer minimises."""

    scorer: AnswerScorer
    """The policy."""

    def prepare(self, split: Split[ItemsT], indices: Indices, size: int, give_up: Callable[[], None]) -> Tensor | None:
        """Return what all losses of an optimizer step share, computed without gradient; None for nothing.

        Args:
            split: the data.
            indices: the items of the step.
            size: items a forward pass.
            give_up: called before each forward pass; raises when the step is to be abandoned.
        """
        ...

    def losses(self, split: Split[ItemsT], indices: Indices, shared: Tensor | None, sums: MetricSums) -> Tensor:
        """Return the loss of each of these items, [items] float64, and add their metrics to `sums`."""
        ...


class PairObjective:
    """DPO and its family: a loss of each pair, from one forward pass over both answers.

    Args:
        config: loss and weight of the supervised term.
        scorer: the policy.
    """

    def __init__(self, config: DpoConfig, scorer: AnswerScorer) -> None:
        self.config = config
        self.scorer = scorer
        self.loss = build_pair_loss(config.loss)
        self.reward_knobs = reward_knobs(config.loss)

    def prepare(self, split: Split[PairItems], indices: Indices, size: int, give_up: Callable[[], None]) -> None:
        return None

    def losses(self, split: Split[PairItems], indices: Indices, shared: Tensor | None, sums: MetricSums) -> Tensor:
        answers = split.items.answers(indices)
        pair = self.pair_logprobs(split, indices, answers)
        losses = self.loss(pair)
        if self.config.sft_weight:
            nll = -pair.policy_chosen / pair.chosen_lengths
            losses = losses + self.config.sft_weight * nll
            add_mean(sums, "train/sft_loss_nats", nll)
        add_pair_metrics(sums, losses, pair, implicit_rewards(pair, **self.reward_knobs))
        add_num_tokens(sums, answers)
        return losses

    def pair_logprobs(
        self, split: Split[PairItems], indices: Indices, answers: Sequence[PromptedAnswer]
    ) -> PairLogprobs:
        logprobs = self.scorer.logprobs(answers)
        device, count = logprobs.device, len(indices)
        lengths = torch.tensor([answer.num_answer_tokens for answer in answers], device=device)
        reference = None if split.reference is None else split.reference[:, list(indices)].to(device)
        return PairLogprobs(
            policy_chosen=logprobs[:count],
            policy_rejected=logprobs[count:],
            reference_chosen=None if reference is None else reference[0],
            reference_rejected=None if reference is None else reference[1],
            chosen_lengths=lengths[:count],
            rejected_lengths=lengths[count:],
        )


class KtoObjective:
    """KTO: a loss of each judged answer, compared with how far the policy is from the reference elsewhere.

    The baseline is an estimate of KL(policy || reference): the mean, over the items of the whole optimizer step, of the
    log-ratio of an answer to another prompt, and 0 where that is negative (Ethayarajh et al. 2024, arXiv 2402.01306,
    section 4.1). It costs a forward pass without gradient over as many answers again, and does not depend on how the
    step is cut into micro-batches.

    Args:
        config: beta and the weights.
        scorer: the policy.
    """

    def __init__(self, config: KtoConfig, scorer: AnswerScorer) -> None:
        self.config = config
        self.scorer = scorer

    @torch.no_grad()
    def prepare(self, split: Split[JudgedItems], indices: Indices, size: int, give_up: Callable[[], None]) -> Tensor:
        """Return the baseline, a scalar in nats; 0 when none of the items has a partner to measure it on."""
        items = split.items
        measured = [index for index in indices if items.partners[index] >= 0]
        total = torch.zeros((), dtype=torch.float64)
        for part in micro_batches(measured, items.lengths, size):
            give_up()
            log_ratios = self.scorer.logprobs(items.mismatched(part)).cpu() - split.reference_of(1, part)
            total += log_ratios.sum()
        return (total / max(len(measured), 1)).clamp(min=0.0)

    def losses(self, split: Split[JudgedItems], indices: Indices, shared: Tensor | None, sums: MetricSums) -> Tensor:
        if shared is None:
            raise ValueError("KTO's losses need the baseline that `prepare` returns")
        answers, config = split.items.answers(indices), self.config
        logprobs = self.scorer.logprobs(answers)
        desirable = split.items.desirable[list(indices)].to(logprobs.device)
        reference = split.reference_of(0, indices).to(logprobs.device)
        baseline = shared.to(logprobs.device)
        losses = kto(
            logprobs,
            reference,
            desirable,
            baseline,
            beta=config.beta,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        )
        add_judged_metrics(sums, losses, logprobs, config.beta * (logprobs - reference), desirable)
        above = config.beta * (logprobs - reference - baseline)
        add_mean(sums, ACCURACY, share_right(torch.where(desirable, above, -above)))
        sums.add("kl/baseline_nats", float(baseline), 1)
        add_num_tokens(sums, answers)
        return losses


def share_right(margins: Tensor) -> Tensor:
    """Return 1 where a margin is above 0, 1/2 for a tie, else 0."""
    return (margins > 0).double() + 0.5 * (margins == 0).double()


def add_mean(sums: MetricSums, name: str, values: Tensor) -> None:
    sums.add(name, float(values.detach().double().sum()), len(values))


def add_num_tokens(sums: MetricSums, answers: Sequence[PromptedAnswer]) -> None:
    sums.add(NUM_TOKENS, sum(len(answer.ids) for answer in answers), 1)


def add_pair_metrics(sums: MetricSums, losses: Tensor, pair: PairLogprobs, rewards: tuple[Tensor, Tensor]) -> None:
    """Add the metrics of some pairs; all tensors are [pairs]."""
    chosen, rejected = rewards
    add_mean(sums, LOSS, losses)
    add_mean(sums, CHOSEN, chosen)
    add_mean(sums, REJECTED, rejected)
    add_mean(sums, MARGIN, chosen - rejected)
    add_mean(sums, ACCURACY, share_right(chosen - rejected))
    add_mean(sums, "logprobs/chosen_mean_nats", pair.policy_chosen)
    add_mean(sums, "logprobs/rejected_mean_nats", pair.policy_rejected)


def add_judged_metrics(sums: MetricSums, losses: Tensor, logprobs: Tensor, rewards: Tensor, desirable: Tensor) -> None:
    """Add the metrics of some judged answers; all tensors are [answers]. A kind that is not there adds nothing."""
    add_mean(sums, LOSS, losses)
    for rows, name in ((desirable, "chosen"), (~desirable, "rejected")):
        add_mean(sums, f"rewards/{name}_mean", rewards[rows])
        add_mean(sums, f"logprobs/{name}_mean_nats", logprobs[rows])


def means_with_margin(sums: MetricSums) -> dict[str, float]:
    """Return the means; the margin of judged answers is the difference of the means of both kinds, if both are there.

    Equal sums of tokens are counts, not means: `train/num_tokens` is the total.
    """
    means = sums.means()
    if MARGIN not in means and CHOSEN in means and REJECTED in means:
        means[MARGIN] = means[CHOSEN] - means[REJECTED]
    means[NUM_TOKENS] = int(sums.sums[NUM_TOKENS].total)
    return means


@torch.no_grad()
def measure(objective: Objective[ItemsT], split: Split[ItemsT], size: int) -> dict[str, float]:
    """Return validation metrics of all items, named as in training."""
    indices = range(len(split.items))
    shared = objective.prepare(split, indices, size, lambda: None)
    sums = MetricSums()
    for part in micro_batches(indices, split.items.lengths, size):
        objective.losses(split, part, shared, sums)
    return means_with_margin(sums)
