"""Bounded importance weights against a loop over answers, their limits, and the effective sample size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training_core.ops.importance import (
    EffectiveSample,
    effective_sample_fraction,
    effective_sample_parts,
    importance_weights,
)
from training_core.ops.masking import lengths_to_mask

LENGTHS = [5, 2, 0, 1, 4]
BOUNDS = [(None, 1.5), (0.7, 1.5), (0.0, 1.5), (1.0, 1.0)]
ONE = torch.ones(1, 1, dtype=torch.bool)


def example(fill: float = math.nan, scale: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    mask = lengths_to_mask(torch.tensor(LENGTHS), 5)
    policy, noise = (torch.randn(5, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    return torch.where(mask, policy, fill), torch.where(mask, policy + scale * noise, fill), mask


def loop_weight(ratio: float, mode: str, low: float | None, high: float) -> float:
    if mode == "mask":
        return ratio if (low or 0.0) <= ratio <= high else 0.0
    return max(min(ratio, high), low or 0.0)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_weights_equal_a_plain_loop(level: str, mode: str, low: float | None, high: float) -> None:
    policy, sampler, mask = example()
    weights = importance_weights(policy, sampler, mask, level=level, mode=mode, low=low, high=high)
    for i, length in enumerate(LENGTHS):
        ratios = [math.exp(policy[i, t] - sampler[i, t]) for t in range(length)]
        if level == "sequence":
            ratios = [math.prod(ratios)] * length
        expected = [loop_weight(ratio, mode, low, high) for ratio in ratios] + [0.0] * (5 - length)
        assert weights[i].tolist() == pytest.approx(expected, rel=1e-12)


def test_the_example_meets_both_bounds() -> None:
    policy, sampler, mask = example()
    for level in ("token", "sequence"):
        weights = importance_weights(policy, sampler, mask, level=level, mode="truncate", low=0.7, high=1.5)[mask]
        assert (weights == 0.7).any()
        assert (weights == 1.5).any()
        assert ((weights > 0.7) & (weights < 1.5)).any()


def test_equal_policies_have_weight_one() -> None:
    policy, _, mask = example()
    for level in ("token", "sequence"):
        for mode in ("truncate", "mask"):
            weights = importance_weights(policy, policy, mask, level=level, mode=mode, low=0.5, high=2.0)
            assert torch.equal(weights, mask.double())


def test_of_one_token_both_levels_agree() -> None:
    policy, sampler, mask = example()
    mask = mask & (torch.arange(5) == 0)
    for mode in ("truncate", "mask"):
        found = [
            importance_weights(policy, sampler, mask, level=level, mode=mode, low=0.9, high=1.2)
            for level in ("token", "sequence")
        ]
        assert torch.equal(*found)


def test_within_the_bounds_both_modes_give_the_plain_ratio() -> None:
    policy, sampler, mask = example()
    for level in ("token", "sequence"):
        truncated, masked = (
            importance_weights(policy, sampler, mask, level=level, mode=mode, low=None, high=1e6)
            for mode in ("truncate", "mask")
        )
        assert torch.equal(truncated, masked)


@settings(max_examples=30, deadline=None)
@given(
    order=st.permutations(range(5)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    cut=st.integers(1, 4),
    level=st.sampled_from(["token", "sequence"]),
    mode=st.sampled_from(["truncate", "mask"]),
    fill=st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_padding_order_and_cuts_do_not_matter(
    order: list[int], padding: tuple[int, int], cut: int, level: str, mode: str, fill: float
) -> None:
    policy, sampler, mask = example(fill)
    knobs = {"level": level, "mode": mode, "low": 0.5, "high": 1.5}
    expected = importance_weights(*example(0.0), **knobs)
    parts, total = [], EffectiveSample()
    for rows in (order[:cut], order[cut:]):
        padded = [torch.nn.functional.pad(x[rows], padding, value=fill) for x in (policy, sampler)]
        part_mask = torch.nn.functional.pad(mask[rows], padding, value=False)
        part = importance_weights(*padded, part_mask, **knobs)
        total += effective_sample_parts(part, part_mask)
        parts.append(part[:, padding[0] : padding[0] + 5])
    torch.testing.assert_close(torch.cat(parts), expected[list(order)], rtol=1e-13, atol=0.0)
    assert total.fraction == pytest.approx(effective_sample_fraction(expected, mask), rel=1e-12)


def test_ratios_that_overflow_become_the_bound_or_nothing() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    policy = torch.tensor([[1e30, -1e30, 0.0]])
    zero = torch.zeros(1, 3)
    assert importance_weights(policy, zero, mask, level="token", mode="truncate", low=None, high=2.0).tolist() == [
        [2.0, 0.0, 1.0]
    ]
    assert importance_weights(policy, zero, mask, level="token", mode="mask", low=0.5, high=2.0).tolist() == [
        [0.0, 0.0, 1.0]
    ]
    # A token that the engine calls impossible, and one that the policy does.
    endless = torch.tensor([[math.inf, -math.inf, 0.0]])
    assert importance_weights(endless, zero, mask, level="token", mode="truncate", low=0.1, high=2.0).tolist() == [
        [2.0, 0.1, 1.0]
    ]


def test_a_long_answers_ratio_leaves_every_bound_though_its_tokens_hardly_differ() -> None:
    mask = torch.ones(1, 20_000, dtype=torch.bool)
    for drift, truncated in [(0.1, 2.0), (-0.1, 0.0)]:
        policy = torch.full((1, 20_000), drift)
        knobs = {"low": None, "high": 2.0}
        weights = importance_weights(policy, 0 * policy, mask, level="sequence", mode="truncate", **knobs)
        assert (weights == truncated).all()
        masked = importance_weights(policy, 0 * policy, mask, level="sequence", mode="mask", **knobs)
        assert (masked == 0.0).all()
        by_token = importance_weights(policy, 0 * policy, mask, level="token", mode="truncate", **knobs)
        assert by_token[0, 0].item() == pytest.approx(math.exp(drift), rel=1e-6)


def test_weights_carry_no_gradient_and_are_float64() -> None:
    policy = torch.zeros(1, 1, requires_grad=True)
    weights = importance_weights(policy, torch.zeros(1, 1), ONE, level="token", mode="truncate", low=None, high=2.0)
    assert not weights.requires_grad
    assert weights.dtype == torch.float64


def test_effective_sample_by_hand() -> None:
    mask = torch.tensor([[True, True, False], [True, True, False]])

    def fraction(first: float, *others: float) -> float:
        weights = torch.full((2, 3), math.nan)
        weights[mask] = torch.tensor([first, *others])
        return effective_sample_fraction(weights, mask)

    assert fraction(0.3, 0.3, 0.3, 0.3) == pytest.approx(1.0)
    assert fraction(5.0, 0.0, 0.0, 0.0) == pytest.approx(0.25)
    assert fraction(1.0, 2.0, 3.0, 4.0) == pytest.approx(100 / (4 * 30))
    assert fraction(0.0, 0.0, 0.0, 0.0) == 0.0
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert effective_sample_parts(torch.ones(2, 3), nothing) == EffectiveSample(0.0, 0.0, 0)
    assert effective_sample_fraction(torch.ones(2, 3), nothing) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"high": 0.9},
        {"high": math.inf},
        {"high": math.nan},
        {"low": -0.1},
        {"low": 1.1},
        {"level": "answer"},
        {"mode": "clip"},
    ],
)
def test_knobs_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    knobs = {"level": "token", "mode": "mask", "low": 0.5, "high": 2.0, **wrong}
    with pytest.raises(ValueError, match="must be"):
        importance_weights(torch.zeros(1, 1), torch.zeros(1, 1), ONE, **knobs)


def test_a_log_prob_that_is_no_number_is_refused_where_it_counts() -> None:
    for level, values in [("token", [math.nan, 0.0]), ("sequence", [math.inf, -math.inf])]:
        policy, mask = torch.tensor([values]), torch.ones(1, 2, dtype=torch.bool)
        with pytest.raises(ValueError, match="no number"):
            importance_weights(policy, torch.zeros(1, 2), mask, level=level, mode="mask", low=0.5, high=2.0)
