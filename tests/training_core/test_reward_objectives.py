"""What a training step of a reward model minimises: the same for every way to cut it, and nothing made up."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from reward_rows import feedback_rows, make_context, pair_rows, write_rows

from training_core.config.reward_model import RewardLossConfig, RewardModelConfig
from training_core.data.batching import batches_by_tokens, micro_batches, pad_sequences
from training_core.data.tables import FeedbackTable, PairTable, build_feedback_table, build_pair_table
from training_core.errors import ConfigurationError, DataError
from training_core.metrics import MetricSums
from training_core.models.heads import new_reward_model
from training_core.models.loading import load_tokenizer
from training_core.models.recomputation import recompute_layers
from training_core.reward_modelling.objectives import make_objective
from training_core.reward_modelling.trainer import RewardTrainer

MARGINS = [1.0, None, 0.5, None, None, 2.0, None, 0.25, None]
CHOSEN = [None, 4.0, None, None, 3.0, None, None, None, 5.0]
REJECTED = [None, 1.0, None, 2.0, 3.5, None, None, None, 2.0]
WANTED = [1.0, 3.0, 0.5, math.nan, -0.5, 2.0, math.nan, 0.25, 3.0]

LOSSES: dict[str, dict[str, Any]] = {
    "plain": {"kind": "bradley_terry"},
    "margin": {"kind": "bradley_terry", "margin": "data", "margin_scale": 0.5},
    "centring": {"kind": "bradley_terry", "centring_coefficient": 0.1},
    "margin_and_centring": {"kind": "bradley_terry", "margin": "data", "centring_coefficient": 0.1},
    "regression": {"kind": "regression"},
    "regression_as_it_is": {"kind": "regression", "standardise": False},
    "regression_of_labels": {"kind": "regression", "target": "label"},
    "ordinal": {"kind": "ordinal", "levels": [1, 2, 3, 4]},
    "ordinal_of_labels": {"kind": "ordinal", "target": "label", "levels": [0, 1]},
}


@pytest.fixture(scope="module")
def pairs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> PairTable:
    folder = tmp_path_factory.mktemp("pairs")
    rows = pair_rows(9, 1, margin=MARGINS, chosen_score=CHOSEN, rejected_score=REJECTED)
    path = write_rows(folder / "train_pairs.parquet", rows)
    return build_pair_table(path, load_tokenizer(tiny_checkpoint), 512, folder / "train_pairs.arrow")


@pytest.fixture(scope="module")
def feedback(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> FeedbackTable:
    folder = tmp_path_factory.mktemp("feedback")
    path = write_rows(folder / "train_feedback.parquet", feedback_rows(11, 1, missing=(2, 5)))
    return build_feedback_table(path, load_tokenizer(tiny_checkpoint), 512, folder / "train_feedback.arrow")


class Toy(torch.nn.Module):
    """A float64 score that looks at all tokens: the sum of a vector each, times a weight."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(512, 3, generator=generator, dtype=torch.float64) / 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask[..., None], self.weight[ids % 512], 0.0).sum(dim=1).tanh().sum(dim=1)


