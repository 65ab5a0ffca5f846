"""Faults of numbers and verdicts that other trainers had: see docs/faults.md for the list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from training_core.config.verifiers import MathVerifyReward
from training_core.ops.logprobs import token_logprobs
from training_core.preference.forward import PromptedAnswer, answer_batch
from training_core.records import StopReason
from training_core.rewards import mathematics
from training_core.rewards.base import Cause, RewardContext, Scores
from training_core.rewards.math_worker import Verdict
from training_core.rl.layouts import Layout
from training_core.rollout.batch import build_batch


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_size", [3, 1000])
def test_after_a_bfloat16_product_nothing_else_is_rounded_to_it(temperature: float, chunk_size: int) -> None:
    """Fault 46: logits kept in bfloat16 are off by a thirtieth of a nat where they are as large as 10."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 16, generator=generator)
    weight = 3.0 * torch.randn(200, 16, generator=generator)
    targets = torch.arange(8)
    product = (hidden.bfloat16() @ weight.bfloat16().T).float() / temperature
    expected = torch.log_softmax(product, dim=-1)
    # As they would be if the division and the sums were taken in bfloat16 too.
    rounded = torch.log_softmax((hidden.bfloat16() @ weight.bfloat16().T) / temperature, dim=-1).float()
    assert float((rounded - expected).abs().max()) > 1e-2
    logprobs, entropy = token_logprobs(
        hidden, weight, targets, temperature=temperature, matmul_dtype=torch.bfloat16, chunk_size=chunk_size
    )
    torch.testing.assert_close(logprobs, expected.gather(1, targets[:, None])[:, 0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(dim=-1), rtol=0.0, atol=2e-4)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prompt"])
def test_an_end_of_turn_that_is_also_the_padding_is_learned(layout: str) -> None:
    """Fault 22: labels that were masked by their id never taught a model to stop."""
    end = 7
    prompts = [(1, 2, end), (1, 2, end), (3,)]
    answers = [(4, end), (5, end, 6, end), (end,)]
    batch = build_batch(prompts, answers, [[-1.0] * len(answer) for answer in answers])
    learned: dict[int, list[int]] = {}
    for micro in Layout(layout, 3, None).split(batch, [0, 1, 2], end, torch.device("cpu")):  # type: ignore[arg-type]
        tokens = micro.scatter(micro.targets.float()).long()
        for row, found, mask in zip(micro.rows.tolist(), tokens, micro.mask, strict=True):
            learned[row] = found[mask].tolist()
    assert [tuple(learned[row]) for row in range(3)] == answers
    of_pairs = [
        PromptedAnswer([*prompt, *answer], len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    micro = answer_batch(of_pairs, end, torch.device("cpu"))
    assert micro.targets.tolist() == [token for answer in answers for token in answer]


def test_what_gives_no_verdict_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 38: a comparison that was late, or that failed, was scored as a wrong answer."""
    replies = [Verdict.EQUAL, Verdict.DIFFERENT, Verdict.ERROR, Cause.ERROR, Cause.TIMEOUT, Verdict.UNREADABLE_GOLD]

    class Pool:
        def map(self, requests: Sequence[Any], timeout_seconds: float, poll: Any = None) -> list[Any]:
            assert len(requests) == len(replies)
            return replies

    monkeypatch.setattr(mathematics, "new_pool", lambda config: Pool())
    count = len(replies)
    context = RewardContext(
        num_tokens=[1] * count,
        stop_reasons=[StopReason.EOS] * count,
        extras=[{"answer": "1"}] * count,
        max_new_tokens=8,
        sequences=[(1,)] * count,
    )
    config = MathVerifyReward.model_validate({"kind": "math_verify", "reference_key": "answer"})
    scores = mathematics.build_math_verify(config)([[]] * count, ["1"] * count, context)
    assert isinstance(scores, Scores)
    assert list(scores) == [1.0, 0.0, None, None, None, None]
    assert list(scores.causes)[2:] == [Cause.ERROR, Cause.ERROR, Cause.TIMEOUT, Cause.UNREADABLE_REFERENCE]
