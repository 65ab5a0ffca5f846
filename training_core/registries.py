"""Every table of names that a config chooses from. What is registered is a thin adapter over a plain function.

To add an entry, write the function where its kind lives, add it here, and give the config a variant. A test runs every
entry of every table. `tidegate list` reads summary, formula and source of an entry in its function's docstring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from training_core.ops import advantages, aggregation, kl, policy_losses, preference_losses
from training_core.registry import Registry
from training_core.rewards import code_tests, matching, mathematics, remote, rules
from training_core.rewards.base import RewardFunction
from training_core.rollout.base import RolloutEngine

ADVANTAGE_ESTIMATORS: Registry[Callable[..., advantages.Advantages]] = Registry("advantage estimator")
"""(EstimatorInputs, **knobs) -> Advantages."""
ADVANTAGE_ESTIMATORS.add("group_normalised", advantages.group_normalised)
ADVANTAGE_ESTIMATORS.add("group_centred", advantages.group_centred)
ADVANTAGE_ESTIMATORS.add("leave_one_out", advantages.leave_one_out)
ADVANTAGE_ESTIMATORS.add("reinforce_plus_plus", advantages.reinforce_plus_plus)
ADVANTAGE_ESTIMATORS.add("reinforce_plus_plus_baseline", advantages.reinforce_plus_plus_baseline)
ADVANTAGE_ESTIMATORS.add("remax", advantages.remax)
ADVANTAGE_ESTIMATORS.add("gae", advantages.gae)

POLICY_LOSSES: Registry[Callable[..., tuple[Tensor, Tensor]]] = Registry("policy loss")
"""(logprobs, old_logprobs, advantages, mask, **knobs) -> (loss, is_clipped), each [batch, time]."""
POLICY_LOSSES.add("clipped_surrogate", policy_losses.clipped_surrogate)
POLICY_LOSSES.add("reinforce", policy_losses.reinforce)
POLICY_LOSSES.add("importance_weighted", policy_losses.importance_weighted)
POLICY_LOSSES.add("sequence_surrogate", policy_losses.sequence_surrogate)
POLICY_LOSSES.add("gspo", policy_losses.gspo)
POLICY_LOSSES.add("gspo_token", policy_losses.gspo_token)
POLICY_LOSSES.add("cispo", policy_losses.cispo)
POLICY_LOSSES.add("sapo", policy_losses.sapo)


def _without_importance(estimate: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return an estimate that does not read the importance ratio in the form of those that do."""

    @functools.wraps(estimate)
    def of_both(log_ratio: Tensor, importance_log_ratio: Tensor) -> Tensor:
        return estimate(log_ratio)

    return of_both


KL_LOSSES: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry("KL loss")
"""(log policy - log reference, log policy - log sampling policy) -> nats a token, for a term of the loss."""
KL_LOSSES.add("k2", _without_importance(kl.k2))
KL_LOSSES.add("k3", _without_importance(kl.k3))
KL_LOSSES.add("k3_ratio", kl.k3_with_ratio)
KL_LOSSES.add("k1_ratio", kl.k1_with_ratio)
KL_LOSSES.add("k3_straight_through", _without_importance(kl.k3_straight_through))
KL_LOSSES.add("abs", _without_importance(kl.absolute))

KL_REWARDS: Registry[Callable[[Tensor], Tensor]] = Registry("KL estimate in the reward")
"""log policy - log reference -> nats a token, taken from the reward."""
KL_REWARDS.add("k1", kl.k1)
KL_REWARDS.add("k2", kl.k2)
KL_REWARDS.add("k3", kl.k3)
KL_REWARDS.add("abs", kl.absolute)

AGGREGATIONS: Registry[Callable[..., Tensor]] = Registry("loss aggregation")
"""(mask of the whole optimizer step, group_ids, *, all_sum, num_groups, **knobs) -> weights [batch, time]."""
AGGREGATIONS.add("token_mean", aggregation.token_mean_weights)
AGGREGATIONS.add("sequence_mean_token_mean", aggregation.sequence_mean_token_mean_weights)
AGGREGATIONS.add("sequence_mean_token_sum", aggregation.sequence_mean_token_sum_weights)
AGGREGATIONS.add("constant", aggregation.constant_weights)
AGGREGATIONS.add("batch_mean", aggregation.batch_mean_weights)
AGGREGATIONS.add("prompt_mean", aggregation.prompt_mean_weights)

PREFERENCE_LOSSES: Registry[Callable[..., Tensor]] = Registry("preference loss")
"""(PairLogprobs, **knobs) -> losses [pairs]. The knobs are the fields of the loss's config."""
PREFERENCE_LOSSES.add("sigmoid", preference_losses.sigmoid)
PREFERENCE_LOSSES.add("robust", preference_losses.robust)
PREFERENCE_LOSSES.add("ipo", preference_losses.ipo)
PREFERENCE_LOSSES.add("hinge", preference_losses.hinge)
PREFERENCE_LOSSES.add("simpo", preference_losses.simpo)

REWARD_RULES: Registry[Callable[[Any], RewardFunction]] = Registry("reward rule")
"""Config of a rule (training_core/config/rewards.py, by its `kind`) -> reward function. Evaluation uses them too."""
REWARD_RULES.add("length", rules.build_length)
REWARD_RULES.add("regex", rules.build_regex)
REWARD_RULES.add("contains", rules.build_contains)
REWARD_RULES.add("exact_match", matching.build_exact_match)
REWARD_RULES.add("numeric_match", matching.build_numeric_match)
REWARD_RULES.add("math_verify", mathematics.build_math_verify)
REWARD_RULES.add("code_tests", code_tests.build_code_tests)
REWARD_RULES.add("http", remote.build_http)
REWARD_RULES.add("format", matching.build_format)
REWARD_RULES.add("truncation", rules.build_truncation)
REWARD_RULES.add("soft_overlong", rules.build_soft_overlong)
REWARD_RULES.add("repetition", rules.build_repetition)
REWARD_RULES.add("sentiment", rules.build_sentiment)
REWARD_RULES.add("custom", rules.build_custom)


def _vllm(*arguments: Any, **keywords: Any) -> RolloutEngine:
    from training_core.rollout.vllm import VllmEngine

    return VllmEngine(*arguments, **keywords)


def _transformers(*arguments: Any, **keywords: Any) -> RolloutEngine:
    from training_core.rollout.transformers import TransformersEngine

    return TransformersEngine(*arguments, **keywords)


ROLLOUT_ENGINES: Registry[Callable[..., RolloutEngine]] = Registry("rollout engine")
"""(config, model_directory, *, max_prompt_tokens, max_new_tokens, eos_token_ids) -> engine."""
ROLLOUT_ENGINES.add("vllm", _vllm)
ROLLOUT_ENGINES.add("transformers", _transformers)
