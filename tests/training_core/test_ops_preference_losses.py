"""Losses of preferences against plain numpy, their gradients, and what their docstrings say they reduce to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training_core.ops.preference_losses import (
    PairLogprobs,
    hinge,
    implicit_rewards,
    ipo,
    kto,
    log_ratios,
    robust,
    sigmoid,
    simpo,
)
from training_core.preference.losses import PREFERENCE_LOSSES

LN2 = math.log(2.0)


def make_pair(seed: int = 0, count: int = 7) -> PairLogprobs:
    generator = torch.Generator().manual_seed(seed)

    def logprobs() -> Tensor:
        return -20.0 * torch.rand(count, dtype=torch.float64, generator=generator)

    lengths = torch.randint(1, 9, (2, count), generator=generator)
    return PairLogprobs(logprobs(), logprobs(), logprobs(), logprobs(), lengths[0], lengths[1])


def turned(pair: PairLogprobs) -> PairLogprobs:
    """Return the pairs with chosen and rejected answers exchanged."""
    return PairLogprobs(
        pair.policy_rejected,
        pair.policy_chosen,
        pair.reference_rejected,
        pair.reference_chosen,
        pair.rejected_lengths,
        pair.chosen_lengths,
    )


def untrained(pair: PairLogprobs) -> PairLogprobs:
    return dataclasses.replace(pair, reference_chosen=pair.policy_chosen, reference_rejected=pair.policy_rejected)


def of_one_token(pair: PairLogprobs) -> PairLogprobs:
    ones = torch.ones_like(pair.chosen_lengths)
    return dataclasses.replace(pair, chosen_lengths=ones, rejected_lengths=ones)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def oracle(name: str, pair: PairLogprobs, knobs: dict[str, Any]) -> list[float]:
    """The losses from the papers' equations, pair by pair."""
    losses = []
    for i in range(len(pair.policy_chosen)):
        chosen, rejected = float(pair.policy_chosen[i]), float(pair.policy_rejected[i])
        n_chosen, n_rejected = int(pair.chosen_lengths[i]), int(pair.rejected_lengths[i])
        beta = knobs["beta"]
        if name == "simpo":
            losses.append(-log_sigmoid(beta * chosen / n_chosen - beta * rejected / n_rejected - knobs["margin"]))
            continue
        assert pair.reference_chosen is not None
        assert pair.reference_rejected is not None
        plus, minus = chosen - float(pair.reference_chosen[i]), rejected - float(pair.reference_rejected[i])
        if knobs.get("length_normalised"):
            plus, minus = plus / n_chosen, minus / n_rejected
        h, s = plus - minus, knobs.get("label_smoothing", 0.0)
        right, wrong = -log_sigmoid(beta * h), -log_sigmoid(-beta * h)
        losses.append(
            {
                "sigmoid": (1 - s) * right + s * wrong,
                "robust": ((1 - s) * right - s * wrong) / (1 - 2 * s) if s < 0.5 else math.nan,
                "ipo": (h - 1 / (2 * beta)) ** 2,
                "hinge": max(0.0, 1 - beta * h),
            }[name]
        )
    return losses


CASES: list[tuple[str, dict[str, Any]]] = [
    ("sigmoid", {"beta": 0.1}),
    ("sigmoid", {"beta": 0.3, "label_smoothing": 0.2}),
    ("sigmoid", {"beta": 5.0, "length_normalised": True}),
    ("sigmoid", {"beta": 2.0, "length_normalised": True, "label_smoothing": 0.5}),
    ("robust", {"beta": 0.1, "label_smoothing": 0.3}),
    ("ipo", {"beta": 0.1, "length_normalised": False}),
    ("ipo", {"beta": 0.5, "length_normalised": True}),
    ("hinge", {"beta": 0.05}),
    ("simpo", {"beta": 2.0, "margin": 0.5}),
]


def test_the_cases_cover_the_registry() -> None:
    assert {name for name, _ in CASES} == set(PREFERENCE_LOSSES)


@pytest.mark.parametrize(("name", "knobs"), CASES)
def test_losses_equal_the_papers_equations(name: str, knobs: dict[str, Any]) -> None:
    pair = make_pair()
    losses = PREFERENCE_LOSSES[name](pair, **knobs)
    assert losses.dtype == torch.float64
    np.testing.assert_allclose(losses.numpy(), oracle(name, pair, knobs), rtol=1e-12)


