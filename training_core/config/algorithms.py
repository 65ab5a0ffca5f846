"""Algorithms that train a policy. One variant each, so that none can be given another's knobs.

An algorithm that learns from sampled answers is an advantage estimator plus a policy loss; everything else is the same
for all of them (`OnlineConfig`), and so is the loop. `custom` takes any estimator with any loss.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from training_core.config.advantages import (
    AdvantageConfig,
    Gae,
    GroupAdvantageConfig,
    GroupCentred,
    GroupNormalised,
    LeaveOneOut,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMaxBaseline,
)
from training_core.config.aggregation import (
    AggregationConfig,
    ConstantNormaliser,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
)
from training_core.config.base import Config
from training_core.config.critic import CriticConfig
from training_core.config.off_policy import DynamicSamplingConfig
from training_core.config.online import OnlineConfig
from training_core.config.policy_losses import (
    Cispo,
    ClippedSurrogate,
    DapoClippedSurrogate,
    Gspo,
    GspoLossConfig,
    PolicyLossConfig,
    RatioLossConfig,
    Reinforce,
    Sapo,
    TokenLossConfig,
)
from training_core.config.preference import DpoConfig, KtoConfig
from training_core.config.rewards import RewardConfig, check_part_names, check_rules_fit
from training_core.config.rollout import RolloutConfig


class GrpoConfig(OnlineConfig):
    """Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300)."""

    name: Literal["grpo"]
    """Chooses this algorithm: group relative policy optimisation."""
    advantage: GroupAdvantageConfig = GroupNormalised()
    """Score minus the group's mean, divided by the group's standard deviation or not. Default: divided
    (arXiv 2402.03300)."""
    loss: ClippedSurrogate = ClippedSurrogate()
    """PPO's clipped surrogate. Default: with bounds of 0.2."""


class DrGrpoConfig(OnlineConfig):
    """Dr. GRPO: no division by the spread, and a constant length normaliser (Liu et al. 2025, arXiv 2503.20783)."""

    name: Literal["dr_grpo"]
    """Chooses this algorithm: GRPO without its two biases."""
    advantage: GroupCentred = GroupCentred()
    """Score minus the group's mean."""
    loss: ClippedSurrogate = ClippedSurrogate()
    """PPO's clipped surrogate. Default: with bounds of 0.2."""
    aggregation: ConstantNormaliser = ConstantNormaliser()
    """The sum over tokens, divided by answers times a constant. Default: the token limit."""


class RlooConfig(OnlineConfig):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740)."""

    name: Literal["rloo"]
    """Chooses this algorithm: REINFORCE with the other answers' mean score as baseline."""
    advantage: LeaveOneOut = LeaveOneOut()
    """Score minus the mean of the group's other answers."""
    loss: RatioLossConfig = Reinforce()
    """Default: the plain policy gradient, as the paper, for one update a rollout."""
    aggregation: AggregationConfig = SequenceMeanTokenSum()
    """How token losses become one number. Default: the policy gradient of whole answers, as the paper."""


class ReinforcePlusPlusConfig(OnlineConfig):
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): PPO's loss without a critic, advantages over the whole batch."""

    name: Literal["reinforce_plus_plus"]
    """Chooses this algorithm: reward-to-go, whitened over the batch."""
    group_size: int = Field(default=1, ge=1)
    """Answers sampled for each prompt. Default: 1, since no group is compared."""
    advantage: ReinforcePlusPlus = ReinforcePlusPlus()
    """Reward-to-go of each token, whitened over the batch."""
    loss: TokenLossConfig = ClippedSurrogate()
    """Default: PPO's clipped surrogate."""


class ReinforcePlusPlusBaselineConfig(OnlineConfig):
    """REINFORCE++ with the group's mean as baseline (Hu et al. 2025, arXiv 2501.03262)."""

    name: Literal["reinforce_plus_plus_baseline"]
    """Chooses this algorithm: REINFORCE++ with a group baseline."""
    advantage: ReinforcePlusPlusBaseline = ReinforcePlusPlusBaseline()
    """Score minus the group's mean, whitened over the batch."""
    loss: TokenLossConfig = ClippedSurrogate()
    """Default: PPO's clipped surrogate."""


class ReMaxConfig(OnlineConfig):
    """ReMax (Li et al. 2024, arXiv 2310.10505): REINFORCE with the greedy answer's score as baseline."""

    name: Literal["remax"]
    """Chooses this algorithm: one more answer a prompt, the most probable one, as baseline."""
    group_size: int = Field(default=1, ge=1)
    """Answers sampled for each prompt, besides the greedy one. Default: 1, as the paper."""
    advantage: ReMaxBaseline = ReMaxBaseline()
    """Reward-to-go minus the greedy answer's score."""
    loss: TokenLossConfig = Reinforce()
    """Default: the plain policy gradient, as the paper, for one update a rollout."""
    aggregation: AggregationConfig = SequenceMeanTokenSum()
    """How token losses become one number. Default: the policy gradient of whole answers, as the paper."""


