"""Weights of tokens in the step's loss: against loops, over ranks, and what each mode reduces to."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import AGGREGATIONS
from torch import Tensor

from training_core.ops.aggregation import (
    batch_mean_weights,
    constant_weights,
    prompt_mean_weights,
    sequence_mean_token_mean_weights,
    sequence_mean_token_sum_weights,
    token_mean_weights,
    weighted_sum,
)
from training_core.ops.masking import lengths_to_mask

LENGTHS = [5, 2, 4, 0, 1, 3]
GROUPS = [2, 0, 2, 1, 1, 0]


def loop_aggregate(losses: list[list[float]], groups: list[int], kind: str) -> float:
    rows = [row for row in losses if row]
    if kind == "token_mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if kind == "sequence_mean_token_mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if kind == "batch_mean":
        return sum(sum(row) / len(row) for row in rows) / len(losses)
    if kind == "sequence_mean_token_sum":
        return sum(map(sum, rows)) / len(rows)
    if kind == "constant":
        return sum(map(sum, rows)) / (len(rows) * 7)
    tokens = defaultdict(list)
    for row, group in zip(losses, groups, strict=True):
        tokens[group] += row
    means = [sum(values) / len(values) for values in tokens.values() if values]
    return sum(means) / len(means)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_aggregation_equals_a_plain_loop(kind: str) -> None:
    mask = lengths_to_mask(torch.tensor(LENGTHS), 5)
    losses = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = [losses[i, :length].tolist() for i, length in enumerate(LENGTHS)]
    value = weighted_sum(losses, AGGREGATIONS[kind](mask, torch.tensor(GROUPS)), mask)
    assert value.item() == pytest.approx(loop_aggregate(plain, GROUPS, kind), rel=1e-12)


class Ranks:
    """Computes weights on pretended ranks: first what each counts, then with the sums of what all count."""

    def __init__(self, kind: str, parts: list[tuple[Tensor, Tensor]], num_groups: int) -> None:
        self.kind, self.parts, self.num_groups = kind, parts, num_groups

    def weights(self) -> list[Tensor]:
        counted: list[list[Tensor]] = []
        for mask, groups in self.parts:
            seen: list[Tensor] = []
            self.weigh(mask, groups, lambda counts, seen=seen: seen.append(counts) or counts)
            counted.append(seen)
        sums = [torch.stack(counts).sum(dim=0) for counts in zip(*counted, strict=True)]
        assert sums
        results = []
        for mask, groups in self.parts:
            remaining = iter(sums)
            results.append(self.weigh(mask, groups, lambda _, remaining=remaining: next(remaining)))
        return results

    def weigh(self, mask: Tensor, groups: Tensor, all_sum: object) -> Tensor:
        return AGGREGATIONS[self.kind](mask, groups, all_sum=all_sum, num_groups=self.num_groups)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_weights_over_ranks_are_those_of_one_rank(kind: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=7))
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths))))
    ranks = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths))))
    mask = lengths_to_mask(torch.tensor(lengths), 4)
    # A rank may hold no row at all, and a group may be on several.
    parts = [(mask[ranks == rank], groups[ranks == rank]) for rank in range(3)]
    found = Ranks(kind, parts, num_groups=3).weights()
    expected = AGGREGATIONS[kind](mask, groups)
    for rank in range(3):
        torch.testing.assert_close(found[rank], expected[ranks == rank], rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_no_token_at_all_gives_zero_weights(kind: str) -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert AGGREGATIONS[kind](mask, torch.tensor([0, 1])).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_masked_positions_have_no_weight_and_order_does_not_matter(kind: str) -> None:
    mask, groups = lengths_to_mask(torch.tensor(LENGTHS), 5), torch.tensor(GROUPS)
    weights = AGGREGATIONS[kind](mask, groups)
    assert weights.dtype == torch.float64
    assert (weights[~mask] == 0).all()
    assert (weights[mask] > 0).all()
    order = torch.tensor([3, 5, 0, 2, 4, 1])
    assert torch.equal(AGGREGATIONS[kind](mask[order], groups[order]), weights[order])
    shifted = torch.nn.functional.pad(mask, (2, 1), value=False)
    assert torch.equal(AGGREGATIONS[kind](shifted, groups)[:, 2:-1], weights)


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean_token_mean", "prompt_mean"])
def test_means_sum_to_one(kind: str) -> None:
    mask = lengths_to_mask(torch.tensor(LENGTHS), 5)
    assert AGGREGATIONS[kind](mask, torch.tensor(GROUPS)).sum().item() == pytest.approx(1.0, rel=1e-14)


def test_what_modes_reduce_to_when_answers_are_of_one_length() -> None:
    equal = lengths_to_mask(torch.tensor([4, 4, 4]), 4)
    torch.testing.assert_close(token_mean_weights(equal), sequence_mean_token_mean_weights(equal))
    torch.testing.assert_close(token_mean_weights(equal), constant_weights(equal, num_tokens=4))
    uneven = lengths_to_mask(torch.tensor([4, 1]), 4)
    torch.testing.assert_close(constant_weights(uneven, num_tokens=10), sequence_mean_token_sum_weights(uneven) / 10)


def test_rows_without_a_token_count_in_the_batch_mean_only() -> None:
    full = lengths_to_mask(torch.tensor([4, 1]), 4)
    assert torch.equal(batch_mean_weights(full), sequence_mean_token_mean_weights(full))
    half = lengths_to_mask(torch.tensor([4, 0, 1, 0]), 4)
    torch.testing.assert_close(batch_mean_weights(half), sequence_mean_token_mean_weights(half) / 2)
    assert batch_mean_weights(half).sum().item() == pytest.approx(0.5)
    for weigh in (sequence_mean_token_mean_weights, sequence_mean_token_sum_weights, token_mean_weights):
        torch.testing.assert_close(weigh(half)[[0, 2]], weigh(full))
    found = prompt_mean_weights(half, torch.tensor([0, 1, 0, 1]))
    torch.testing.assert_close(found[[0, 2]], token_mean_weights(full))


def test_prompt_mean_reduces_to_the_token_and_the_sequence_mean() -> None:
    mask = lengths_to_mask(torch.tensor(LENGTHS), 5)
    one_prompt = torch.full((6,), -12)
    torch.testing.assert_close(prompt_mean_weights(mask, one_prompt), token_mean_weights(mask))
    each_its_own = torch.tensor([10**12, -3, 0, 7, 8, 9])
    torch.testing.assert_close(prompt_mean_weights(mask, each_its_own), sequence_mean_token_mean_weights(mask))


def test_prompt_mean_weighs_prompts_alike_whatever_the_number_and_length_of_their_answers() -> None:
    mask, groups = lengths_to_mask(torch.tensor(LENGTHS), 5), torch.tensor(GROUPS)
    weights = prompt_mean_weights(mask, groups)
    for group in range(3):
        assert weights[groups == group].sum().item() == pytest.approx(1 / 3, rel=1e-14)
        counted = weights[groups == group][mask[groups == group]]
        assert (counted == counted[0]).all()


def test_bad_arguments_are_refused() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="needs group_ids"):
        prompt_mean_weights(mask)
    with pytest.raises(ValueError, match="needs group_ids"):
        prompt_mean_weights(mask, torch.tensor([1]))
    with pytest.raises(ValueError, match="needs num_groups"):
        prompt_mean_weights(mask, torch.tensor([0, 1]), all_sum=lambda counts: 2 * counts)
    for ids in ([0, 2], [-1, 0]):
        with pytest.raises(ValueError, match="must lie in"):
            prompt_mean_weights(mask, torch.tensor(ids), num_groups=2)
    with pytest.raises(ValueError, match="num_tokens"):
        constant_weights(mask, num_tokens=0)
    with pytest.raises(TypeError, match="bool"):
        token_mean_weights(mask.long())
