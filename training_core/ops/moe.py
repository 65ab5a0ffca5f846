"""Mixture of experts: how evenly tokens are spread, and the losses that keep them spread.

Shapes: N tokens, E experts, K experts chosen for a token (top-k).
"""

from __future__ import annotations

import torch
from torch import Tensor


def expert_counts(choices: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert was chosen.

    Args:
        choices: [N, K] integers in [0, num_experts).
        num_experts: E.

    Returns:
        [E] float64. Counts of parts of a batch, layers or ranks add.

    Raises:
        ValueError: a choice is outside the range.

    Example:
        >>> expert_counts(torch.tensor([[0, 2], [0, 1]]), 4).tolist()
        [2.0, 1.0, 1.0, 0.0]
    """
    flat = choices.reshape(-1).long()
    if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= num_experts):
        raise ValueError(f"choices must lie in [0, {num_experts}), got {int(flat.min())} to {int(flat.max())}")
    return torch.bincount(flat, minlength=num_experts).double()


def load_fractions(counts: Tensor, num_chosen: int) -> Tensor:
    """Return the share of tokens that each expert gets: f_e = (tokens that chose e) / (tokens).

    Special cases:
        Reduces to the fraction of equation 5 of Switch with num_chosen = 1.
        Every expert chosen equally often: K / E each.
        No token at all: zeros.

    Args:
        counts: [..., E] from `expert_counts`, summed over the whole optimizer step on all ranks.
        num_chosen: K.

    Returns:
        [..., E] float64, which sum to K over the experts.

    Gradient:
        None: counting has none.

    Source:
        Fedus et al. 2021, arXiv 2101.03961, equation 5; Mixtral's form for K > 1.

    Example:
        >>> load_fractions(torch.tensor([2.0, 1.0, 1.0, 0.0]), 2).tolist()
        [1.0, 0.5, 0.5, 0.0]
    """
    counts = counts.detach().double()
    num_choices = counts.sum(dim=-1, keepdim=True)
    return counts * num_chosen / num_choices.clamp(min=1.0)


def router_auxiliary_losses(router_logits: Tensor, fractions: Tensor) -> Tensor:
    """Return each token's part of the load-balancing loss of one layer.

    l_t = E * sum_e f_e * p_te, with p_t = softmax of the token's router logits and f fixed beforehand. The loss of the
    optimizer step is the mean of l_t over its tokens: L = E * sum_e f_e * P_e. Since f is a constant of the step, L is
    a sum over tokens, the same for every split into micro-batches and ranks. (With f taken per micro-batch, as is
    common, the product of two means changes with the split.)

    Special cases:
        Fractions equal (f_e = K / E): l_t = K, whatever the logits; no gradient.
        All tokens on one expert with certainty, K = 1: l_t = E, the largest value of L.
        Equals transformers' `load_balancing_loss_func` in the mean, with f of the same tokens; that one takes f and P
        over all layers together, so for several layers give each the mean of the layers' fractions.

    Args:
        router_logits: [N, E] float.
        fractions: [E] from `load_fractions`, not NaN.

    Returns:
        [N], dimensionless, float32 or the logits' dtype where that is wider.

    Gradient:
        To router_logits: E * p_te * (f_e - sum_i f_i p_ti). It pushes away from experts with more than their share.

    Raises:
        ValueError: shapes do not fit.

    Source:
        Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6.

    Example:
        >>> router_auxiliary_losses(torch.zeros(1, 4), torch.tensor([1.0, 0.5, 0.5, 0.0])).tolist()
        [2.0]
    """
    num_experts = _num_experts(router_logits)
    if fractions.shape != (num_experts,):
        raise ValueError(f"fractions must be [{num_experts}], one an expert, got {list(fractions.shape)}")
    probabilities = torch.softmax(_wide(router_logits), dim=-1)
    return num_experts * (probabilities @ fractions.detach().to(probabilities))


def router_z_losses(router_logits: Tensor) -> Tensor:
    """Return the square of each token's log-sum-exp of router logits, which keeps them small and exact.

    l_t = (log sum_e exp(x_te))^2.

    Special cases:
        All logits 0: (log E)^2. Logits shifted by -log E: 0, with the same routing.

    Args:
        router_logits: [N, E] float.

    Returns:
        [N], float32 or the logits' dtype where that is wider.

    Gradient:
        To router_logits: 2 * logsumexp * softmax.

    Source:
        Zoph et al. 2022, arXiv 2202.08906, equation 5.

    Example:
        >>> round(router_z_losses(torch.zeros(1, 4)).item(), 4)
        1.9218
    """
    _num_experts(router_logits)
    return torch.logsumexp(_wide(router_logits), dim=-1).square()


def router_entropies(router_logits: Tensor) -> Tensor:
    """Return the entropy of each token's router distribution: near 0 it has decided, log E it has no preference.

    Args:
        router_logits: [N, E] float.

    Returns:
        [N] nats, float64.

    Gradient:
        To router_logits; used as a metric only.

    Example:
        >>> round(router_entropies(torch.zeros(1, 4)).item(), 4)
        1.3863
    """
    _num_experts(router_logits)
    probabilities = torch.softmax(router_logits.double(), dim=-1)
    entropies: Tensor = torch.special.entr(probabilities).sum(dim=-1)
    return entropies


def load_entropy(counts: Tensor) -> Tensor:
    """Return the entropy of how the choices are spread over experts: log E when evenly, 0 when all are the same one.

    Args:
        counts: [..., E].

    Returns:
        [...] nats, float64; 0 where nothing was counted.

    Example:
        >>> [round(load_entropy(torch.tensor(c)).item(), 4) for c in ([1.0, 1.0], [2.0, 0.0], [0.0, 0.0])]
        [0.6931, 0.0, 0.0]
    """
    shares = load_fractions(counts, 1)
    entropy: Tensor = torch.special.entr(shares).sum(dim=-1)
    return entropy


def _num_experts(router_logits: Tensor) -> int:
    if router_logits.ndim != 2:
        raise ValueError(f"router_logits must be [tokens, experts], got {list(router_logits.shape)}")
    return router_logits.shape[1]


def _wide(values: Tensor) -> Tensor:
    """Return `values` in float32 or wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