def gradients(
    config: dict[str, Any], table: Any, cut: Any, pad: int = 0
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the gradient of a whole step cut by `cut(items, lengths)`, and the step's metrics."""
    model, objective = Toy(), make_objective(TypeAdapter(RewardLossConfig).validate_python(config), table)
    for parameter in objective.parameters.values():
        parameter.data = parameter.data.double()
    sums, items = MetricSums(), list(range(len(objective.lengths)))
    for batch in cut(items, objective.lengths):
        scores = model(*pad_sequences(objective.sequences(batch), pad))
        (objective.losses(scores, batch, sums).sum() / len(items)).backward()
    found = {"weight": model.weight, **objective.parameters}
    assert all(parameter.grad is not None for parameter in found.values())
    return {name: p.grad for name, p in found.items() if p.grad is not None}, sums.means()


CUTS = {
    "ones": lambda items, lengths: [[i] for i in items],
    "fours": lambda items, lengths: micro_batches(items, lengths, 4),
    "backwards": lambda items, lengths: [items[::-1][:5], items[::-1][5:]],
    "tokens": lambda items, lengths: batches_by_tokens([int(n) for n in lengths], 90),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cut", CUTS)
def test_gradient_and_metrics_do_not_depend_on_how_a_step_is_cut(
    pairs: PairTable, feedback: FeedbackTable, name: str, cut: str
) -> None:
    table = pairs if LOSSES[name]["kind"] == "bradley_terry" else feedback
    whole, metrics = gradients(LOSSES[name], table, lambda items, lengths: [items])
    found, cut_metrics = gradients(LOSSES[name], table, CUTS[cut], pad=7)
    assert found.keys() == whole.keys()
    for key, value in whole.items():
        assert value.abs().max() > 0
        assert torch.allclose(found[key], value, rtol=1e-12, atol=1e-12 * value.abs().max().item())
    assert cut_metrics == pytest.approx(metrics, rel=1e-12)


def plain_losses(scores: torch.Tensor, coefficient: float, margins: list[float]) -> list[float]:
    chosen, rejected = scores.chunk(2)
    return [
        math.log1p(math.exp(-(c - r - (0.0 if math.isnan(m) else m)))) + coefficient * (c + r) ** 2
        for c, r, m in zip(chosen.tolist(), rejected.tolist(), margins, strict=True)
    ]


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_margins_come_from_the_column_or_else_from_the_scores(pairs: PairTable, scale: float) -> None:
    config = {"kind": "bradley_terry", "margin": "data", "margin_scale": scale, "centring_coefficient": 0.25}
    objective = make_objective(TypeAdapter(RewardLossConfig).validate_python(config), pairs)
    scores = torch.linspace(-2, 3, 18, dtype=torch.float64)
    sums = MetricSums()
    losses = objective.losses(scores, range(9), sums)
    assert losses.tolist() == pytest.approx(plain_losses(scores, 0.25, [m * scale for m in WANTED]))
    report = objective.report()
    assert (report["num_pairs_without_margin"], report["num_pairs_with_negative_margin"]) == (2, 1)
    means = sums.means()
    assert means["train/missing_margin_fraction"] == pytest.approx(2 / 9)
    assert means["train/data_margin_mean"] == pytest.approx(scale * np.nanmean(WANTED))
    chosen, rejected = scores.chunk(2)
    assert means["train/centring_mean"] == pytest.approx(((chosen + rejected) ** 2).mean().item())


def test_a_pair_without_a_margin_has_exactly_the_plain_loss(pairs: PairTable) -> None:
    plain, with_margins = (
        make_objective(TypeAdapter(RewardLossConfig).validate_python(LOSSES[name]), pairs)
        for name in ("plain", "margin")
    )
    scores = torch.linspace(-2, 3, 4)
    assert torch.equal(with_margins.losses(scores, [3, 6], MetricSums()), plain.losses(scores, [3, 6], MetricSums()))


def test_a_negative_margin_is_told(pairs: PairTable, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_objective(TypeAdapter(RewardLossConfig).validate_python(LOSSES["margin"]), pairs)
    assert "1 of 9 pairs have a negative margin" in caplog.text


def test_margins_that_no_pair_has_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.parquet", pair_rows(3, 1))
    table = build_pair_table(path, load_tokenizer(tiny_checkpoint), 512, tmp_path / "p.arrow")
    with pytest.raises(DataError, match="no training pair has a margin"):
        make_objective(TypeAdapter(RewardLossConfig).validate_python(LOSSES["margin"]), table)


def test_rows_without_a_rating_are_left_out_and_counted(feedback: FeedbackTable) -> None:
    objective = make_objective(TypeAdapter(RewardLossConfig).validate_python(LOSSES["regression"]), feedback)
    report = objective.report()
    assert (report["num_train_rows"], report["num_rows_without_target"]) == (9, 2)
    ratings = np.array([1.0 + i % 4 for i in range(11) if i not in (2, 5)])
    assert (report["rating_mean"], report["rating_std"]) == (ratings.mean(), ratings.std())
    assert objective.sequences([2]) == [feedback.ids[3]]
    sums = MetricSums()
    losses = objective.losses(torch.zeros(9, dtype=torch.float64), range(9), sums)
    assert losses.tolist() == pytest.approx((((ratings - ratings.mean()) / ratings.std()) ** 2).tolist())
    assert sums.means()["train/target_mean"] == pytest.approx(0.0, abs=1e-12)


def test_ratings_that_are_no_levels_or_all_equal_are_refused(
    tiny_checkpoint: Path, tmp_path: Path, feedback: FeedbackTable
) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(RewardLossConfig)
    with pytest.raises(DataError, match=r"2 feedback rows have a rating that is no level, e\.g\. 4"):
        make_objective(adapter.validate_python({"kind": "ordinal", "levels": [1, 2, 3]}), feedback)
    rows = [{**row, "rating": 2.0, "label": None} for row in feedback_rows(4, 1)]
    path = write_rows(tmp_path / "equal.parquet", rows)
    equal = build_feedback_table(path, load_tokenizer(tiny_checkpoint), 512, tmp_path / "equal.arrow")
    for name in ("regression", "ordinal"):
        with pytest.raises(DataError, match=r"all 4 training ratings are 2"):
            make_objective(adapter.validate_python(LOSSES[name]), equal)
    with pytest.raises(DataError, match="no row of equal has a label"):
        make_objective(adapter.validate_python(LOSSES["ordinal_of_labels"]), equal)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"kind": "ordinal", "levels": [1, 3, 2]}, "strictly increasing"),
        ({"kind": "ordinal", "target": "label", "levels": [1, 2]}, r"levels must be \[0, 1\]"),
        ({"kind": "ordinal", "levels": [1]}, "at least 2 items"),
        ({"kind": "bradley_terry", "margin_scale": 2.0}, "no margin to scale"),
        ({"kind": "regression", "margin": "data"}, "Extra inputs"),
    ],
)
def test_losses_that_make_no_sense_are_refused(loss: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardModelConfig.model_validate({"optimizer": {"learning_rate": 1e-4}, "loss": loss})


def trainer(checkpoint: Path, pairs: PairTable, path: Path, **options: Any) -> RewardTrainer:
    context = make_context(path, {"model": checkpoint}, batch_size=9, **options)
    config = RewardModelConfig.model_validate(context.spec.config)
    model = new_reward_model(checkpoint, 3)
    if config.gradient_checkpointing:
        recompute_layers(model.backbone)
    return RewardTrainer(context, config, model, make_objective(config.loss, pairs), 3)


@pytest.mark.parametrize("budget", [1, 100, 150, 100_000])
def test_a_token_budget_bounds_every_forward_pass_and_changes_no_gradient(
    tiny_checkpoint: Path, pairs: PairTable, tmp_path: Path, budget: int
) -> None:
    reference = trainer(tiny_checkpoint, pairs, tmp_path / "rows", micro_batch_size=9)
    budgeted = trainer(tiny_checkpoint, pairs, tmp_path / "tokens", max_tokens_per_micro_batch=budget)
    batches = budgeted.micro_batches(range(9))
    assert sorted(item for batch in batches for item in batch) == list(range(9))
    for batch in batches:
        assert len(batch) == 1 or 2 * len(batch) * max(int(pairs.lengths[i]) for i in batch) <= budget
    assert len(batches) == {1: 9, 100: 9, 100_000: 1}.get(budget, len(batches))
    assert budget != 150 or 1 < len(batches) < 9
    for one, cuts in ((reference, reference.micro_batches(range(9))), (budgeted, batches)):
        for batch in cuts:
            one.backward(batch, 9, MetricSums())
    for ours, theirs in zip(budgeted.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)  # type: ignore[arg-type]


def saved_bytes_and_gradients(one: RewardTrainer) -> tuple[int, list[torch.Tensor]]:
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in one.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = one.model(*pad_sequences(one.objective.sequences(range(9)), 3))
    one.objective.losses(scores, range(9), MetricSums()).sum().backward()
    kept = sum(size for pointer, size in sizes.items() if pointer not in weights)
    return kept, [parameter.grad for parameter in one.model.parameters() if parameter.grad is not None]


def test_layers_computed_again_keep_less_and_give_the_same_bits(
    tiny_checkpoint: Path, pairs: PairTable, tmp_path: Path
) -> None:
    kept, whole = saved_bytes_and_gradients(trainer(tiny_checkpoint, pairs, tmp_path / "a"))
    less, again = saved_bytes_and_gradients(
        trainer(tiny_checkpoint, pairs, tmp_path / "b", gradient_checkpointing=True)
    )
    assert less < kept / 3
    assert len(again) == len(whole)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, whole, strict=True))


def test_a_model_without_layers_cannot_be_computed_again() -> None:
    with pytest.raises(ConfigurationError, match="gradient_checkpointing: false"):
        recompute_layers(torch.nn.Linear(2, 2))
