"""Config of the stage `reward_model`."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from training_core.config.base import Config
from training_core.config.lora import LoraConfig
from training_core.config.optimizer import OptimizerConfig


class BradleyTerryLoss(Config):
    """Pairs: the chosen answer's score minus the rejected one's is the log-odds of being preferred."""

    kind: Literal["bradley_terry"] = "bradley_terry"
    """Chooses this loss: pairs, by Bradley and Terry (Ouyang et al. 2022, arXiv 2203.02155, equation 1)."""
    margin: Literal["none", "data"] = "none"
    """How far apart the two scores should be. `none`: any distance will do. `data`: as far as the pair's column
    `margin` says, or else its `chosen_score` minus `rejected_score` (Touvron et al. 2023, arXiv 2307.09288,
    equation 2). A pair that has none of them is trained on without a margin and counted in
    `num_pairs_without_margin`. Default: none, as most reward models."""
    margin_scale: float = Field(default=1.0, gt=0.0)
    """Factor from the data's margins to units of the score; read with `margin: data` only. Default: 1; Touvron et al.
    2023 (table 27) use margins of up to 1 or up to 3."""
    centring_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the mean of (chosen + rejected)², which holds the scores around zero. Default: 0, none; Eisenstein et
    al. 2023 (arXiv 2312.09244) propose the term, 0.01 is usual."""

    @model_validator(mode="after")
    def _scale_has_a_margin(self) -> BradleyTerryLoss:
        if self.margin == "none" and self.margin_scale != 1.0:
            raise ValueError(
                f"margin_scale is {self.margin_scale}, but there is no margin to scale: write margin: data, or leave "
                "margin_scale out"
            )
        return self


class _RatingLoss(Config):
    target: Literal["rating", "label"] = "rating"
    """Column of the feedback rows that is learned: the `rating`, or the `label` as 0 (thumb down) and 1 (thumb up). A
    row without it is left out and counted in `num_rows_without_target`. Default: the rating."""


class RegressionLoss(_RatingLoss):
    """Judged answers: the score is the rating, by least squares."""

    kind: Literal["regression"]
    """Chooses this loss: the squared error of ratings of single answers."""
    standardise: bool = True
    """Learn (rating - mean) / standard deviation over the training rows instead of the rating itself; the two numbers
    stand in reward_config.json, and errors are reported in the rating's own unit. Default: true, since the score starts
    near 0 and has no constant term."""


class OrdinalLoss(_RatingLoss):
    """Judged answers: ordered levels by proportional odds, with a threshold between neighbours that is learned too."""

    kind: Literal["ordinal"]
    """Chooses this loss: the likelihood of ordered levels (McCullagh 1980), for ratings whose distances mean little."""
    levels: list[float] = Field(min_length=2)
    """The values that the target takes, from worst to best: [1, 2, 3, 4, 5], or [0, 1] for labels. A row with another
    value is an error. No default: it depends on the data."""

    @field_validator("levels")
    @classmethod
    def _increasing(cls, levels: list[float]) -> list[float]:
        if any(low >= high for low, high in itertools.pairwise(levels)):
            raise ValueError("levels must be strictly increasing, from worst to best, for example [1, 2, 3, 4, 5]")
        return levels

    @model_validator(mode="after")
    def _label_levels(self) -> OrdinalLoss:
        if self.target == "label" and self.levels != [0.0, 1.0]:
            raise ValueError(f"labels are 0 or 1: with target label, levels must be [0, 1], not {self.levels}")
        return self


