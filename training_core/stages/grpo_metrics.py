"""What a GRPO step measures of its forward passes, and the checks on it. Sums and counts over tokens, in float64.

Shapes: B rows of a micro-batch, t its longest answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from training_core.metrics import MetricSums
from training_core.ops.kl import k1, k3
from training_core.ops.masking import masked_fill_zero, masked_sum
from training_core.sentinels import check_reference_is_start, check_sampler_agrees

SAMPLER_MISMATCH = "rollout/sampler_trainer_kl_nats"
POLICY_REFERENCE_KL = "kl/policy_ref_nats"


@dataclass(frozen=True)
class TokenValues:
    """What a forward pass said about a micro-batch, each [B, t] and without gradient."""

    logprobs: Tensor
    old_logprobs: Tensor
    entropy: Tensor
    is_clipped: Tensor
    mask: Tensor


def add_policy_metrics(sums: MetricSums, values: TokenValues) -> None:
    """Add what every update of a step reports: means over its tokens, in float64."""
    count = int(values.mask.sum())
    ratio = masked_fill_zero(values.logprobs - values.old_logprobs, values.mask).exp()
    sums.add("policy/entropy_nats", float(masked_sum(values.entropy.double(), values.mask)), count)
    sums.add("policy/clip_fraction", int((values.is_clipped & values.mask).sum()), count)
    sums.add("policy/ratio_mean", float(masked_sum(ratio.double(), values.mask)), count)


def add_comparisons(
    sums: MetricSums, logprobs: Tensor, sampler_logprobs: Tensor, reference_logprobs: Tensor | None, mask: Tensor
) -> None:
    """Add what compares the policy that sampled with the engine's log-probs and with the reference; all [B, t]."""
    count = int(mask.sum())
    mismatch = masked_fill_zero(sampler_logprobs - logprobs, mask).double()
    sums.add(SAMPLER_MISMATCH, float(masked_sum(k3(mismatch), mask)), count)
    if reference_logprobs is not None:
        log_ratio = masked_fill_zero(logprobs - reference_logprobs, mask).double()
        sums.add(POLICY_REFERENCE_KL, float(masked_sum(k3(log_ratio), mask)), count)
        sums.add("kl/policy_ref_k1_nats", float(masked_sum(k1(log_ratio), mask)), count)
        sums.add("kl/policy_ref_answer_nats", float(masked_sum(k1(log_ratio), mask)), int(mask.any(dim=1).sum()))


def check_comparisons(sums: MetricSums, step: int, max_sampler_trainer_kl_nats: float) -> None:
    """Check what must hold before the first update of a step: same weights in sampler, trainer and, at the start,
    reference.

    Raises:
        WeightVersionError: the sampler's log-probs are not the policy's.
        ArtifactError: the untrained policy is not the reference.
    """
    means = sums.means()
    check_sampler_agrees(means.get(SAMPLER_MISMATCH, 0.0), max_sampler_trainer_kl_nats, step)
    if step == 1:
        check_reference_is_start(means.get(POLICY_REFERENCE_KL, 0.0), step)
