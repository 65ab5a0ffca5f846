"""Gradients of learning from preferences: those of the papers' losses on full logits, however a step is cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from preference_data import make_config
from torch import Tensor

from training_core.engines.single import SingleProcessEngine, group_of
from training_core.metrics import MetricSums
from training_core.models.recomputation import recompute_layers
from training_core.ops.preference_losses import PairLogprobs
from training_core.preference.forward import AnswerScorer, PromptedAnswer
from training_core.preference.items import JudgedItems, PairItems, find_partners
from training_core.preference.losses import PREFERENCE_LOSSES
from training_core.preference.objective import KtoObjective, PairObjective, Split
from training_core.preference.reference import score_items
from training_core.preference.trainer import PreferenceTrainer, add_gradients, count_steps
from training_core.rl.forward import Precision

NUM_PAIRS = 6
TOLERANCE = 1e-12


class PlainPairs(PairItems):
    """Pairs held in memory."""

    def __init__(self, pairs: list[tuple[list[int], list[int], int]]) -> None:
        self.pairs = pairs
        self.lengths = [max(len(chosen), len(rejected)) for chosen, rejected, _ in pairs]
        self.digest = "plain"

    def __len__(self) -> int:
        return len(self.pairs)

    def answers(self, indices: Sequence[int]) -> list[PromptedAnswer]:
        rows = [self.pairs[i] for i in indices]
        return [PromptedAnswer(r[0], r[2]) for r in rows] + [PromptedAnswer(r[1], r[2]) for r in rows]


class PlainRows:
    """Judged answers held in memory."""

    def __init__(self, rows: list[tuple[list[int], int, bool, str]]) -> None:
        self.rows = rows
        self.lengths = np.array([len(row[0]) for row in rows])
        self.num_prompt_tokens = np.array([row[1] for row in rows])
        self.desirable = np.array([row[2] for row in rows])
        self.group_names = [row[3] for row in rows]
        self.groups = np.array([self.group_names.index(row[3]) for row in rows])
        self.digest = "plain"

    def answer(self, index: int) -> PromptedAnswer:
        return PromptedAnswer(*self.rows[index][:2])


def draw_pairs(seed: int) -> list[tuple[list[int], list[int], int]]:
    draw = random.Random(seed)

    def tokens(longest: int) -> list[int]:
        return [draw.randrange(1, 96) for _ in range(draw.randint(1, longest))]

    pairs = []
    for _ in range(NUM_PAIRS):
        prompt = tokens(6)
        pairs.append((prompt + tokens(9), prompt + tokens(9), len(prompt)))
    return pairs


def draw_rows(seed: int) -> list[tuple[list[int], int, bool, str]]:
    pairs = enumerate(draw_pairs(seed))
    return [(ids, n, i % 3 > 0, f"g{i // 2}") for i, (ids, _, n) in pairs]


@pytest.fixture(scope="module")
def models(tiny_decoder: Callable[..., Any]) -> tuple[Any, Any]:
    """A policy in float64 with layer norms (others compute in float32), and another one as its reference."""
    policy, reference = (tiny_decoder("gpt2").double() for _ in range(2))
    with torch.no_grad():
        for index, parameter in enumerate(reference.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
            parameter.add_(0.02 * noise)
    return policy, reference


def scorer_of(model: Any, pad_token_id: int = 0) -> AnswerScorer:
    return AnswerScorer(model, pad_token_id, Precision("none", torch.device("cpu")))


def pair_split(reference: Any, pairs: list[tuple[list[int], list[int], int]]) -> Split[PairItems]:
    items = PlainPairs(pairs)
    return Split(items, score_items(scorer_of(reference), items, 3, lambda n: None))


def judged_split(reference: Any, rows: list[tuple[list[int], int, bool, str]]) -> Split[JudgedItems]:
    items = JudgedItems(PlainRows(rows), limit=256)
    return Split(items, score_items(scorer_of(reference), items, 3, lambda n: None))


def gradient(policy: Any, objective: Any, split: Any, order: list[int], size: int) -> tuple[list[Tensor], float]:
    """Return the gradient of one optimizer step over the items in `order`, and its loss."""
    policy.zero_grad(set_to_none=True)
    sums = MetricSums()
    add_gradients(objective, split, order, size, sums, lambda: None)
    return [p.grad.clone() for p in policy.parameters() if p.grad is not None], sums.means()["train/loss"]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    scale = max(float(t.abs().max()) for t in theirs)
    assert scale > 0
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).abs().max()) <= TOLERANCE * scale


LOSSES: list[dict[str, Any]] = [
    {"loss": {"kind": "sigmoid"}},
    {"loss": {"kind": "sigmoid", "label_smoothing": 0.1, "length_normalised": True, "beta": 2.0}, "sft_weight": 0.5},
    {"loss": {"kind": "robust", "label_smoothing": 0.2}},
    {"loss": {"kind": "ipo"}},
    {"loss": {"kind": "ipo", "length_normalised": True}, "sft_weight": 1.0},
    {"loss": {"kind": "hinge"}},
    {"loss": {"kind": "simpo"}},
]
NAMES = [f"{i}-{options['loss']['kind']}" for i, options in enumerate(LOSSES)]


def test_every_registered_loss_is_among_the_cases() -> None:
    assert {options["loss"]["kind"] for options in LOSSES} == set(PREFERENCE_LOSSES)


@pytest.mark.parametrize("options", LOSSES, ids=NAMES)
def test_pair_gradients_do_not_depend_on_cut_order_padding_or_checkpointing(
    models: tuple[Any, Any], tiny_decoder: Callable[..., Any], options: dict[str, Any]
) -> None:
    policy, reference = models
    config = make_config("dpo", **options).algorithm
    split = pair_split(reference, draw_pairs(0))
    objective = PairObjective(config, scorer_of(policy))
    whole, loss = gradient(policy, objective, split, list(range(NUM_PAIRS)), NUM_PAIRS)
    for order, size in (([0, 1, 2, 3, 4, 5], 1), ([5, 2, 0, 4, 1, 3], 4), ([3, 1, 4, 0, 5, 2], NUM_PAIRS)):
        cut, cut_loss = gradient(policy, objective, split, order, size)
        assert_equal(cut, whole)
        assert abs(cut_loss - loss) < TOLERANCE * abs(loss)
    other_padding = PairObjective(config, scorer_of(policy, pad_token_id=77))
    assert_equal(gradient(policy, other_padding, split, [0, 1, 2, 3, 4, 5], 3)[0], whole)
    recomputed = tiny_decoder("gpt2").double()
    recomputed.load_state_dict(policy.state_dict())
    assert recompute_layers(recomputed) == 2
    again = PairObjective(config, scorer_of(recomputed))
    assert_equal(gradient(recomputed, again, split, [0, 1, 2, 3, 4, 5], 3)[0], whole)


def slow_logprob(model: Any, answer: PromptedAnswer) -> Tensor:
    """The log-probability of one answer alone, from the model's full logits, token by token."""
    logits = model(input_ids=torch.tensor([answer.ids]), use_cache=False).logits[0]
    total = torch.zeros((), dtype=torch.float64)
    for position in range(answer.num_prompt_tokens, len(answer.ids)):
        total = total + torch.log_softmax(logits[position - 1], dim=-1)[answer.ids[position]]
    return total