@pytest.mark.parametrize(("name", "knobs"), CASES)
def test_gradients_are_right_and_go_to_the_policy_alone(name: str, knobs: dict[str, Any]) -> None:
    pair = make_pair(seed=1)

    def losses(chosen: Tensor, rejected: Tensor) -> Tensor:
        values: Tensor = PREFERENCE_LOSSES[name](
            dataclasses.replace(pair, policy_chosen=chosen, policy_rejected=rejected), **knobs
        )
        return values

    leaves = [x.clone().requires_grad_() for x in (pair.policy_chosen, pair.policy_rejected)]
    assert torch.autograd.gradcheck(losses, leaves)
    assert pair.reference_chosen is not None
    assert pair.reference_rejected is not None
    references = [x.clone().requires_grad_() for x in (pair.reference_chosen, pair.reference_rejected)]
    whole = PairLogprobs(*leaves, *references, pair.chosen_lengths, pair.rejected_lengths)
    PREFERENCE_LOSSES[name](whole, **knobs).sum().backward()
    assert all(x.grad is None for x in references)
    assert all(x.grad is not None and torch.isfinite(x.grad).all() for x in leaves)


@pytest.mark.parametrize(("name", "knobs"), CASES)
def test_a_loss_of_one_pair_does_not_depend_on_the_others(name: str, knobs: dict[str, Any]) -> None:
    pair = make_pair()
    loss = PREFERENCE_LOSSES[name]
    alone = [
        loss(PairLogprobs(*(getattr(pair, f.name)[i : i + 1] for f in dataclasses.fields(pair))), **knobs)
        for i in range(len(pair.policy_chosen))
    ]
    assert torch.equal(torch.cat(alone), loss(pair, **knobs))


@pytest.mark.parametrize(
    ("loss", "value"),
    [
        (lambda pair: sigmoid(pair, beta=0.1), LN2),
        (lambda pair: sigmoid(pair, beta=0.1, label_smoothing=0.3), LN2),
        (lambda pair: sigmoid(pair, beta=0.1, length_normalised=True), LN2),
        (lambda pair: robust(pair, beta=0.1, label_smoothing=0.3), LN2),
        (lambda pair: ipo(pair, beta=0.1, length_normalised=False), 25.0),
        (lambda pair: hinge(pair, beta=0.1), 1.0),
    ],
)
def test_policy_equal_to_reference(loss: Callable[[PairLogprobs], Tensor], value: float) -> None:
    pair = untrained(make_pair())
    assert torch.allclose(loss(pair), torch.full((7,), value, dtype=torch.float64), rtol=1e-15, atol=0.0)
    assert all(torch.equal(r, torch.zeros_like(r)) for r in log_ratios(pair))
    assert all(torch.equal(r, torch.zeros_like(r)) for r in implicit_rewards(pair, beta=3.0))


def test_smoothing_of_zero_is_plain_dpo() -> None:
    pair = make_pair()
    plain = -torch.nn.functional.logsigmoid(0.1 * (log_ratios(pair)[0] - log_ratios(pair)[1]))
    assert torch.equal(sigmoid(pair, beta=0.1, label_smoothing=0.0), plain)
    assert torch.equal(robust(pair, beta=0.1, label_smoothing=0.0), plain)


def test_smoothing_of_one_half_does_not_know_which_answer_is_better() -> None:
    pair = make_pair()
    both = [sigmoid(p, beta=0.1, label_smoothing=0.5) for p in (pair, turned(pair))]
    assert torch.allclose(*both, rtol=1e-14)
    assert (both[0] >= LN2).all()


@settings(max_examples=50, deadline=None)
@given(st.floats(-30.0, 30.0), st.floats(0.01, 0.49), st.floats(0.05, 2.0))
def test_robust_is_unbiased_under_turned_labels(h: float, rate: float, beta: float) -> None:
    """Its mean over labels turned round at the rate is DPO's loss of the right label."""
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    pair = PairLogprobs(zero + h, zero, zero, zero, one, one)
    noisy = [robust(p, beta=beta, label_smoothing=rate) for p in (pair, turned(pair))]
    mean = (1 - rate) * noisy[0] + rate * noisy[1]
    assert torch.allclose(mean, sigmoid(pair, beta=beta), rtol=1e-9, atol=1e-9)


