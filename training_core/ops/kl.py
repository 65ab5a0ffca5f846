"""KL divergence between policy and reference from the log-probabilities of sampled tokens.

Tokens are drawn from the policy. The value of an estimator and the gradient it has inside a loss are two different
things; each docstring says both. `log_ratio` is logprobs - reference_logprobs, per token, in nats.

Shapes: any, usually [batch, time]. Nothing is clamped: a clamp would take the gradient away where the policy has
moved furthest.
"""

from __future__ import annotations

import torch
from torch import Tensor


def k1(log_ratio: Tensor) -> Tensor:
    """Compute the plain estimator of the reverse KL(policy || reference).

    k1 = log_ratio.

    Special cases:
        Its mean over policy samples is the exact KL; single values may be negative.

    Args:
        log_ratio: log policy - log reference at sampled tokens, nats.

    Returns:
        Same shape, nats.

    Gradient:
        As a loss term its expected gradient is zero (the score function has mean zero): use it in the reward, where
        reward-to-go makes it exact.

    Source:
        Schulman 2020, "Approximating KL divergence".

    Example:
        >>> k1(torch.tensor([0.5])).item()
        0.5
    """
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Compute half the squared log-ratio.

    k2 = log_ratio ** 2 / 2.

    Special cases:
        Never negative; close to the KL for small log-ratios, biased for large ones.

    Args:
        log_ratio: log policy - log reference at sampled tokens, nats.

    Returns:
        Same shape, nats.

    Gradient:
        As a loss term its expected gradient is exactly that of the reverse KL of the token's distribution.

    Source:
        Schulman 2020, "Approximating KL divergence".

    Example:
        >>> k2(torch.tensor([0.5])).item()
        0.125
    """
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """Compute the low-variance estimator of the reverse KL(policy || reference).

    k3 = exp(-log_ratio) - 1 + log_ratio, with expm1 for small log-ratios.

    Special cases:
        Never negative; its mean over policy samples is the exact reverse KL.

    Args:
        log_ratio: log policy - log reference at sampled tokens, nats.

    Returns:
        Same shape, nats.

    Gradient:
        As a loss term its expected gradient is that of the *forward* KL(reference || policy). For the reverse KL take
        `k3_with_ratio` or `k2`.

    Source:
        Schulman 2020, "Approximating KL divergence".

    Example:
        >>> round(k3(torch.tensor([0.5])).item(), 6)
        0.106531
    """
    return torch.expm1(-log_ratio) + log_ratio


def k3_with_ratio(log_ratio: Tensor, importance_log_ratio: Tensor) -> Tensor:
    """Compute k3 times the importance ratio, so that its gradient is that of the reverse KL.

    k3_with_ratio = exp(importance_log_ratio) * k3(log_ratio).

    Special cases:
        Equals k3 in value when the policy is the sampler (importance_log_ratio = 0); the gradient still differs.

    Args:
        log_ratio: log policy - log reference at sampled tokens, nats.
        importance_log_ratio: log policy - log sampling policy, same shape; on-policy it is logprobs minus its own
            detached value, so that the ratio is 1 and the score-function term stays in the gradient.

    Returns:
        Same shape, nats.

    Gradient:
        To both arguments; the expected gradient is exactly that of the reverse KL of the token's distribution.

    Source:
        Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477.

    Example:
        >>> k3_with_ratio(torch.tensor([0.0]), torch.tensor([0.3])).item()
        0.0
    """
    return importance_log_ratio.exp() * k3(log_ratio)
