"""Chunked token log-probs equal the plain ones in value and gradient, and keep no logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import training_core.ops.logprobs as logprobs_module
from training_core.ops.logprobs import token_logprobs

NUM_POSITIONS, WIDTH, VOCABULARY = 13, 8, 37


class LargestResult(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.num_elements = max(self.num_elements, result.numel())
        return result


class LargestProduct(TorchDispatchMode):
    """Notes the size of the largest result of a matrix product."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.num_elements = max(self.num_elements, result.numel())
        return result


def example(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_POSITIONS, WIDTH, generator=generator, dtype=dtype).requires_grad_(True)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype).requires_grad_(True)
    targets = torch.randint(0, VOCABULARY, (NUM_POSITIONS,), generator=generator)
    incoming = torch.randn(NUM_POSITIONS, generator=generator, dtype=dtype)
    return hidden, weight, targets, incoming


@pytest.mark.parametrize("chunk_size", [1, 4, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_log_softmax_for_every_chunk_size(chunk_size: int, temperature: float) -> None:
    hidden, weight, targets, incoming = example(torch.float64)
    plain = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    expected = plain.gather(1, targets[:, None])[:, 0]
    expected_gradients = torch.autograd.grad((expected * incoming).sum(), (hidden, weight))
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=temperature, chunk_size=chunk_size)
    gradients = torch.autograd.grad((logprobs * incoming).sum(), (hidden, weight))
    torch.testing.assert_close(logprobs, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(-1), rtol=1e-12, atol=1e-13)
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
    assert not entropy.requires_grad


def test_without_entropy_the_log_probs_are_the_same_bits_and_entropy_is_no_number() -> None:
    hidden, weight, targets, incoming = example(torch.float32)
    found = []
    for with_entropy in (True, False):
        logprobs, entropy = token_logprobs(
            hidden, weight, targets, temperature=0.7, chunk_size=4, with_entropy=with_entropy
        )
        assert bool(entropy.isnan().all()) is not with_entropy
        found.append((logprobs, *torch.autograd.grad((logprobs * incoming).sum(), (hidden, weight))))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_results_are_float32_over_a_bfloat16_product() -> None:
    hidden, weight, targets, incoming = example(torch.float32)
    logprobs, entropy = token_logprobs(hidden, weight, targets, matmul_dtype=torch.bfloat16)
    assert logprobs.dtype == entropy.dtype == torch.float32
    plain = torch.log_softmax(hidden @ weight.T, dim=-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, plain, rtol=0, atol=0.1)
    (logprobs * incoming).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


def test_no_tensor_of_positions_times_vocabulary_is_kept() -> None:
    hidden, weight, targets, _ = example(torch.float32)
    sizes: list[int] = []

    def record(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        token_logprobs(hidden, weight, targets, chunk_size=4)
    assert sizes
    assert max(sizes) < NUM_POSITIONS * VOCABULARY


def test_no_position_gives_empty_results_and_zero_gradients() -> None:
    hidden, weight, targets, _ = example(torch.float32)
    logprobs, _ = token_logprobs(hidden[:0], weight, targets[:0])
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert weight.grad is not None
    assert weight.grad.abs().sum() == 0


def test_bad_arguments_are_refused() -> None:
    hidden, weight, targets, _ = example(torch.float32)
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(hidden, weight, targets, temperature=0.0)
    with pytest.raises(ValueError, match="expected hidden"):
        token_logprobs(hidden, weight[:, :4], targets)


def test_the_weight_gradient_is_the_same_in_blocks_and_needs_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, incoming = example(torch.float64)
    plain = torch.log_softmax(hidden @ weight.T, dim=-1).gather(1, targets[:, None])[:, 0]
    expected = torch.autograd.grad((plain * incoming).sum(), weight)[0]
    monkeypatch.setattr(logprobs_module, "VOCABULARY_BLOCK", 10)
    largest = LargestProduct()
    logprobs, _ = token_logprobs(hidden, weight, targets, chunk_size=4)
    with largest:
        found = torch.autograd.grad((logprobs * incoming).sum(), weight)[0]
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
    # Logits of a chunk are the largest product; the gradient of the whole weight would be larger.
    assert largest.num_elements == 4 * VOCABULARY < WIDTH * VOCABULARY


def plain_results(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(dim=-1)


@pytest.mark.parametrize("used", ["both", "entropy", "logprobs"])
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_gradient_of_the_entropy_is_that_of_autograd(used: str, chunk_size: int, temperature: float) -> None:
    hidden, weight, targets, incoming = example(torch.float64)
    other = torch.randn(NUM_POSITIONS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def gradients(logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
        loss = 0.0 * hidden.sum()
        loss = loss + (logprobs * incoming).sum() if used != "entropy" else loss
        loss = loss + (entropy * other).sum() if used != "logprobs" else loss
        return torch.autograd.grad(loss, (hidden, weight))

    found = token_logprobs(
        hidden, weight, targets, temperature=temperature, chunk_size=chunk_size, entropy_gradient=True
    )
    expected = plain_results(hidden, weight, targets, temperature)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    for one, two in zip(gradients(*found), gradients(*expected), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-13)


def test_gradcheck_of_log_probs_and_entropy_together() -> None:
    hidden, weight, targets, _ = example(torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets[:5], temperature=0.8, chunk_size=2, entropy_gradient=True),
        (hidden[:5].detach().requires_grad_(True), weight),
    )


def test_a_gradient_of_the_entropy_leaves_values_and_the_gradient_of_the_log_probs_alone() -> None:
    hidden, weight, targets, incoming = example(torch.float32)
    plain, with_gradient = (
        token_logprobs(hidden, weight, targets, chunk_size=4, entropy_gradient=flag) for flag in (False, True)
    )
    assert torch.equal(plain[0], with_gradient[0])
    assert torch.equal(plain[1], with_gradient[1])
    assert with_gradient[1].requires_grad
    found, expected = (
        torch.autograd.grad((logprobs * incoming).sum(), (hidden, weight)) for logprobs, _ in (with_gradient, plain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_entropy_has_no_gradient_where_it_is_largest_and_none_where_one_token_is_certain() -> None:
    """Equal logits, and one logit that is all of the mass: both ends of the entropy are flat, without a NaN."""
    weight = torch.eye(4, dtype=torch.float64)
    for hidden in (torch.zeros(1, 4), torch.tensor([[1e4, 0.0, 0.0, 0.0]])):
        leaf = hidden.double().requires_grad_(True)
        _, entropy = token_logprobs(leaf, weight, torch.zeros(1, dtype=torch.int64), entropy_gradient=True)
        entropy.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.abs().max() < 1e-15


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_no_result_on_the_way_back_is_larger_than_a_chunk_of_logits(entropy_gradient: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 2, generator=generator).requires_grad_(True)
    weight = torch.randn(500, 2, generator=generator).requires_grad_(True)
    targets = torch.randint(0, 500, (64,), generator=generator)
    largest = LargestResult()
    with largest:
        logprobs, entropy = token_logprobs(hidden, weight, targets, chunk_size=4, entropy_gradient=entropy_gradient)
        loss = logprobs.sum() + entropy.sum() if entropy_gradient else logprobs.sum()
    # Autograd runs the backward pass on this thread, so that the mode sees it.
    with largest:
        torch.autograd.grad(loss, (hidden, weight))
    assert largest.num_elements == 4 * 500


def test_the_gradient_of_an_entropy_that_is_not_computed_is_refused() -> None:
    hidden, weight, targets, _ = example(torch.float32)
    with pytest.raises(ValueError, match="needs with_entropy"):
        token_logprobs(hidden, weight, targets, with_entropy=False, entropy_gradient=True)
