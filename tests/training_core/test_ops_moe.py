"""Losses and measures of expert routing, against hand counts, loops and transformers' own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from training_core.ops.moe import (
    expert_counts,
    load_entropy,
    load_fractions,
    router_auxiliary_losses,
    router_entropies,
    router_z_losses,
)

NUM_TOKENS, NUM_EXPERTS = 13, 5


def random_logits(seed: int = 0, num_tokens: int = NUM_TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(num_tokens, NUM_EXPERTS, generator=generator, dtype=torch.float64)


def top(logits: Tensor, num_chosen: int) -> Tensor:
    return logits.topk(num_chosen, dim=-1).indices


def fractions_of(logits: Tensor, num_chosen: int) -> Tensor:
    return load_fractions(expert_counts(top(logits, num_chosen), NUM_EXPERTS), num_chosen)


@pytest.mark.parametrize("num_chosen", [1, 2, 5])
def test_the_mean_is_transformers_loss(num_chosen: int) -> None:
    logits = random_logits()
    ours = router_auxiliary_losses(logits, fractions_of(logits, num_chosen)).mean()
    theirs = load_balancing_loss_func((logits,), NUM_EXPERTS, num_chosen)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)


def test_transformers_takes_layers_together_and_so_can_we() -> None:
    layers = (random_logits(1), random_logits(2))
    pooled = torch.stack([fractions_of(logits, 2) for logits in layers]).mean(dim=0)
    ours = torch.stack([router_auxiliary_losses(logits, pooled) for logits in layers]).mean()
    assert float(ours) == pytest.approx(float(load_balancing_loss_func(layers, NUM_EXPERTS, 2)), rel=1e-6)
    apart = torch.stack([router_auxiliary_losses(logits, fractions_of(logits, 2)) for logits in layers]).mean()
    assert float(apart) != pytest.approx(float(ours), rel=1e-3)


def test_the_gradient_does_not_depend_on_the_split_and_that_of_micro_fractions_does() -> None:
    logits = random_logits().requires_grad_()
    fractions = fractions_of(logits, 2)
    parts = (slice(0, 4), slice(4, 5), slice(5, 13))

    def gradient(*losses: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(sum(losses), logits)  # type: ignore[arg-type]
        return found

    whole = gradient(router_auxiliary_losses(logits, fractions).sum() / NUM_TOKENS)
    split = gradient(*(router_auxiliary_losses(logits[p], fractions).sum() / NUM_TOKENS for p in parts))
    assert torch.allclose(whole, split, rtol=1e-12, atol=0.0)
    wrong = gradient(
        *(router_auxiliary_losses(logits[p], fractions_of(logits[p], 2)).sum() / NUM_TOKENS for p in parts)
    )
    assert not torch.allclose(whole, wrong, rtol=1e-2)


def test_the_gradient_is_the_stated_one() -> None:
    logits = random_logits().requires_grad_()
    fractions = fractions_of(logits, 2)
    (found,) = torch.autograd.grad(router_auxiliary_losses(logits, fractions).sum(), logits)
    p = logits.softmax(dim=-1)
    assert torch.allclose(found, NUM_EXPERTS * p * (fractions - (p @ fractions)[:, None]), rtol=1e-12)
    assert torch.autograd.gradcheck(lambda x: router_auxiliary_losses(x, fractions), (logits,))
    assert torch.autograd.gradcheck(router_z_losses, (logits,))
    (found,) = torch.autograd.grad(router_z_losses(logits).sum(), logits)
    assert torch.allclose(found, 2.0 * logits.logsumexp(-1, keepdim=True) * p, rtol=1e-12)


def test_even_fractions_leave_nothing_to_gain() -> None:
    logits = random_logits().requires_grad_()
    losses = router_auxiliary_losses(logits, torch.full((NUM_EXPERTS,), 2 / NUM_EXPERTS))
    assert torch.allclose(losses, torch.full_like(losses, 2.0), rtol=1e-6)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert float(gradient.abs().max()) < 1e-6


def test_one_expert_for_all_is_the_worst() -> None:
    logits = torch.full((3, 4), -1e4)
    logits[:, 2] = 1e4
    fractions = load_fractions(expert_counts(top(logits, 1), 4), 1)
    assert router_auxiliary_losses(logits, fractions).tolist() == [4.0, 4.0, 4.0]


def test_against_a_loop() -> None:
    logits = random_logits()
    choices = top(logits, 2)
    counts = [0] * NUM_EXPERTS
    for row in choices.tolist():
        for expert in row:
            counts[expert] += 1
    assert expert_counts(choices, NUM_EXPERTS).tolist() == counts
    fractions = load_fractions(torch.tensor(counts), 2)
    assert fractions.tolist() == pytest.approx([count / NUM_TOKENS for count in counts])
    assert float(fractions.sum()) == pytest.approx(2.0)
    losses, z, entropies = router_auxiliary_losses(logits, fractions), router_z_losses(logits), router_entropies(logits)
    for t, row in enumerate(logits.tolist()):
        total = sum(math.exp(x) for x in row)
        p = [math.exp(x) / total for x in row]
        expected = NUM_EXPERTS * sum(c / NUM_TOKENS * q for c, q in zip(counts, p, strict=True))
        assert float(losses[t]) == pytest.approx(expected, rel=1e-12)
        assert float(z[t]) == pytest.approx(math.log(total) ** 2, rel=1e-12)
        assert float(entropies[t]) == pytest.approx(-sum(q * math.log(q) for q in p), rel=1e-12)


def test_shifted_logits_route_alike_and_weigh_nothing() -> None:
    logits = random_logits() - random_logits().logsumexp(dim=-1, keepdim=True)
    assert float(router_z_losses(logits).max()) < 1e-24
    assert torch.equal(top(logits, 2), top(random_logits(), 2))


def test_entropies_at_their_ends() -> None:
    certain = torch.tensor([[0.0, -1e6, -1e6]])
    assert router_entropies(certain).tolist() == [0.0]
    assert float(router_entropies(torch.zeros(1, 8))) == pytest.approx(math.log(8))
    counts = torch.tensor([[6.0, 0.0, 0.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    assert load_entropy(counts).tolist() == pytest.approx([0.0, math.log(3), 0.0])


def test_no_token_is_no_share() -> None:
    counts = expert_counts(torch.zeros(0, 2, dtype=torch.int64), 3)
    assert load_fractions(counts, 2).tolist() == [0.0, 0.0, 0.0]
    assert router_auxiliary_losses(torch.zeros(0, 3), counts).shape == (0,)


def test_counts_of_parts_add() -> None:
    choices = top(random_logits(), 2)
    parts = expert_counts(choices[:5], NUM_EXPERTS) + expert_counts(choices[5:], NUM_EXPERTS)
    assert torch.equal(parts, expert_counts(choices, NUM_EXPERTS))


def test_narrow_logits_are_widened() -> None:
    logits = random_logits().bfloat16()
    assert router_auxiliary_losses(logits, fractions_of(logits, 2)).dtype == torch.float32
    assert router_z_losses(logits).dtype == torch.float32
    assert router_entropies(logits).dtype == torch.float64


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens, experts"):
        router_auxiliary_losses(torch.zeros(2, 3, 4), torch.zeros(4))
    with pytest.raises(ValueError, match=r"fractions must be \[4\]"):
        router_auxiliary_losses(torch.zeros(2, 4), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"choices must lie in \[0, 4\)"):
        expert_counts(torch.tensor([[0, 4]]), 4)
    with pytest.raises(ValueError, match="got -1"):
        expert_counts(torch.tensor([[-1, 2]]), 4)