class AcceptanceConfig(Config):
    """What a reward model must show on the validation pairs before anything is trained against it.

    It has to beat every rule that reads no answer: the longest, the shortest, a coin, and what the data checks add to
    these (docs/stages.md says how it is compared).
    """

    margin: float = Field(default=0.02, ge=0.0, lt=0.5)
    """By how much the accuracy must exceed that of the best null baseline, as a share of pairs. Default: 0.02, which is
    our choice; RewardBench (Lambert et al. 2024, arXiv 2403.13787) has subsets on which "longest" alone is right
    always, and no published figure says how much more is enough. What random variation explains is `confidence`'s."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1.0)
    """Of the one-sided lower bound of the gain over each baseline, which must exceed 0, and of the calibration error
    that a calibrated model could show by chance. Default: the usual 0.95."""
    min_pairs: int = Field(default=200, ge=2)
    """With fewer validation pairs nothing is refused: what they do not show is a warning. Default: two rules that
    disagree on 40 % of 200 pairs have a bound 7 points below the estimate; fewer pairs decide by chance."""
    max_calibration_error: float | None = Field(default=0.1, gt=0.0, le=1.0)
    """Largest mean distance between the probability that a pair's scores mean and how often that is right, after one
    factor for all scores was fitted to other pairs. Null: reported only. Default: 0.1; Guo et al. 2017 (arXiv
    1706.04599, table 1) find 0.04 to 0.2 in networks as trained and mostly 0.01 to 0.03 after such a fit."""
    on_failure: Literal["stop", "warn"] = "stop"
    """What follows when it is not good enough: end the stage with exit code 3, its files kept to look at, or warn and
    go on. Default: stop, since a policy learns whatever its reward model prefers."""


RewardLossConfig = Annotated[BradleyTerryLoss | RegressionLoss | OrdinalLoss, Field(discriminator="kind")]


class RewardModelConfig(Config):
    """A reward model, or an ensemble of them, on the SFT checkpoint's backbone."""

    loss: RewardLossConfig = BradleyTerryLoss()
    """What is learned from: `kind` is bradley_terry (pairs), regression or ordinal (ratings of single answers).
    Default: Bradley-Terry without a margin."""
    optimizer: OptimizerConfig
    """AdamW of the backbone and of the head; `learning_rate` is the backbone's."""
    head_learning_rate: float = Field(default=1e-3, ge=0.0, le=1.0)
    """Full learning rate of the scalar head (and of ordinal thresholds), which starts from noise and needs a larger one
    than the backbone. Default: with 135 M parameters and some hundred pairs, the head learned at 1e-3 and not at the
    backbone's rate."""
    lora: LoraConfig | None = None
    """Train low-rank adapters on the backbone (with `optimizer.learning_rate`, usually ten times that of all weights)
    and the head; what is saved has them merged in. Default: none, all weights are trained."""
    num_members: int = Field(default=1, ge=1, le=16)
    """Reward models that are trained one after another, each from a head and in an order of the data of its own. The
    score is the mean of theirs; their spread is what `disagreement_penalty` of the reward `reward_model` subtracts.
    Each needs as much time and room as one alone. Default: 1; Coste et al. 2024 (arXiv 2310.02743) use 3 to 5."""
    batch_size: int = Field(default=16, ge=1)
    """Pairs (or rated answers) an optimizer step. Default: a size at which a few hundred pairs still make a few dozen
    steps."""
    micro_batch_size: int = Field(default=4, ge=1)
    """Pairs (or rated answers) a forward pass; less needs less memory and changes nothing else but rounding. Default:
    with 135 M parameters and 90 tokens an answer, 4 needs 4 GB in all, 8 a third of a GB more, and takes as long."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Tokens of a forward pass in training, padding and both answers of a pair included, in place of
    `micro_batch_size`: short pairs go many at a time, long ones few, so that memory follows this number and not the
    longest pair. A pair longer than this goes alone. Changes nothing else but rounding. Default: none."""
    gradient_checkpointing: bool = False
    """Keep only what enters each layer and compute the rest again in the backward pass: about a third more time for a
    fraction of the activations' memory; gradients are the same (Chen et al. 2016, arXiv 1604.06174). Default: false."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over the training rows. Default: one, since reward models overfit after it (Ouyang et al. 2022, arXiv
    2203.02155, appendix C.2)."""
    autocast: Literal["bfloat16", "none"] = "bfloat16"
    """Matrix products of the training passes in bfloat16 over float32 weights, or all in float32. Master weights are
    float32 either way; what they are saved and used in afterwards is `dtype`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Number format in which the trained backbone is saved and used; the head is float32. Accuracy, margin, mean and
    standard deviation of the scores are measured on what was saved, in this format, and so are rewards in training and
    scores in evaluation: bfloat16 drops much of what a small learning rate changed, and the accuracy shows how much.
    Default: bfloat16, half the memory."""
    max_tokens_per_batch: int = Field(default=4096, ge=1)
    """Tokens of a validation batch, padding included."""
    acceptance: AcceptanceConfig = AcceptanceConfig()
    """What the trained model must show before it is used. To change it is to train again: it is part of the stage."""
    checkpoint_every_steps: int = Field(default=10, ge=1)
    """Optimizer steps between checkpoints: what a kill costs at most."""
    keep_last_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept; two, so that a damaged newest one leaves one to go back to."""

    @model_validator(mode="after")
    def check_batch(self) -> RewardModelConfig:
        if self.max_tokens_per_micro_batch is None and self.micro_batch_size > self.batch_size:
            raise ValueError(
                f"micro_batch_size ({self.micro_batch_size}) must not be larger than batch_size ({self.batch_size})"
            )
        return self

    @property
    def needs_feedback(self) -> bool:
        """Whether the rows that are learned from are judged answers and not pairs."""
        return self.loss.kind != "bradley_terry"
