"""Losses of preferences: how a policy learns from answers that people compared or judged, without sampling.

All are functions of the log-probabilities of whole answers: sums over the answer's tokens, in nats. Notation of the
formulas: h = (log policy - log reference of the chosen answer) - (the same of the rejected answer). Nothing is
averaged here: one value a pair or row, which the trainer divides by their number in the whole optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class PairLogprobs:
    """Log-probabilities of both answers of some pairs: sums over the answer's tokens, nats, each [pairs] float."""

    policy_chosen: Tensor
    policy_rejected: Tensor
    reference_chosen: Tensor | None
    """Of the frozen reference; never passed a gradient. None for losses without a reference."""
    reference_rejected: Tensor | None
    chosen_lengths: Tensor
    """[pairs] int: tokens of the chosen answer, its end included."""
    rejected_lengths: Tensor


def log_ratios(pair: PairLogprobs, length_normalised: bool = False) -> tuple[Tensor, Tensor]:
    """Compute how much likelier the policy holds each answer than the reference does.

    log_ratio = log policy - log reference, of the chosen and of the rejected answer; divided by the answer's tokens
    when `length_normalised`.

    Special cases:
        Policy equal to reference: exactly 0.

    Args:
        pair: log-probabilities, each [pairs].
        length_normalised: per token instead of per answer.

    Returns:
        (chosen, rejected), each [pairs], nats (nats a token when normalised).

    Gradient:
        To the policy's log-probabilities only.

    Raises:
        ValueError: there are no reference log-probabilities, or lengths below 1 where they are used.

    Source:
        Rafailov et al. 2023, equation 5, arXiv 2305.18290.

    Example:
        >>> one, length = torch.ones(1), torch.ones(1, dtype=torch.int64)
        >>> chosen, rejected = log_ratios(PairLogprobs(-one, -2 * one, -one, -one, length, length))
        >>> chosen.item(), rejected.item()
        (0.0, -1.0)
    """
    if pair.reference_chosen is None or pair.reference_rejected is None:
        raise ValueError("this loss compares with a reference: reference_chosen and reference_rejected are needed")
    chosen = pair.policy_chosen - pair.reference_chosen.detach()
    rejected = pair.policy_rejected - pair.reference_rejected.detach()
    return _per_token(pair, chosen, rejected) if length_normalised else (chosen, rejected)


def implicit_rewards(pair: PairLogprobs, *, beta: float, length_normalised: bool = False) -> tuple[Tensor, Tensor]:
    """Compute the rewards that a policy stands for, for metrics.

    reward = beta * (log policy - log reference); without a reference beta * log policy / length.

    Special cases:
        Policy equal to reference: exactly 0.

    Args:
        pair: log-probabilities, each [pairs].
        beta: of the loss, above 0.
        length_normalised: per token, where the loss is.

    Returns:
        (chosen, rejected), each [pairs], in the unit of beta times nats.

    Gradient:
        None: it is a metric.

    Raises:
        ValueError: beta out of range, or an answer without tokens where lengths are used.

    Source:
        Rafailov et al. 2023, equation 5, arXiv 2305.18290 (without the term of the prompt, which differences lose);
        without a reference: Meng et al. 2024, equation 4, arXiv 2405.14734.

    Example:
        >>> one, length = torch.ones(1), torch.full((1,), 2)
        >>> pair = PairLogprobs(-one, -4 * one, None, None, length, length)
        >>> [reward.item() for reward in implicit_rewards(pair, beta=2.0)]
        [-1.0, -4.0]
    """
    _check_beta(beta)
    if pair.reference_chosen is None:
        chosen, rejected = _per_token(pair, pair.policy_chosen, pair.policy_rejected)
    else:
        chosen, rejected = log_ratios(pair, length_normalised)
    return beta * chosen.detach(), beta * rejected.detach()