@pytest.mark.parametrize("options", LOSSES, ids=NAMES)
def test_pair_gradients_equal_those_on_full_logits(models: tuple[Any, Any], options: dict[str, Any]) -> None:
    policy, reference = models
    config = make_config("dpo", **options).algorithm
    split = pair_split(reference, draw_pairs(1))
    ours, loss = gradient(policy, PairObjective(config, scorer_of(policy)), split, list(range(NUM_PAIRS)), 2)
    policy.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for index in range(NUM_PAIRS):
        answers = split.items.answers([index])
        mine = [slow_logprob(policy, answer)[None] for answer in answers]
        theirs = [slow_logprob(reference, answer)[None].detach() for answer in answers]
        lengths = [torch.tensor([answer.num_answer_tokens]) for answer in answers]
        knobs = config.loss.model_dump(exclude={"kind"})
        total = total + PREFERENCE_LOSSES[config.loss.kind](PairLogprobs(*mine, *theirs, *lengths), **knobs).sum()
        total = total - config.sft_weight * mine[0].sum() / lengths[0].item()
    (total / NUM_PAIRS).backward()
    assert abs(loss - total.item() / NUM_PAIRS) < 1e-12 * abs(loss)
    assert_equal(ours, [p.grad for p in policy.parameters() if p.grad is not None])


def test_kto_gradients_do_not_depend_on_cut_and_order_and_equal_those_on_full_logits(models: tuple[Any, Any]) -> None:
    policy, reference = models
    config = make_config("kto", desirable_weight=1.2, undesirable_weight=0.8).algorithm
    split = judged_split(reference, draw_rows(2))
    objective = KtoObjective(config, scorer_of(policy))
    indices = list(range(NUM_PAIRS))
    whole, loss = gradient(policy, objective, split, indices, NUM_PAIRS)
    for order, size in ((indices, 1), ([5, 2, 0, 4, 1, 3], 4)):
        assert_equal(gradient(policy, objective, split, order, size)[0], whole)

    def ratio(answer: PromptedAnswer) -> Tensor:
        return slow_logprob(policy, answer) - slow_logprob(reference, answer).detach()

    with torch.no_grad():
        ratios = [float(ratio(answer)) for answer in split.items.mismatched(indices)]
    baseline = max(0.0, sum(ratios) / NUM_PAIRS)
    policy.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for index, answer in zip(indices, split.items.answers(indices), strict=True):
        sign, weight = (1.0, 1.2) if split.items.desirable[index] else (-1.0, 0.8)
        total = total + weight * (1.0 - torch.sigmoid(config.beta * sign * (ratio(answer) - baseline)))
    (total / NUM_PAIRS).backward()
    assert abs(loss - total.item() / NUM_PAIRS) < 1e-12
    assert_equal(whole, [p.grad for p in policy.parameters() if p.grad is not None])


