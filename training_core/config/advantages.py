"""Advantage estimators: from scores of answers to what each token is worth."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from training_core.config.base import Config

IMPORT_PATH_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


class _Advantage(Config):
    @property
    def needs_groups(self) -> bool:
        """Whether several answers to a prompt are compared."""
        return False

    @property
    def is_relative(self) -> bool:
        """Whether a group of equal scores teaches nothing."""
        return False

    @property
    def is_per_token(self) -> bool:
        """Whether tokens of one answer may differ in what they are worth."""
        return False

    @property
    def needs_critic(self) -> bool:
        """Whether a critic's values are read."""
        return False

    @property
    def needs_greedy_answer(self) -> bool:
        """Whether each prompt's most probable answer is sampled and scored too."""
        return False

    def knobs(self) -> dict[str, Any]:
        """Return the keyword arguments of the registered function."""
        return self.model_dump(exclude={"kind"})


class _GroupAdvantage(_Advantage):
    @property
    def needs_groups(self) -> bool:
        return True

    @property
    def is_relative(self) -> bool:
        return True


class GroupNormalised(_GroupAdvantage):
    """Score minus the group's mean, divided by the group's standard deviation (GRPO, arXiv 2402.03300)."""

    kind: Literal["group_normalised"] = "group_normalised"
    """Chooses this estimator: centred and divided."""


class GroupCentred(_GroupAdvantage):
    """Score minus the group's mean (Dr. GRPO, arXiv 2503.20783)."""

    kind: Literal["group_centred"] = "group_centred"
    """Chooses this estimator: centred only."""


class LeaveOneOut(_GroupAdvantage):
    """Score minus the mean of the group's other answers (RLOO, arXiv 2402.14740)."""

    kind: Literal["leave_one_out"] = "leave_one_out"
    """Chooses this estimator: the others' mean as baseline."""


class ReinforcePlusPlus(_Advantage):
    """Discounted reward-to-go of each token, whitened over the batch (REINFORCE++, arXiv 2501.03262)."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """Chooses this estimator: reward-to-go, whitened."""
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Factor a token by which later rewards count less. Default: 1, as the paper."""

    @property
    def is_per_token(self) -> bool:
        return True


class ReinforcePlusPlusBaseline(_GroupAdvantage):
    """As `reinforce_plus_plus`, with the group's mean score subtracted first (arXiv 2501.03262)."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    """Chooses this estimator: centred in the group, then whitened over the batch."""
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Factor a token by which later rewards count less. Default: 1, as the paper."""

    @property
    def is_relative(self) -> bool:
        # Whitened over the batch, a group of equal scores gets minus the batch's mean.
        return False

    @property
    def is_per_token(self) -> bool:
        return True


class ReMaxBaseline(_Advantage):
    """Reward-to-go minus the score of the most probable answer to the same prompt (ReMax, arXiv 2310.10505)."""

    kind: Literal["remax"] = "remax"
    """Chooses this estimator: the greedy answer's score as baseline."""
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Factor a token by which later rewards count less. Default: 1, as the paper."""

    @property
    def needs_greedy_answer(self) -> bool:
        return True

    @property
    def is_per_token(self) -> bool:
        return True


class Gae(_Advantage):
    """Generalised advantage estimation with a critic (arXiv 1506.02438)."""

    kind: Literal["gae"] = "gae"
    """Chooses this estimator: temporal differences of a critic's values."""
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Factor a token by which later rewards count less. Default: 1, as Ouyang et al. 2022 (arXiv 2203.02155)."""
    smoothing: float = Field(default=0.95, ge=0.0, le=1.0)
    """Lambda: 0 trusts the critic's next value, 1 the rewards that followed. Default: 0.95, as Stiennon et al. 2020
    (arXiv 2009.01325)."""
    whiten: bool = True
    """Subtract the mean over the batch's tokens and divide by the standard deviation. Default: true (as above)."""

    @property
    def needs_critic(self) -> bool:
        return True

    @property
    def is_per_token(self) -> bool:
        return True


class CustomAdvantage(_Advantage):
    """An estimator of your own, without a fork."""

    kind: Literal["custom"]
    """Chooses this estimator: a function of your own."""
    import_path: str = Field(pattern=IMPORT_PATH_PATTERN)
    """`package.module:function`; called as `function(inputs, **parameters)` with an `EstimatorInputs`, it returns one
    value an answer [N] or one a token [N, T]. With `kl.placement: reward` it has to subtract `inputs.kl_penalties`
    itself. See training_core/ops/advantages.py."""
    reads_values: bool = False
    """Give `inputs.values`, for which the algorithm needs a `critic`. It learns the `returns` of the `Advantages` that
    the function then has to return. Default: false."""
    reads_greedy_scores: bool = False
    """Give `inputs.baseline_scores`: each prompt's most probable answer is sampled and scored too. Default: false."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""

    @property
    def is_relative(self) -> bool:
        # Only its author knows; who asks for dynamic sampling says so.
        return True

    @property
    def needs_critic(self) -> bool:
        return self.reads_values

    @property
    def needs_greedy_answer(self) -> bool:
        return self.reads_greedy_scores


GroupAdvantageConfig = Annotated[GroupNormalised | GroupCentred, Field(discriminator="kind")]
AdvantageConfig = Annotated[
    GroupNormalised
    | GroupCentred
    | LeaveOneOut
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | ReMaxBaseline
    | Gae
    | CustomAdvantage,
    Field(discriminator="kind"),
]
