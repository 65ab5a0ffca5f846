"""Policy losses: what a token's advantage does to its probability."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from training_core.config.advantages import IMPORT_PATH_PATTERN
from training_core.config.base import Config


class _Loss(Config):
    @property
    def corrects_for_movement(self) -> bool:
        """Whether the loss stays right when the policy is no longer the one that sampled."""
        return True

    @property
    def is_per_answer(self) -> bool:
        """Whether one ratio stands for a whole answer, which then needs one advantage."""
        return False

    def knobs(self) -> dict[str, Any]:
        """Return the keyword arguments of the registered function."""
        return self.model_dump(exclude={"kind"})


class ClippedSurrogate(_Loss):
    """PPO's clipped surrogate, ratio by token (arXiv 1707.06347, equation 7)."""

    kind: Literal["clipped_surrogate"] = "clipped_surrogate"
    """Chooses this loss: the clipped ratio of each token."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The ratio of new to old probability counts down to 1 - clip_low. Default: Schulman et al. 2017
    (arXiv 1707.06347)."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """The ratio counts up to 1 + clip_high. Default: as clip_low; DAPO (arXiv 2503.14476) takes 0.28."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """With a negative advantage the loss counts up to this multiple of its size (Ye et al. 2020, arXiv 1912.09729, who
    take 3). Default: none."""


class DapoClippedSurrogate(ClippedSurrogate):
    """PPO's clipped surrogate with the upper bound of DAPO ("clip-higher")."""

    clip_high: float = Field(default=0.28, gt=0.0)
    """The ratio counts up to 1 + clip_high. Default: DAPO (arXiv 2503.14476)."""


class Reinforce(_Loss):
    """Minus advantage times log-probability, without a ratio (Williams 1992): for one update a rollout."""

    kind: Literal["reinforce"] = "reinforce"
    """Chooses this loss: the plain policy gradient."""

    @property
    def corrects_for_movement(self) -> bool:
        return False


class ImportanceWeighted(_Loss):
    """Minus advantage times the ratio of each token, never clipped."""

    kind: Literal["importance_weighted"] = "importance_weighted"
    """Chooses this loss: the ratio without bounds."""


class SequenceSurrogate(_Loss):
    """The clipped surrogate with the ratio of the whole answer's probability."""

    kind: Literal["sequence_surrogate"] = "sequence_surrogate"
    """Chooses this loss: the clipped ratio of the whole answer."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The ratio counts down to 1 - clip_low. Default: that of the token's ratio."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """The ratio counts up to 1 + clip_high. Default: that of the token's ratio."""

    @property
    def is_per_answer(self) -> bool:
        return True


class Gspo(_Loss):
    """The clipped surrogate with the geometric mean of an answer's ratios (arXiv 2507.18071, equation 5)."""

    kind: Literal["gspo"] = "gspo"
    """Chooses this loss: one ratio an answer."""
    clip_low: float = Field(default=3e-4, gt=0.0, lt=1.0)
    """The ratio counts down to 1 - clip_low. Default: section 5.1 of the paper; a mean over an answer moves little."""
    clip_high: float = Field(default=4e-4, gt=0.0)
    """The ratio counts up to 1 + clip_high. Default: section 5.1 of the paper."""

    @property
    def is_per_answer(self) -> bool:
        return True


class GspoToken(_Loss):
    """GSPO with an advantage for each token (arXiv 2507.18071, equation 13)."""

    kind: Literal["gspo_token"]
    """Chooses this loss: the answer's ratio in value, the token's in gradient."""
    clip_low: float = Field(default=3e-4, gt=0.0, lt=1.0)
    """The ratio counts down to 1 - clip_low. Default: section 5.1 of the paper."""
    clip_high: float = Field(default=4e-4, gt=0.0)
    """The ratio counts up to 1 + clip_high. Default: section 5.1 of the paper."""


class Cispo(_Loss):
    """Log-probability weighted by the clipped ratio, which is itself held constant (arXiv 2506.13585, equation 4)."""

    kind: Literal["cispo"] = "cispo"
    """Chooses this loss: every token keeps a gradient, only its weight is bounded."""
    clip_low: float | None = Field(default=None, gt=0.0, lt=1.0)
    """The weight is at least 1 - clip_low. Default: no lower bound, as the paper in practice."""
    clip_high: float = Field(default=1.0, gt=0.0)
    """The weight is at most 1 + clip_high: relative to 1, as everywhere here. Default: 1, so at most twice the weight;
    the paper tunes it and names no number."""


class Sapo(_Loss):
    """A soft gate instead of a clip (arXiv 2511.20347)."""

    kind: Literal["sapo"] = "sapo"
    """Chooses this loss: the gradient fades as the ratio leaves 1."""
    temperature_positive: float = Field(default=1.0, gt=0.0)
    """How fast it fades for positive advantages. Default: the paper's."""
    temperature_negative: float = Field(default=1.05, gt=0.0)
    """How fast it fades for negative advantages: a little faster. Default: the paper's."""


class CustomLoss(_Loss):
    """A loss of your own, without a fork."""

    kind: Literal["custom"]
    """Chooses this loss: a function of your own."""
    import_path: str = Field(pattern=IMPORT_PATH_PATTERN)
    """`package.module:function`; called as `function(logprobs, old_logprobs, advantages, mask, **parameters)`, all
    [answers, time], it returns the loss of each token. See training_core/ops/policy_losses.py."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""


TokenLossConfig = Annotated[Reinforce | ClippedSurrogate, Field(discriminator="kind")]
RatioLossConfig = Annotated[Reinforce | ClippedSurrogate | SequenceSurrogate, Field(discriminator="kind")]
GspoLossConfig = Annotated[Gspo | GspoToken, Field(discriminator="kind")]
PolicyLossConfig = Annotated[
    ClippedSurrogate
    | Reinforce
    | ImportanceWeighted
    | SequenceSurrogate
    | Gspo
    | GspoToken
    | Cispo
    | Sapo
    | CustomLoss,
    Field(discriminator="kind"),
]