def test_robust_has_no_lower_bound() -> None:
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    losses = [
        float(robust(PairLogprobs(zero + h, zero, zero, zero, one, one), beta=1.0, label_smoothing=0.1))
        for h in (10, 100, 1000)
    ]
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < -100


def test_smoothed_dpo_is_smallest_at_the_log_odds_of_the_labels() -> None:
    target = math.log(0.8 / 0.2)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    chosen = (zero + target).requires_grad_()
    sigmoid(PairLogprobs(chosen, zero, zero, zero, one, one), beta=1.0, label_smoothing=0.2).backward()
    assert chosen.grad is not None
    assert abs(float(chosen.grad)) < 1e-15


@pytest.mark.parametrize("distance", [-1.0, 0.0, 1.0])
def test_ipo_draws_to_its_target_from_both_sides(distance: float) -> None:
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    chosen = (zero + 5.0 + distance).requires_grad_()
    loss = ipo(PairLogprobs(chosen, zero, zero, zero, one, one), beta=0.1, length_normalised=False)
    loss.backward()
    assert chosen.grad is not None
    assert (loss.item(), chosen.grad.item()) == (distance**2, 2 * distance)


def test_length_normalisation_changes_nothing_for_one_token_and_everything_for_more() -> None:
    pair = make_pair()
    for one_token, equal in ((of_one_token(pair), True), (pair, False)):
        for loss in (sigmoid, ipo):
            plain = loss(one_token, beta=0.4, length_normalised=False)
            assert torch.equal(loss(one_token, beta=0.4, length_normalised=True), plain) == equal


def test_hinge_ends_where_the_margin_is_reached() -> None:
    zero, one = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.int64)
    chosen = torch.tensor([3.0, 4.0, 9.0], dtype=torch.float64, requires_grad=True)
    losses = hinge(PairLogprobs(chosen, zero, zero, zero, one, one), beta=0.25)
    losses.sum().backward()
    assert losses.tolist() == [0.25, 0.0, 0.0]
    assert chosen.grad is not None
    assert chosen.grad.tolist() == [-0.25, 0.0, 0.0]


def test_simpo_is_normalised_dpo_beside_a_certain_reference() -> None:
    pair = make_pair()
    zero = torch.zeros_like(pair.policy_chosen)
    certain = dataclasses.replace(pair, reference_chosen=zero, reference_rejected=zero)
    alone = dataclasses.replace(pair, reference_chosen=None, reference_rejected=None)
    expected = sigmoid(certain, beta=2.0, length_normalised=True)
    assert torch.allclose(simpo(alone, beta=2.0, margin=0.0), expected, rtol=1e-14)
    equal = PairLogprobs(zero - 4.0, zero - 2.0, None, None, 2 * torch.ones(7), torch.ones(7))
    assert torch.allclose(simpo(equal, beta=2.0, margin=0.7), zero + math.log1p(math.exp(0.7)))


def test_rewards_are_those_of_the_loss() -> None:
    pair = make_pair()
    assert pair.reference_chosen is not None
    chosen, rejected = implicit_rewards(pair, beta=0.3)
    assert torch.allclose(chosen, 0.3 * (pair.policy_chosen - pair.reference_chosen))
    assert torch.allclose(sigmoid(pair, beta=0.3), -torch.nn.functional.logsigmoid(chosen - rejected))
    per_token, _ = implicit_rewards(pair, beta=0.3, length_normalised=True)
    assert torch.allclose(per_token, chosen / pair.chosen_lengths)
    alone = dataclasses.replace(pair, reference_chosen=None, reference_rejected=None)
    chosen, rejected = implicit_rewards(alone, beta=2.0)
    assert torch.allclose(simpo(alone, beta=2.0, margin=0.5), -torch.nn.functional.logsigmoid(chosen - rejected - 0.5))


