"""Every name that a config can choose exists in a registry, and every registered name can be chosen."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from training_core.config import algorithms, off_policy
from training_core.config.advantages import AdvantageConfig
from training_core.config.aggregation import AggregationConfig
from training_core.config.algorithms import AlgorithmConfig
from training_core.config.evaluation import EvaluationConfig
from training_core.config.kl import KlInLoss, KlInReward
from training_core.config.policy_losses import PolicyLossConfig
from training_core.config.rewards import RewardConfig, RuleConfig
from training_core.config.rollout import RolloutConfig
from training_core.registries import (
    ADVANTAGE_ESTIMATORS,
    AGGREGATIONS,
    KL_LOSSES,
    KL_REWARDS,
    POLICY_LOSSES,
    REWARD_RULES,
    ROLLOUT_ENGINES,
)


def names_of(union: Any, field: str) -> set[str]:
    """Return the values of the discriminator `field` over the variants of an annotated union."""
    variants = get_args(get_args(union)[0])
    return {get_args(variant.model_fields[field].annotation)[0] for variant in variants}


def literal_of(config: Any, field: str) -> set[str]:
    return set(get_args(config.model_fields[field].annotation))


@pytest.mark.parametrize(
    ("registered", "offered"),
    [
        (ADVANTAGE_ESTIMATORS, names_of(AdvantageConfig, "kind") - {"custom"}),
        (POLICY_LOSSES, names_of(PolicyLossConfig, "kind") - {"custom"}),
        (KL_REWARDS, literal_of(KlInReward, "estimator")),
        (KL_LOSSES, literal_of(KlInLoss, "estimator")),
        (AGGREGATIONS, names_of(AggregationConfig, "kind")),
        (ROLLOUT_ENGINES, names_of(RolloutConfig, "engine")),
        (REWARD_RULES, names_of(RewardConfig, "kind") - {"reward_model"}),
        (REWARD_RULES, names_of(RuleConfig, "kind")),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_configs_and_registries_offer_the_same_names(registered: Any, offered: set[str]) -> None:
    assert set(registered) == offered


def test_evaluation_measures_with_the_rules_that_can_be_rewards() -> None:
    annotation = EvaluationConfig.model_fields["metrics"].annotation
    assert get_args(annotation) == (RuleConfig,)


def test_every_field_says_what_it_is() -> None:
    variants: list[Any] = [off_policy.ReplayConfig, off_policy.DynamicSamplingConfig, algorithms.PolicyStageConfig]
    for union in (RewardConfig, RolloutConfig, AggregationConfig, AlgorithmConfig, AdvantageConfig, PolicyLossConfig):
        variants += get_args(get_args(union)[0])
    for variant in variants:
        assert [name for name, field in variant.model_fields.items() if not field.description] == [], variant
