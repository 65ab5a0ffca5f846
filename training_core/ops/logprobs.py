"""Log-probabilities and entropy of chosen tokens without a [batch, time, vocabulary] tensor.

Shapes: N chosen positions, D hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DEFAULT_CHUNK_SIZE = 256
VOCABULARY_BLOCK = 8192


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    matmul_dtype: torch.dtype | None = None,
    with_entropy: bool = True,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of target tokens and the entropy of their distributions, chunk by chunk.

    logits_i = (weight @ hidden_i) / temperature; logprob_i = logits_i[targets_i] - logsumexp(logits_i);
    entropy_i = logsumexp(logits_i) - sum_v softmax(logits_i)_v * logits_i_v.

    At most `chunk_size` rows of logits exist at a time; the backward pass computes them again.

    Special cases:
        Equals log_softmax(hidden @ weight.T / temperature) read at the targets, for every `chunk_size`. With
        `entropy_gradient` both gradients equal those of plain autograd, also when a loss uses only one of the results.

    Args:
        hidden: [positions, width], the model's last hidden states at the positions that predict a target.
        weight: [vocabulary, width], the output head, without bias.
        targets: [positions], int64 token ids.
        temperature: divides the logits, above 0.
        chunk_size: rows of logits held at a time, at least 1.
        matmul_dtype: number format of the matrix product; None takes that of `hidden`. Sums are float32 (float64 when
            the product is).
        with_entropy: whether to compute the entropy, a third of the work without a backward pass; NaN when not.
        entropy_gradient: whether entropy carries a gradient, for an entropy term of the loss. The backward pass then
            holds a second chunk of the logits' size.

    Returns:
        (logprobs, entropy), each [positions], nats, float32 (float64 when the product is).

    Gradient:
        logprobs: to `hidden` and `weight`. entropy: the same with `entropy_gradient`, through
        d entropy_i / d logits_iv = -p_iv * (log p_iv + entropy_i); detached without.

    Raises:
        ValueError: a temperature or chunk size out of range, shapes that do not fit, or the gradient of an entropy that
            is not computed.

    Source:
        The definition of softmax; recomputing chunks as in Wijmans et al. 2024 "Cut Your Losses", arXiv 2411.09009,
        section 3 (here in plain torch, without its gradient filter).

    Example:
        >>> hidden, weight = torch.zeros(2, 4), torch.ones(8, 4)
        >>> logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([0, 3]))
        >>> torch.allclose(logprobs, torch.full((2,), -2.0794415)), torch.allclose(entropy, -logprobs)
        (True, True)
    """
    if temperature <= 0.0 or chunk_size < 1:
        raise ValueError(f"temperature ({temperature}) must be above 0 and chunk_size ({chunk_size}) at least 1")
    if entropy_gradient and not with_entropy:
        raise ValueError("entropy_gradient needs with_entropy: an entropy that is not computed has no gradient")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected hidden [N, D], weight [V, D], targets [N]; got {tuple(hidden.shape)}, {tuple(weight.shape)}, "
            f"{tuple(targets.shape)}"
        )
    logprobs, entropy = _ChunkedTokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, chunk_size, matmul_dtype or hidden.dtype, with_entropy, entropy_gradient
    )
    return logprobs, entropy


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Return temperature-scaled logits in float32, or float64 when the product is."""
    product = hidden @ weight.T
    wide = product if product.dtype == torch.float64 else product.float()
    return wide.div_(temperature) if temperature != 1.0 else wide


def _add_weight_gradient(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """Add grad_logits.T @ hidden to `total` in place, a block of the vocabulary at a time.

    The head is the largest weight of a small model; a product of its size, once in the format of the matrix product and
    once in that of the sum, would come on top of all activations, which are still there when the backward pass starts.
    """
    for start in range(0, total.shape[0], VOCABULARY_BLOCK):
        block = slice(start, start + VOCABULARY_BLOCK)
        total[block] += (grad_logits[:, block].T @ hidden).to(total.dtype)


def _entropy_part(log_probabilities: Tensor, grad_logprobs: Tensor, entropy: Tensor, grad_entropy: Tensor) -> Tensor:
    """Return -p * (grad_logprobs + grad_entropy * (log p + entropy)) of a chunk; log_probabilities is used up.

    It is the gradient of both results to the logits, but for the target's own share of grad_logprobs.
    """
    probabilities = log_probabilities.exp()
    log_probabilities.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logprobs[:, None])
    return log_probabilities.mul_(probabilities).neg_()


class _ChunkedTokenLogprobs(torch.autograd.Function):
    """token_logprobs with a backward pass that holds one chunk of logits at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        matmul_dtype: torch.dtype,
        with_entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        out_dtype = torch.float64 if matmul_dtype == torch.float64 else torch.float32
        narrow_weight = weight.to(matmul_dtype)
        narrow_hidden = hidden.to(matmul_dtype)
        logprobs = hidden.new_empty(hidden.shape[0], dtype=out_dtype)
        entropy = torch.full_like(logprobs, float("nan"))
        log_normalisers = torch.empty_like(logprobs)
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            logits = _logits(narrow_hidden[rows], narrow_weight, temperature)
            normaliser = torch.logsumexp(logits, dim=-1)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - normaliser
            if with_entropy:
                probabilities = (logits - normaliser[:, None]).exp_()
                entropy[rows] = normaliser - torch.einsum("nv,nv->n", probabilities, logits)
            log_normalisers[rows] = normaliser
        ctx.temperature, ctx.chunk_size, ctx.matmul_dtype = temperature, chunk_size, matmul_dtype
        ctx.entropy_gradient = entropy_gradient
        if entropy_gradient:
            ctx.save_for_backward(hidden, weight, targets, log_normalisers, entropy)
        else:
            ctx.save_for_backward(hidden, weight, targets, log_normalisers)
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = gradients
        hidden, weight, targets, log_normalisers, *entropies = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        narrow_weight = weight.to(ctx.matmul_dtype)
        narrow_hidden = hidden.to(ctx.matmul_dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        for start in range(0, hidden.shape[0], ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            logits = _logits(narrow_hidden[rows], narrow_weight, ctx.temperature)
            # d logprob / d logits = onehot - softmax, times the incoming gradient.
            scale = (grad_logprobs[rows] / ctx.temperature)[:, None]
            log_probabilities = logits.sub_(log_normalisers[rows, None])
            if ctx.entropy_gradient:
                entropy_scale = grad_entropy[rows] / ctx.temperature
                grad_logits = _entropy_part(log_probabilities, scale[:, 0], entropies[0][rows], entropy_scale)
            else:
                grad_logits = log_probabilities.exp_().mul_(-scale)
            grad_logits.scatter_add_(1, targets[rows, None], scale.to(grad_logits.dtype))
            narrow_grad = grad_logits.to(ctx.matmul_dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = (narrow_grad @ narrow_weight).to(hidden.dtype)
            if grad_weight is not None:
                _add_weight_gradient(grad_weight, narrow_grad, narrow_hidden[rows])
        return grad_hidden, grad_weight, None, None, None, None, None, None
