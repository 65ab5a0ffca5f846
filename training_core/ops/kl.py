"""KL divergence between policy and reference from the log-probabilities of sampled tokens.

Tokens are drawn from the policy. What an estimator is worth as a value and the gradient it gives are different things,
and the gradient depends on where it stands:

    in a loss      the estimate is differentiated at the sampled tokens; that it was the policy that sampled them is
                   not;
    in the reward  the estimate is a number that the policy gradient multiplies with the gradient of logprobs.

Each docstring says both, for one token's distribution. For whole answers no estimate in the loss is exact: it moves
each token at its own state and does not see that an early token changes which states come later. `k1` in the reward,
with each token credited with the sum from itself on (reward-to-go), is exact for whole answers.

What is exact in a loss without a ratio is exact only in the first update after a rollout. With `importance_log_ratio`,
the log of policy over sampling policy, it stays exact for a token's distribution when the policy has moved.

`log_ratio` is logprobs - reference_logprobs, per token, in nats. Shapes: any, usually [batch, time]. Nothing is
clamped: a clamp would take the gradient away where the policy has moved furthest.
"""

from __future__ import annotations

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
        In a loss: zero in expectation (the score function has mean zero), so it does nothing but add noise. In the
        reward: exactly that of the reverse KL, and with reward-to-go that of whole answers too.

    Source:
        Schulman 2020, "Approximating KL divergence".

    Example:
        >>> import torch
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
        In a loss: in expectation exactly that of the reverse KL of the token's distribution. In the reward: that of
        the mean of k2 less that of the reverse KL, which is neither.

    Source:
        Schulman 2020, "Approximating KL divergence".

    Example:
        >>> import torch
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
        In a loss: in expectation that of the *forward* KL(reference || policy). For the reverse KL take
        `k3_with_ratio`, `k3_straight_through` or `k2`. In the reward: that of the reverse KL less that of the forward
        KL, which is neither.

    Source:
        Schulman 2020, "Approximating KL divergence".

    Example:
        >>> import torch
        >>> round(k3(torch.tensor([0.5])).item(), 6)
        0.106531
    """
    return (-log_ratio).expm1() + log_ratio


def absolute(log_ratio: Tensor) -> Tensor:
    """Compute the absolute log-ratio.

    absolute = |log_ratio|.

    Special cases:
        Never negative, and at least |k1|: its mean over policy samples is at least the reverse KL.

    Args:
        log_ratio: log policy - log reference at sampled tokens, nats.

    Returns:
        Same shape, nats.

    Gradient:
        In a loss: in expectation that of the sum over the vocabulary of |policy - reference|, twice the total
        variation: a distance as well, but not the KL. 0 where the log-ratio is 0. In the reward: that of the mean of
        the absolute log-ratio less that of twice the total variation.

    Source:
        Known as `abs` in other trainers. Its gradient: the sum over the vocabulary of policy * sign(log_ratio) * grad
        log policy is grad of the sum of |policy - reference|.

    Example:
        >>> import torch
        >>> absolute(torch.tensor([-0.5])).item()
        0.5
    """
    return log_ratio.abs()


def k1_with_ratio(log_ratio: Tensor, importance_log_ratio: Tensor) -> Tensor:
    """Compute k1 times the importance ratio, so that its gradient in a loss is that of the reverse KL.

    k1_with_ratio = exp(importance_log_ratio) * log_ratio.

    Special cases:
        Equals k1 in value when the policy is the sampler (importance_log_ratio = 0); the gradient differs: k1's is zero
        in expectation.

    Args:
        log_ratio: log policy - log reference at sampled tokens, nats.
        importance_log_ratio: as in `k3_with_ratio`.

    Returns:
        Same shape, nats.

    Gradient:
        To both arguments. In a loss: in expectation exactly that of the reverse KL of the token's distribution, also
        when the policy has moved since the rollout. Not for the reward: there k1 itself is exact.

    Source:
        Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477.

    Example:
        >>> import torch
        >>> k1_with_ratio(torch.tensor([0.5]), torch.tensor([0.0])).item()
        0.5
    """
    return importance_log_ratio.exp() * k1(log_ratio)


def k3_with_ratio(log_ratio: Tensor, importance_log_ratio: Tensor) -> Tensor:
    """Compute k3 times the importance ratio, so that its gradient in a loss is that of the reverse KL.

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
        To both arguments. In a loss: in expectation exactly that of the reverse KL of the token's distribution, also
        when the policy has moved since the rollout. Not for the reward: there k1 is exact.

    Source:
        Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477.

    Example:
        >>> import torch
        >>> k3_with_ratio(torch.tensor([0.0]), torch.tensor([0.3])).item()
        0.0
    """
    return importance_log_ratio.exp() * k3(log_ratio)


def k3_straight_through(log_ratio: Tensor) -> Tensor:
    """Compute k3 with the gradient of k2: the good value and, in a loss, the right gradient.

    k3_straight_through = k3 in value, log_ratio * grad log_ratio in gradient.

    Special cases:
        The value is k3's and the gradient k2's, to the bit.

    Args:
        log_ratio: log policy - log reference at sampled tokens, nats.

    Returns:
        Same shape, nats.

    Gradient:
        In a loss: as k2, in expectation exactly that of the reverse KL of the token's distribution in the first update
        after a rollout. In the reward: as k3, whose value it has.

    Source:
        As `k3_with_ratio`; other trainers call it `k3+`.

    Example:
        >>> import torch
        >>> log_ratio = torch.tensor([0.5], requires_grad=True)
        >>> value = k3_straight_through(log_ratio)
        >>> value.backward()
        >>> round(value.item(), 6), log_ratio.grad.item()
        (0.106531, 0.5)
    """
    surrogate = k2(log_ratio)
    return k3(log_ratio.detach()) + (surrogate - surrogate.detach())