def test_the_baseline_is_measured_on_answers_to_other_prompts_and_never_negative(models: tuple[Any, Any]) -> None:
    policy, reference = models
    rows = draw_rows(3)
    split = judged_split(reference, rows)
    objective = KtoObjective(make_config("kto").algorithm, scorer_of(policy))
    # Groups are g0 g0 g1 g1 g2 g2: the next answer of another group, and after the last comes the first.
    assert split.items.partners.tolist() == [2, 2, 4, 4, 0, 0]
    mixed = split.items.mismatched([1])[0]
    assert mixed.ids == rows[1][0][: rows[1][1]] + rows[2][0][rows[2][1] :]
    baselines = [float(objective.prepare(split, [i], 2, lambda: None)) for i in range(NUM_PAIRS)]
    with torch.no_grad():
        mismatched = split.items.mismatched(range(NUM_PAIRS))
        ratios = [float(slow_logprob(policy, answer) - slow_logprob(reference, answer)) for answer in mismatched]
    assert baselines == pytest.approx([max(0.0, r) for r in ratios], abs=1e-12)
    assert min(ratios) < 0 < max(ratios)


def test_partners_fit_behind_the_prompt() -> None:
    rows = [([1] * 6, 4, True, "a"), ([2] * 7, 2, True, "b"), ([3] * 5, 3, False, "c")]
    assert find_partners(PlainRows(rows), limit=8).tolist() == [2, 2, 0]
    # Behind four tokens of six fit two; the only answer that short is the row's own.
    rows = [([1] * 6, 4, True, "a"), ([2] * 7, 2, True, "b")]
    assert find_partners(PlainRows(rows), limit=6).tolist() == [-1, 0]


def test_an_item_without_partner_is_left_out_of_the_baseline(models: tuple[Any, Any]) -> None:
    policy, reference = models
    rows = [([1, 2, 3, 4, 5, 6], 4, True, "a"), ([7, 8, 9, 10, 11, 12, 13], 2, False, "b")]
    items = JudgedItems(PlainRows(rows), limit=6)
    split = Split(items, score_items(scorer_of(reference), items, 2, lambda n: None))
    objective = KtoObjective(make_config("kto").algorithm, scorer_of(policy))
    both, second = (objective.prepare(split, indices, 2, lambda: None) for indices in ([0, 1], [1]))
    assert torch.equal(both, second)
    assert float(objective.prepare(split, [0], 2, lambda: None)) == 0.0


def test_a_stop_is_seen_before_every_forward_pass(models: tuple[Any, Any]) -> None:
    """KTO's passes for the baseline are among them."""
    policy, reference = models
    split = judged_split(reference, draw_rows(5))
    calls: list[int] = []
    objective = KtoObjective(make_config("kto").algorithm, scorer_of(policy))
    add_gradients(objective, split, list(range(NUM_PAIRS)), 4, MetricSums(), lambda: calls.append(1))
    assert len(calls) == 2 + 2


def test_every_item_is_used_once_an_epoch_and_the_last_step_takes_the_rest(
    tiny_decoder: Callable[..., Any], models: tuple[Any, Any]
) -> None:
    class Context:
        class spec:
            seed = 3

    policy = tiny_decoder("gpt2")
    config = make_config("dpo", batch_size=5, micro_batch_size=3, num_epochs=2).algorithm
    split = pair_split(models[1], draw_pairs(4))
    engine = SingleProcessEngine([group_of("policy", policy, 1e-3)], config.optimizer, 3)
    objective = PairObjective(config, scorer_of(policy))
    trainer = PreferenceTrainer(Context(), config, objective, split, split, engine, "0" * 64)  # type: ignore[arg-type]
    steps = [trainer.step_items(step) for step in range(1, count_steps(config, NUM_PAIRS) + 1)]
    assert [len(items) for items in steps] == [5, 5, 2]
    assert sorted(i for items in steps for i in items) == sorted([*range(NUM_PAIRS), *range(NUM_PAIRS)])