def test_far_away_pairs_keep_a_finite_loss_and_gradient() -> None:
    zero, one = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)
    chosen = torch.tensor([-1e6, 1e6], dtype=torch.float64, requires_grad=True)
    losses = sigmoid(PairLogprobs(chosen, zero, zero, zero, one, one), beta=1.0)
    losses.sum().backward()
    assert losses.tolist() == [1e6, 0.0]
    assert chosen.grad is not None
    assert chosen.grad.tolist() == [-1.0, 0.0]


def test_knobs_out_of_range_are_refused() -> None:
    pair = make_pair()
    for call in (
        lambda: sigmoid(pair, beta=0.0),
        lambda: sigmoid(pair, beta=0.1, label_smoothing=0.6),
        lambda: robust(pair, beta=0.1, label_smoothing=0.5),
        lambda: ipo(pair, beta=-1.0, length_normalised=False),
        lambda: hinge(pair, beta=0.0),
        lambda: simpo(pair, beta=1.0, margin=-0.1),
        lambda: implicit_rewards(pair, beta=0.0),
    ):
        with pytest.raises(ValueError, match="must"):
            call()
    empty = dataclasses.replace(pair, chosen_lengths=torch.zeros(7, dtype=torch.int64))
    with pytest.raises(ValueError, match="an answer without tokens"):
        simpo(empty, beta=1.0, margin=0.0)
    with pytest.raises(ValueError, match="compares with a reference"):
        sigmoid(dataclasses.replace(pair, reference_chosen=None), beta=0.1)


def make_judged() -> tuple[Tensor, Tensor, Tensor]:
    pair = make_pair(seed=2)
    return pair.policy_chosen, pair.policy_rejected, torch.tensor([True, False, True, True, False, False, True])


def test_kto_equals_the_papers_equations() -> None:
    policy, reference, desirable = make_judged()
    knobs = {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.7}
    losses = kto(policy, reference, desirable, torch.tensor(0.4, dtype=torch.float64), **knobs)
    ratio = (policy - reference).numpy()
    value = np.where(
        desirable.numpy(),
        1.5 / (1 + np.exp(-0.2 * (ratio - 0.4))),
        0.7 / (1 + np.exp(-0.2 * (0.4 - ratio))),
    )
    np.testing.assert_allclose(losses.numpy(), np.where(desirable.numpy(), 1.5, 0.7) - value, rtol=1e-12)


def test_kto_moves_the_policy_alone_and_in_the_right_direction() -> None:
    policy, reference, desirable = make_judged()
    baseline = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    leaf, frozen = policy.clone().requires_grad_(), reference.clone().requires_grad_()

    def losses(logprobs: Tensor) -> Tensor:
        return kto(logprobs, frozen, desirable, baseline, beta=0.2, undesirable_weight=2.0)

    assert torch.autograd.gradcheck(losses, [leaf])
    losses(leaf).sum().backward()
    assert baseline.grad is None
    assert frozen.grad is None
    assert leaf.grad is not None
    assert torch.equal(leaf.grad < 0, desirable)


def test_kto_special_cases() -> None:
    policy, _, desirable = make_judged()
    zero = torch.zeros((), dtype=torch.float64)
    weight = torch.where(desirable, 1.0, 3.0).double()
    untrained_losses = kto(policy, policy, desirable, zero, beta=0.1, undesirable_weight=3.0)
    assert torch.equal(untrained_losses, weight / 2)
    at_baseline = kto(policy + 0.5, policy, desirable, zero + 0.5, beta=0.1, undesirable_weight=3.0)
    assert torch.allclose(at_baseline, weight / 2)
    leaf = policy.clone().requires_grad_()
    kto(leaf, policy, desirable, zero, beta=0.1, undesirable_weight=0.0).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad != 0, desirable)


def test_kto_refuses_what_it_cannot_mean() -> None:
    policy, reference, desirable = make_judged()
    zero = torch.zeros(())
    with pytest.raises(TypeError, match="must be bool"):
        kto(policy, reference, desirable.long(), zero, beta=0.1)
    for options, baseline in (
        ({"beta": 0.0}, zero),
        ({"beta": 0.1, "desirable_weight": -1.0}, zero),
        ({"beta": 0.1}, zero - 0.1),
        ({"beta": 0.1}, torch.zeros(7)),
    ):
        with pytest.raises(ValueError, match="must be"):
            kto(policy, reference, desirable, baseline, **options)
