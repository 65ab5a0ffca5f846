"""Algorithms that train a policy straight from preferences: no sampling, no reward model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from training_core.config.advantages import IMPORT_PATH_PATTERN
from training_core.config.base import Config
from training_core.config.lora import LoraConfig
from training_core.config.optimizer import OptimizerConfig
from training_core.config.sentinels import SentinelsConfig


class SigmoidLoss(Config):
    """DPO (Rafailov et al. 2023, arXiv 2305.18290, equation 7); with label smoothing cDPO."""

    kind: Literal["sigmoid"] = "sigmoid"
    """Chooses this loss: logistic in the difference of the implicit rewards."""
    beta: float = Field(default=0.1, gt=0.0)
    """Strength of the pull to the reference, implicit reward per nat. Default: 0.1 (arXiv 2305.18290, appendix B)."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Share of pairs that are taken to be labelled the wrong way round (cDPO, Mitchell 2023). Default: 0, plain DPO."""
    length_normalised: bool = False
    """Divide each answer's log-ratio by its number of tokens (arXiv 2411.15124). `beta` then counts nats a token and
    has to be larger: Tulu 3 takes 5. Default: false, as the paper of DPO."""


class RobustLoss(Config):
    """Robust DPO (Chowdhury et al. 2024, arXiv 2403.00409): unbiased under labels turned round at a known rate."""

    kind: Literal["robust"]
    """Chooses this loss: DPO's, corrected for the rate of wrong labels."""
    beta: float = Field(default=0.1, gt=0.0)
    """Strength of the pull to the reference, implicit reward per nat. Default: 0.1, as DPO."""
    label_smoothing: float = Field(ge=0.0, lt=0.5)
    """Share of labels that are the wrong way round. No default: it is a property of the data. 0 is plain DPO."""


class IpoLoss(Config):
    """IPO (Azar et al. 2023, arXiv 2310.12036, equation 17): the log-ratios' difference is drawn to 1 / (2 * beta)."""

    kind: Literal["ipo"]
    """Chooses this loss: squared distance to a finite target."""
    beta: float = Field(default=0.1, gt=0.0)
    """The paper's tau, per nat: the target is 1 / (2 * beta) nats. Default: 0.1, which the paper shows among others."""
    length_normalised: bool = False
    """Mean over the answer's tokens instead of the sum: a target in nats a token. Default: false, the sum, as the
    equation reads (and OpenRLHF); TRL takes the mean, so its betas belong to `true`."""


class HingeLoss(Config):
    """Hinge loss on the log-ratios (SLiC-HF, arXiv 2305.10425; RSO, arXiv 2309.06657)."""

    kind: Literal["hinge"]
    """Chooses this loss: linear until a pair is right by a margin, then nothing."""
    beta: float = Field(default=0.1, gt=0.0)
    """A pair is learned once the log-ratios differ by 1 / beta nats. Default: 0.1, as DPO."""


class SimpoLoss(Config):
    """SimPO (Meng et al. 2024, arXiv 2405.14734, equation 6): mean log-probabilities, no reference."""

    kind: Literal["simpo"]
    """Chooses this loss: no reference log-probabilities are computed."""
    beta: float = Field(default=2.0, gt=0.0)
    """Scale of the mean log-probability of an answer's tokens. Default: 2.0, the lower end of the paper's range."""
    margin: float = Field(default=0.5, ge=0.0)
    """The paper's gamma: by how much the chosen answer has to lead, in the unit of `beta` times nats a token.
    Default: 0.5, a value of the paper's search."""


class CustomPairLoss(Config):
    """A loss of your own, without a fork."""

    kind: Literal["custom"]
    """Chooses this loss: a function of your own."""
    import_path: str = Field(pattern=IMPORT_PATH_PATTERN)
    """`package.module:function`; called as `function(pair, **parameters)` with a PairLogprobs
    (training_core/ops/preference_losses.py), it returns the loss of each pair."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""
    beta: float = Field(default=0.1, gt=0.0)
    """Scale of the implicit rewards in the metrics; the function does not see it. Default: 0.1, as DPO."""
    uses_reference: bool = True
    """Whether the reference's log-probabilities are computed; else the pair holds none. Default: true."""


PairLossConfig = Annotated[
    SigmoidLoss | RobustLoss | IpoLoss | HingeLoss | SimpoLoss | CustomPairLoss, Field(discriminator="kind")
]