def _per_token(pair: PairLogprobs, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    for lengths in (pair.chosen_lengths, pair.rejected_lengths):
        if lengths.numel() and int(lengths.min()) < 1:
            raise ValueError("an answer without tokens has no mean log-probability; every length must be at least 1")
    return chosen / pair.chosen_lengths, rejected / pair.rejected_lengths


def _difference(pair: PairLogprobs, length_normalised: bool = False) -> Tensor:
    chosen, rejected = log_ratios(pair, length_normalised)
    return chosen - rejected


def _check_beta(beta: float) -> None:
    if beta <= 0.0:
        raise ValueError(f"beta must be above 0, got {beta}")


def sigmoid(
    pair: PairLogprobs, *, beta: float, label_smoothing: float = 0.0, length_normalised: bool = False
) -> Tensor:
    """Compute the DPO loss, and conservative DPO's with label smoothing.

    loss = -(1 - s) * log sigmoid(beta * h) - s * log sigmoid(-beta * h), s = label_smoothing.

    Special cases:
        s = 0: DPO. Policy equal to reference: ln 2 for every s. s = 1/2: the same for h and -h, smallest at h = 0.
        Answers of one token: length normalisation changes nothing. With s > 0 the smallest loss is at
        sigmoid(beta * h) = 1 - s instead of infinitely far away.

    Args:
        pair: log-probabilities, each [pairs].
        beta: strength of the pull to the reference, above 0: the implicit reward's unit per nat.
        label_smoothing: assumed share of pairs whose label is the wrong way round, in [0, 1/2].
        length_normalised: log-ratios per token instead of per answer; beta then counts nats a token.

    Returns:
        [pairs], nats, at least 0.

    Gradient:
        To the policy's log-probabilities; that of the chosen one is the negative of that of the rejected one (without
        length normalisation).

    Raises:
        ValueError: a knob out of range, or no reference.

    Source:
        Rafailov et al. 2023, equation 7, arXiv 2305.18290; label smoothing: Mitchell 2023, "A note on DPO with noisy
        preferences and relationship to IPO"; length normalisation: Lambert et al. 2024 (Tulu 3), section 5,
        arXiv 2411.15124.

    Example:
        >>> zero, length = torch.zeros(1), torch.ones(1, dtype=torch.int64)
        >>> round(sigmoid(PairLogprobs(zero, zero, zero, zero, length, length), beta=0.1).item(), 6)
        0.693147
    """
    _check_beta(beta)
    if not 0.0 <= label_smoothing <= 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5], got {label_smoothing}")
    logits = beta * _difference(pair, length_normalised)
    return -(1.0 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def robust(pair: PairLogprobs, *, beta: float, label_smoothing: float) -> Tensor:
    """Compute robust DPO's loss: unbiased when a known share of the labels was turned round at random.

    loss = (-(1 - s) * log sigmoid(beta * h) + s * log sigmoid(-beta * h)) / (1 - 2 * s), s = label_smoothing.

    Special cases:
        s = 0: DPO. Its mean over labels that are turned round with probability s is DPO's loss of the right label.
        Policy equal to reference: ln 2. For s > 0 it has no lower bound: it falls without end as h grows.

    Args:
        pair: log-probabilities, each [pairs].
        beta: strength of the pull to the reference, above 0.
        label_smoothing: share of labels that are the wrong way round, in [0, 1/2).

    Returns:
        [pairs], nats; may be negative.

    Gradient:
        To the policy's log-probabilities.

    Raises:
        ValueError: a knob out of range, or no reference.

    Source:
        Chowdhury et al. 2024 (the loss of "rDPO", section 3), arXiv 2403.00409.

    Example:
        >>> zero, length = torch.zeros(1), torch.ones(1, dtype=torch.int64)
        >>> pair = PairLogprobs(zero, zero, zero, zero, length, length)
        >>> round(robust(pair, beta=0.1, label_smoothing=0.2).item(), 6)
        0.693147
    """
    _check_beta(beta)
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}")
    logits = beta * _difference(pair)
    noisy = -(1.0 - label_smoothing) * logsigmoid(logits) + label_smoothing * logsigmoid(-logits)
    return noisy / (1.0 - 2.0 * label_smoothing)


def ipo(pair: PairLogprobs, *, beta: float, length_normalised: bool) -> Tensor:
    """Compute the IPO loss: the log-ratios' difference is drawn to a finite target.

    loss = (h - 1 / (2 * beta)) ** 2, beta the paper's tau.

    Other stacks disagree on h and so on what a value of beta means: OpenRLHF takes sums over tokens as the equation
    reads, TRL takes means. `length_normalised` says which; a target of 1 / (2 * beta) nats a token is far larger than
    one of as many nats an answer.

    Special cases:
        h = 1 / (2 * beta): 0, with no gradient; beyond it the loss grows again. Policy equal to reference:
        1 / (4 * beta ** 2). Answers of one token: length normalisation changes nothing.

    Args:
        pair: log-probabilities, each [pairs].
        beta: strength of the pull to the reference, above 0, per nat (per nat a token when normalised).
        length_normalised: log-ratios per token instead of per answer.

    Returns:
        [pairs], squared nats, at least 0.

    Gradient:
        To the policy's log-probabilities.

    Raises:
        ValueError: beta out of range, or no reference.

    Source:
        Azar et al. 2023, equation 17, arXiv 2310.12036.

    Example:
        >>> zero, length = torch.zeros(1), torch.ones(1, dtype=torch.int64)
        >>> ipo(PairLogprobs(zero, zero, zero, zero, length, length), beta=0.5, length_normalised=False).item()
        1.0
    """
    _check_beta(beta)
    return (_difference(pair, length_normalised) - 1.0 / (2.0 * beta)).square()


