"""What a reward model is trained and measured on: token tables in the stage's directory, and their targets."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from training_core.config.reward_model import BradleyTerryLoss, RewardModelConfig
from training_core.data.tables import FeedbackTable, PairTable, build_feedback_table, build_pair_table
from training_core.errors import DataError
from training_core.protocol.context import StageContext

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RewardData:
    """Rows to learn from and rows to measure on, mapped from files."""

    train: PairTable | FeedbackTable
    validation_pairs: PairTable | None
    validation_feedback: FeedbackTable | None


def open_data(
    context: StageContext, config: RewardModelConfig, tokenizer: PreTrainedTokenizerBase, limit: int
) -> RewardData:
    """Encode the stage's inputs into `tables/` below its directory, or find them there, and open them.

    Bradley-Terry needs `train_pairs` and `validation_pairs`. Ratings need `train_feedback` and `validation_feedback`;
    where there are `validation_pairs` too, the accuracy is measured on them.

    Args:
        context: with the inputs.
        config: says what is learned from.
        tokenizer: with chat template and EOS.
        limit: the model's number of positions.

    Raises:
        DataError: rows cannot be used; or training and validation share a prompt.
    """
    folder = context.directory.path / "tables"
    folder.mkdir(parents=True, exist_ok=True)

    def pairs(name: str) -> PairTable:
        return build_pair_table(context.input_path(name), tokenizer, limit, folder / f"{name}.arrow")

    def feedback(name: str) -> FeedbackTable:
        return build_feedback_table(context.input_path(name), tokenizer, limit, folder / f"{name}.arrow")

    if config.needs_feedback:
        has_pairs = context.has_input("validation_pairs")
        data = RewardData(
            feedback("train_feedback"),
            pairs("validation_pairs") if has_pairs else None,
            feedback("validation_feedback"),
        )
    else:
        data = RewardData(pairs("train_pairs"), pairs("validation_pairs"), None)
    for table in (data.validation_pairs, data.validation_feedback):
        if table is not None:
            check_disjoint(data.train, table)
    return data


def check_disjoint(train: PairTable | FeedbackTable, validation: PairTable | FeedbackTable) -> None:
    """Refuse a validation set that shares a prompt with the training set: it would measure memory.

    Raises:
        DataError: names one such prompt.
    """
    shared = train.group_ids() & validation.group_ids()
    if shared:
        names = " and ".join(Path(table.path).stem for table in (train, validation))
        raise DataError(
            f"{len(shared)} prompts are in both {names}, e.g. group {min(shared)!r}. Split by prompt, as the data "
            "checks do"
        )


def pair_margins(table: PairTable, loss: BradleyTerryLoss) -> Floats | None:
    """Return the margin of each pair in units of the score, NaN where the data say nothing; None without margins.

    Raises:
        DataError: no pair has a margin, though the config asks for them.
    """
    if loss.margin == "none":
        return None
    given = table.numbers("margin")
    margins = np.where(np.isnan(given), table.numbers("chosen_score") - table.numbers("rejected_score"), given)
    if np.isnan(margins).all():
        raise DataError(
            "reward_model.loss.margin is data, but no training pair has a margin, nor both scores. Give the preference "
            "rows a `margin` or `chosen_score` and `rejected_score`, or set margin: none"
        )
    if num_negative := int((margins < 0).sum()):
        logger.warning(
            "%d of %d pairs have a negative margin: the data score the rejected answer higher. The loss then asks less "
            "of the pair than without a margin",
            num_negative,
            len(margins),
        )
    return margins * loss.margin_scale


def rating_targets(table: FeedbackTable, target: str) -> Floats:
    """Return what is learned of each row, NaN where the row has none.

    Raises:
        DataError: no row has it.
    """
    targets = table.numbers(target)
    if np.isnan(targets).all():
        raise DataError(
            f"no row of {Path(table.path).stem} has a {target}, which reward_model.loss.target asks for. Give the "
            "feedback rows one, or choose the other target (rating or label)"
        )
    return targets


def present_rows(targets: Floats) -> NDArray[np.int64]:
    """Return the rows that have a target."""
    return np.flatnonzero(~np.isnan(targets)).astype(np.int64)