class PreferenceTraining(Config):
    """What training from preferences needs whatever the loss. An item is a pair (`dpo`) or a judged answer (`kto`)."""

    optimizer: OptimizerConfig
    """AdamW's knobs and the learning rate, whose schedule runs over the optimizer steps. Losses on whole answers need
    a small one: 5e-7 to 5e-6 are usual for full weights."""
    batch_size: int = Field(default=16, ge=1)
    """Items an optimizer step. Default: 16, at which a few hundred pairs still make a few dozen steps; papers with more
    data take 32 to 128."""
    micro_batch_size: int = Field(default=4, ge=1)
    """Items a forward pass; a pair is two answers. Less needs less memory and changes nothing else but rounding."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over the training items. Default: 1; Tunstall et al. 2023 (arXiv 2310.16944) see the training pairs
    learned by heart after it."""
    num_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps after which training ends even if `num_epochs` are not over; null: no such limit. The schedule
    runs over the steps that are done."""
    autocast: Literal["bfloat16", "none"] = "bfloat16"
    """Number format of matrix products, the reference's too; master weights, log-probabilities and losses are float32
    or wider anyway."""
    gradient_checkpointing: bool = False
    """Keep only the layers' inputs and compute the rest again in the backward pass: a third more work, far less memory.
    Same result. Default: false."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and leave the checkpoint's weights as they are; the saved policy has them merged.
    Default: null, all weights are trained."""
    checkpoint_every_steps: int = Field(default=10, ge=1)
    """Steps between checkpoints: at most so many are done again after a crash. Default: 10."""
    keep_last_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept; each holds weights and optimizer state, 12 bytes a parameter. Default: 2, so that a damaged
    newest one leaves one to go back to."""
    sentinels: SentinelsConfig = SentinelsConfig()
    """What is watched after each step, and what happens then: warn, stop, or roll back. Those of rollouts are silent
    here."""
    validate_every_steps: int | None = Field(default=None, ge=1)
    """Steps between measurements on the validation data; null: only before the first step and after the last."""

    @model_validator(mode="after")
    def _batch_holds_micro_batch(self) -> PreferenceTraining:
        if self.micro_batch_size > self.batch_size:
            raise ValueError(
                f"micro_batch_size ({self.micro_batch_size}) must not be larger than batch_size ({self.batch_size})"
            )
        return self


class DpoConfig(PreferenceTraining):
    """Direct preference optimisation and its family (Rafailov et al. 2023, arXiv 2305.18290)."""

    name: Literal["dpo"]
    """Chooses this algorithm: direct preference optimisation on pairs."""
    loss: PairLossConfig = SigmoidLoss()
    """Loss of a pair; `kind` is sigmoid, robust, ipo, hinge, simpo or custom. Default: sigmoid, that of DPO."""
    sft_weight: float = Field(default=0.0, ge=0.0)
    """Weight of a further term, the negative mean log-probability of the chosen answer's tokens, which keeps the chosen
    answer likely (Pang et al. 2024, arXiv 2404.19733, equation 1, take 1). Default: 0, no such term."""

    @property
    def needs_reference(self) -> bool:
        if isinstance(self.loss, CustomPairLoss):
            return self.loss.uses_reference
        return not isinstance(self.loss, SimpoLoss)


class KtoConfig(PreferenceTraining):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306) on answers judged one by one.

    Learns from the feedback files when the stage has them; else each pair is taken apart into a desirable and an
    undesirable answer.
    """

    name: Literal["kto"]
    """Chooses this algorithm: Kahneman-Tversky optimisation on unpaired answers."""
    beta: float = Field(default=0.1, gt=0.0)
    """How quickly the value of an answer saturates, per nat. Default: 0.1 (arXiv 2402.01306, section 4)."""
    desirable_weight: float = Field(default=1.0, ge=0.0)
    """Weight of good answers. Default: 1. With unequal numbers, set the weights so that weight times number of the two
    kinds is in a ratio between 1 and 4/3 (arXiv 2402.01306, section 4)."""
    undesirable_weight: float = Field(default=1.0, ge=0.0)
    """Weight of bad answers. Default: 1."""

    @property
    def needs_reference(self) -> bool:
        return True


class PreferenceStageConfig(Config):
    """The resolved config in the spec of stage `policy` for an algorithm that learns from preferences."""

    algorithm: Annotated[DpoConfig | KtoConfig, Field(discriminator="name")]
    """The algorithm and its knobs."""
