"""What a step measures of its forward passes, and the checks on it. Sums and counts over tokens, in float64.

Shapes: N answers of a step, B rows of a micro-batch, t its longest answer.
"""

from __future__ import annotations

from torch import Tensor

from training_core.metrics import MetricSums
from training_core.ops.advantages import Advantages
from training_core.ops.importance import effective_sample_parts
from training_core.ops.kl import k1, k3
from training_core.ops.masking import masked_fill_zero, masked_sum
from training_core.rl.losses import TokenInputs, TokenLosses
from training_core.rl.signal import ScoredBatch, Signal
from training_core.sentinels import check_reference_is_start, check_sampler_agrees

SAMPLER_MISMATCH = "rollout/sampler_trainer_kl_nats"
POLICY_REFERENCE_KL = "kl/policy_ref_nats"
ANSWER_KL = "kl/policy_ref_answer_nats"
ANSWER_KL_SQUARE = "kl/policy_ref_answer_square_mean"
"""Kept until the step's standard error is known, and not reported."""


def add_policy_metrics(sums: MetricSums, inputs: TokenInputs, found: TokenLosses) -> None:
    """Add what every update of a step reports: means over its tokens."""
    mask, count = inputs.mask, int(inputs.mask.sum())
    ratio = masked_fill_zero(inputs.logprobs.detach() - inputs.old_logprobs, mask).exp()
    sums.add("policy/entropy_nats", float(masked_sum(inputs.entropy.detach().double(), mask)), count)
    sums.add("policy/clip_fraction", int((found.is_clipped & mask).sum()), count)
    sums.add("policy/ratio_mean", float(masked_sum(ratio.double(), mask)), count)
    if found.importance is not None:
        # Replayed answers are not corrected: their weight of 1 would say that the engine agrees.
        fresh = mask if inputs.is_fresh is None else mask & inputs.is_fresh[:, None]
        parts = effective_sample_parts(found.importance, fresh)
        sums.add("importance/weight_mean", parts.sum_weights, parts.count)
        sums.add("importance/weight_square_mean", parts.sum_squares, parts.count)


def fresh_tokens(scored: ScoredBatch) -> Tensor:
    """Return [N, T] bool: the tokens of answers sampled in this step, truncated ones too: the policy of now."""
    mask = scored.batch.mask
    return mask if scored.is_replayed is None else mask & ~scored.is_replayed[:, None]


def add_comparisons(
    sums: MetricSums, logprobs: Tensor, sampler_logprobs: Tensor, reference_logprobs: Tensor | None, mask: Tensor
) -> None:
    """Add what compares the policy that sampled with the engine's log-probs and with the reference; all [B, t].

    Args:
        sums: where to.
        logprobs: of the policy before the first update.
        sampler_logprobs: of the engine.
        reference_logprobs: None without a reference.
        mask: tokens sampled in this step: over another policy's answers the estimates are of nothing.
    """
    count = int(mask.sum())
    mismatch = masked_fill_zero(sampler_logprobs - logprobs, mask).double()
    sums.add(SAMPLER_MISMATCH, float(masked_sum(k3(mismatch), mask)), count)
    if reference_logprobs is not None:
        log_ratio = masked_fill_zero(logprobs - reference_logprobs, mask).double()
        sums.add(POLICY_REFERENCE_KL, float(masked_sum(k3(log_ratio), mask)), count)
        sums.add("kl/policy_ref_k1_nats", float(masked_sum(k1(log_ratio), mask)), count)
        of_answers = masked_sum(k1(log_ratio), mask, dim=1)[mask.any(dim=1)]
        sums.add(ANSWER_KL, float(of_answers.sum()), len(of_answers))
        sums.add(ANSWER_KL_SQUARE, float(of_answers.square().sum()), len(of_answers))


def answer_kl_error(sums: MetricSums) -> dict[str, float]:
    """Return the standard error of `kl/policy_ref_answer_nats`, and take what it is made of out of `sums`.

    A KL below 0 is no fault when it lies within a few of them: answers are a sample. Absent for fewer than two.
    """
    squares = sums.sums.pop(ANSWER_KL_SQUARE, None)
    if squares is None or squares.count < 2:
        return {}
    count, mean = squares.count, sums.sums[ANSWER_KL].total / squares.count
    variance = max(squares.total - count * mean * mean, 0.0) / (count - 1)
    return {"kl/policy_ref_answer_stderr_nats": (variance / count) ** 0.5}


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


def advantage_metrics(scored: ScoredBatch, signal: Signal, found: Advantages) -> dict[str, float]:
    """Return what the estimator made of the step's scores.

    `advantage/score_variance` and `advantage/centred_score_variance` are variances over answers of the score as it is
    and with its group's mean taken off: what centring saves; the latter is absent where each group has one answer.
    `advantage/variance` is over tokens that count.
    """
    result = {
        "rollout/zero_variance_group_fraction": found.num_zero_variance_groups / max(found.num_groups, 1),
        "rollout/singleton_group_fraction": found.num_singletons / max(found.num_groups, 1),
    }
    result["advantage/left_out_fraction"] = found.num_without_score / len(scored.batch)
    present = scored.present
    if int(present.sum()) > 1:
        scores, groups = scored.scores[present], scored.group_ids[present]
        counts = groups.bincount().double()
        centred = scores - (groups.bincount(weights=scores) / counts.clamp(min=1.0))[groups]
        result["advantage/score_variance"] = float(scores.var(correction=0))
        if bool((counts > 1.0).any()):  # A score less itself is 0 and says nothing.
            result["advantage/centred_score_variance"] = float(centred.square().mean())
    values = signal.advantages[signal.mask].double()
    if len(values):
        result["advantage/variance"] = float(values.var(correction=0))
    return result


def effective_sample_fraction(means: dict[str, float]) -> dict[str, float]:
    """Return the share of tokens that would give the same precision unweighted: (mean w)^2 / mean w^2."""
    squares = means.pop("importance/weight_square_mean", None)
    if squares is None:
        return {}
    mean = means["importance/weight_mean"]
    return {"importance/effective_sample_fraction": mean * mean / squares if squares > 0.0 else 0.0}
