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