class DapoConfig(OnlineConfig):
    """DAPO (Yu et al. 2025, arXiv 2503.14476): clip-higher, dynamic sampling, token mean.

    Its soft overlong punishment is a reward: `kind: soft_overlong`.
    """

    name: Literal["dapo"]
    """Chooses this algorithm: GRPO with DAPO's changes."""
    advantage: GroupAdvantageConfig = GroupNormalised()
    """Score minus the group's mean, divided by the group's standard deviation."""
    loss: DapoClippedSurrogate = DapoClippedSurrogate()
    """PPO's clipped surrogate, bounded above by 1.28."""
    dynamic_sampling: DynamicSamplingConfig | None = DynamicSamplingConfig()
    """Sample further prompts in place of groups without a difference in scores. Default: yes, bounded."""
    mask_truncated: bool = True
    """Leave answers cut by the token limit out of the loss. Default: true, the paper's overlong filtering."""


class GspoConfig(OnlineConfig):
    """GSPO: one ratio an answer (Zheng et al. 2025, arXiv 2507.18071)."""

    name: Literal["gspo"]
    """Chooses this algorithm: GRPO with the ratio of the whole answer."""
    advantage: GroupAdvantageConfig = GroupNormalised()
    """Score minus the group's mean, divided by the group's standard deviation."""
    loss: GspoLossConfig = Gspo()
    """`gspo`, or `gspo_token` with an advantage for each token."""
    aggregation: AggregationConfig = SequenceMeanTokenMean()
    """How token losses become one number. Default: the mean over answers, as the paper."""


class CispoConfig(OnlineConfig):
    """CISPO (MiniMax 2025, arXiv 2506.13585): the ratio weighs, and is bounded, but is not differentiated."""

    name: Literal["cispo"]
    """Chooses this algorithm: GRPO with clipped importance weights."""
    advantage: GroupAdvantageConfig = GroupNormalised()
    """Score minus the group's mean, divided by the group's standard deviation."""
    loss: Cispo = Cispo()
    """Log-probability times advantage times the bounded ratio."""


class SapoConfig(OnlineConfig):
    """SAPO (Gao et al. 2025, arXiv 2511.20347): a soft gate on the ratio instead of a clip."""

    name: Literal["sapo"]
    """Chooses this algorithm: GRPO with a soft gate."""
    advantage: GroupAdvantageConfig = GroupNormalised()
    """Score minus the group's mean, divided by the group's standard deviation."""
    loss: Sapo = Sapo()
    """The gate's temperatures."""
    aggregation: AggregationConfig = SequenceMeanTokenMean()
    """How token losses become one number. Default: the mean over answers, as the paper."""


class PpoConfig(OnlineConfig):
    """Proximal policy optimisation with a critic (Schulman et al. 2017; Ouyang et al. 2022, arXiv 2203.02155)."""

    name: Literal["ppo"]
    """Chooses this algorithm: generalised advantages from a critic."""
    group_size: int = Field(default=1, ge=1)
    """Answers sampled for each prompt. Default: 1, since the critic is the baseline."""
    advantage: Gae = Gae()
    """Discount, smoothing and whitening."""
    loss: ClippedSurrogate = ClippedSurrogate()
    """PPO's clipped surrogate. Default: with bounds of 0.2."""
    critic: CriticConfig
    """The value model and its optimizer."""


class CustomConfig(OnlineConfig):
    """Any estimator with any loss, your own functions among them."""

    name: Literal["custom"]
    """Chooses this algorithm: put together from parts."""
    advantage: AdvantageConfig
    """The estimator; `kind: custom` takes a function of your own."""
    loss: PolicyLossConfig
    """The loss; `kind: custom` takes a function of your own."""
    critic: CriticConfig | None = None
    """The value model, for `advantage: {kind: gae}`."""


OnlineAlgorithm = (
    GrpoConfig
    | DrGrpoConfig
    | RlooConfig
    | ReinforcePlusPlusConfig
    | ReinforcePlusPlusBaselineConfig
    | ReMaxConfig
    | DapoConfig
    | GspoConfig
    | CispoConfig
    | SapoConfig
    | PpoConfig
    | CustomConfig
)
PREFERENCE_NAMES = ("dpo", "kto")
"""Algorithms that learn from preferences without sampling an answer."""

AlgorithmConfig = Annotated[OnlineAlgorithm | DpoConfig | KtoConfig, Field(discriminator="name")]


class PolicyStageConfig(Config):
    """The resolved config in the spec of stage `policy` for an algorithm that learns from sampled answers."""

    algorithm: Annotated[OnlineAlgorithm, Field(discriminator="name")]
    """The algorithm and its knobs."""
    rollout: RolloutConfig
    """Engine and sampling."""
    rewards: list[RewardConfig]
    """Parts of the reward."""

    @field_validator("rewards")
    @classmethod
    def _names(cls, rewards: list[RewardConfig]) -> list[RewardConfig]:
        return check_part_names(rewards)

    @model_validator(mode="after")
    def _rules_fit(self) -> PolicyStageConfig:
        check_rules_fit(self.rewards, self.rollout.max_new_tokens)
        return self

    @model_validator(mode="after")
    def _gold_is_a_reward(self) -> PolicyStageConfig:
        if problem := unknown_gold(self.algorithm, self.rewards):
            raise ValueError(problem)
        return self


def unknown_gold(algorithm: OnlineConfig, rewards: list[RewardConfig]) -> str | None:
    """Return what is wrong with the part that a sentinel takes for what is really wanted, or None."""
    gold, names = algorithm.sentinels.proxy_up_gold_down.gold, [reward.part_name for reward in rewards]
    if gold is None or gold in names:
        return None
    return (
        f"algorithm.sentinels.proxy_up_gold_down.gold is {gold!r}, which is none of the rewards: {', '.join(names)}. "
        "Add it with weight 0 to be measured only, or name one of them"
    )