def hinge(pair: PairLogprobs, *, beta: float) -> Tensor:
    """Compute the hinge loss on the log-ratios' difference.

    loss = max(0, 1 - beta * h).

    Special cases:
        Policy equal to reference: 1. h >= 1 / beta: 0, with no gradient; the pair is learned.

    Args:
        pair: log-probabilities, each [pairs].
        beta: 1 / beta is the margin in nats at which a pair counts as learned; above 0.

    Returns:
        [pairs], without unit, at least 0.

    Gradient:
        To the policy's log-probabilities, of constant size until the margin is reached.

    Raises:
        ValueError: beta out of range, or no reference.

    Source:
        Zhao et al. 2023 (SLiC-HF), equation 1, arXiv 2305.10425; with log-ratios to the reference in place of
        log-probabilities: Liu et al. 2023 (RSO, "hinge-norm"), arXiv 2309.06657.

    Example:
        >>> one, length = torch.ones(1), torch.ones(1, dtype=torch.int64)
        >>> hinge(PairLogprobs(-one, -3 * one, -one, -one, length, length), beta=0.25).item()
        0.5
    """
    _check_beta(beta)
    return torch.relu(1.0 - beta * _difference(pair))


def simpo(pair: PairLogprobs, *, beta: float, margin: float) -> Tensor:
    """Compute the SimPO loss: mean log-probabilities of the policy alone, with a margin.

    loss = -log sigmoid(beta * (chosen / chosen_length - rejected / rejected_length) - margin).

    Special cases:
        margin = 0 and a reference that holds every answer for certain (log-probability 0): length-normalised DPO.
        Equal mean log-probabilities: log(1 + exp(margin)).

    Args:
        pair: log-probabilities, each [pairs]; those of a reference are not looked at.
        beta: scale of the mean log-probabilities, above 0.
        margin: the paper's gamma, at least 0, in the unit of beta times nats a token.

    Returns:
        [pairs], nats, above 0.

    Gradient:
        To the policy's log-probabilities.

    Raises:
        ValueError: a knob out of range, or an answer without tokens.

    Source:
        Meng et al. 2024, equation 6, arXiv 2405.14734.

    Example:
        >>> one, length = torch.ones(1), torch.ones(1, dtype=torch.int64)
        >>> pair = PairLogprobs(-one, -one, None, None, length, length)
        >>> round(simpo(pair, beta=2.0, margin=0.0).item(), 6)
        0.693147
    """
    _check_beta(beta)
    if margin < 0.0:
        raise ValueError(f"margin must be at least 0, got {margin}")
    chosen, rejected = _per_token(pair, pair.policy_chosen, pair.policy_rejected)
    return -logsigmoid(beta * (chosen - rejected) - margin)


def kto(
    policy_logprobs: Tensor,
    reference_logprobs: Tensor,
    desirable: Tensor,
    kl_baseline: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Compute the KTO loss of answers that were judged one by one.

    r = log policy - log reference. Desirable: loss = w_d * (1 - sigmoid(beta * (r - kl_baseline))); undesirable:
    loss = w_u * (1 - sigmoid(beta * (kl_baseline - r))).

    Special cases:
        r = kl_baseline: half the row's weight. Policy equal to reference and baseline 0: half the weight for every
        row. A weight of 0: that kind of row teaches nothing.

    Args:
        policy_logprobs: [rows], sums over the answer's tokens, nats.
        reference_logprobs: [rows], of the frozen reference.
        desirable: [rows] bool, true for a good answer.
        kl_baseline: scalar, at least 0, nats: the estimate of KL(policy || reference) that r is compared with.
        beta: how quickly the value saturates, above 0, per nat.
        desirable_weight: w_d, at least 0.
        undesirable_weight: w_u, at least 0.

    Returns:
        [rows], without unit, in [0, weight].

    Gradient:
        To `policy_logprobs` only: the baseline is a constant, as in the paper.

    Raises:
        TypeError: `desirable` is not bool.
        ValueError: a knob or the baseline out of range.

    Source:
        Ethayarajh et al. 2024, equations 7 and 8, arXiv 2402.01306.

    Example:
        >>> zero = torch.zeros(2)
        >>> kto(zero, zero, torch.tensor([True, False]), torch.tensor(0.0), beta=0.1, undesirable_weight=2.0).tolist()
        [0.5, 1.0]
    """
    _check_beta(beta)
    if desirable.dtype != torch.bool:
        raise TypeError(f"desirable must be bool, got {desirable.dtype}")
    if desirable_weight < 0.0 or undesirable_weight < 0.0:
        raise ValueError(f"weights must be at least 0, got {desirable_weight} and {undesirable_weight}")
    if kl_baseline.ndim or float(kl_baseline.detach()) < 0.0:
        raise ValueError(f"kl_baseline must be one number of at least 0, got {kl_baseline.tolist()}")
    distance = policy_logprobs - reference_logprobs.detach() - kl_baseline.detach()
    gains = torch.where(desirable, distance, -distance)
    # Of the losses' own dtype: two plain numbers would be rounded to float32 first.
    weights = torch.where(desirable, distance.new_tensor(desirable_weight), distance.new_tensor(undesirable_weight))
    # 1 - sigmoid(x) = sigmoid(-x), which keeps its digits where sigmoid(x) is close to 1.
    return weights * torch.sigmoid(-beta * gains)
