"""What in an algorithm's config does not go together: settings that would do nothing, or other than they say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from training_core.config.kl import AdaptiveCoefficient, KlInLoss, KlInReward, NoKl

if TYPE_CHECKING:
    from training_core.config.online import OnlineConfig


def first_conflict(config: OnlineConfig) -> str | None:
    """Return what is wrong and what to do, or None."""
    checks = (_groups, _dynamic_sampling, _old_answers, _ratios, _kl, _critic, _experts, _sentinels)
    return next((problem for check in checks for problem in check(config)), None)


def _groups(config: OnlineConfig) -> Iterator[str]:
    if config.num_minibatches > config.prompts_per_step:
        yield (
            f"num_minibatches ({config.num_minibatches}) must be at most prompts_per_step "
            f"({config.prompts_per_step}): groups are not split"
        )
    if config.advantage.needs_groups and config.group_size < 2:
        yield (
            f"group_size is {config.group_size}, but advantage.kind {config.advantage.kind} compares the answers to a "
            "prompt with each other. Write at least 2"
        )
    answers = config.prompts_per_step * config.group_size
    if config.advantage.kind == "reinforce_plus_plus" and answers < 2:
        yield "a step has one answer, and what is whitened alone is 0: raise prompts_per_step or group_size"


def _dynamic_sampling(config: OnlineConfig) -> Iterator[str]:
    if config.dynamic_sampling is None:
        return
    if config.group_size < 2:
        yield "dynamic_sampling looks at differences within a group: group_size must be at least 2"
    if not config.advantage.is_relative:
        yield (
            f"dynamic_sampling leaves out groups of equal scores, but advantage.kind {config.advantage.kind} compares "
            "with something else than the group, so they teach something: leave dynamic_sampling out"
        )
    if isinstance(config.kl, KlInReward):
        yield (
            "dynamic_sampling leaves out groups of equal scores, in which the KL in the reward would still count: take "
            "kl.placement: loss, or leave dynamic_sampling out"
        )


def _old_answers(config: OnlineConfig) -> Iterator[str]:
    """What is right only while the policy is the one that sampled."""
    if config.updates_per_step > 1:
        why = (
            f"num_epochs ({config.num_epochs}) times num_minibatches ({config.num_minibatches}) makes "
            f"{config.updates_per_step}"
        )
    elif config.replay is not None:
        why = "replay brings answers of older weights"
    else:
        return
    if isinstance(config.kl, KlInLoss) and config.kl.needs_one_update:
        yield (
            f"kl.estimator {config.kl.estimator} has the gradient of the reverse KL only with one update a rollout, "
            f"and {why}. Set kl.estimator: k3_ratio, which corrects for the policy having moved"
        )
    if not config.loss.corrects_for_movement:
        yield (
            f"loss.kind {config.loss.kind} is right only while the policy is the one that sampled, and {why}. Choose "
            "a loss with a ratio: clipped_surrogate, or importance_weighted in `name: custom`"
        )
    if config.replay is not None and config.advantage.needs_critic:
        yield (
            "replay brings answers of older weights, and advantage.kind gae takes their rewards for those of the "
            "policy of now: leave replay out"
        )


def _ratios(config: OnlineConfig) -> Iterator[str]:
    if config.loss.is_per_answer and config.advantage.is_per_token:
        yield (
            f"loss.kind {config.loss.kind} has one ratio for an answer, but advantage.kind {config.advantage.kind} "
            "gives each token its own. Take gspo_token or clipped_surrogate"
        )
    correction = config.importance_correction
    if config.loss.is_per_answer and correction is not None and correction.level == "token":
        yield (
            f"loss.kind {config.loss.kind} has one ratio for an answer, whose tokens importance_correction.level token "
            "would weigh apart without effect on their gradients. Write level: sequence"
        )


def _kl(config: OnlineConfig) -> Iterator[str]:
    controller = getattr(config.kl, "controller", None)
    answers = config.max_answers_per_step
    if isinstance(controller, AdaptiveCoefficient) and answers >= 5 * controller.horizon_answers:
        yield (
            f"kl.controller.horizon_answers is {controller.horizon_answers}, but a step may have {answers} answers: "
            f"the coefficient could reach 0 in one step. Write at least {answers // 5 + 1}"
        )
    discount = getattr(config.advantage, "discount", 1.0)
    if isinstance(config.kl, KlInReward) and config.kl.objective == "reverse" and discount < 1.0:
        yield (
            f"advantage.discount is {discount}, and a discounted KL in the reward is no longer the reverse KL. Write "
            "discount: 1.0, or kl.objective: penalty"
        )


def _critic(config: OnlineConfig) -> Iterator[str]:
    critic = config.critic_config
    if config.advantage.needs_critic and critic is None:
        yield "advantage.kind gae reads a critic's values: give `critic`"
    if critic is not None and not config.advantage.needs_critic:
        yield f"critic is given, but advantage.kind {config.advantage.kind} reads no values. Leave it out, or take gae"
    if critic is not None and critic.warmup_steps >= config.num_steps:
        yield (
            f"critic.warmup_steps is {critic.warmup_steps}, so that in {config.num_steps} steps (num_steps) the policy "
            "would never learn"
        )


def _experts(config: OnlineConfig) -> Iterator[str]:
    if config.experts is not None and config.lora is not None and config.experts.auxiliary_coefficient > 0.0:
        yield (
            "experts.auxiliary_coefficient balances routers, which take no adapter and stay as they are with lora: "
            "write auxiliary_coefficient: 0, or train all weights"
        )


def _sentinels(config: OnlineConfig) -> Iterator[str]:
    budget = config.sentinels.kl_budget
    has_limit = budget.limit_nats_per_token is not None or budget.limit_nats_per_answer is not None
    is_measured = not isinstance(config.kl, NoKl) or config.kl.measure
    if budget.action != "off" and has_limit and not is_measured:
        yield (
            "sentinels.kl_budget has a limit, but no KL is measured: write kl: {placement: none, measure: true}, or "
            "give the KL a place"
        )
    factors = config.sentinels.roll_back
    only_kl = factors.learning_rate_factor == 1.0
    if config.sentinels.may_roll_back and only_kl and isinstance(config.kl, NoKl):
        yield (
            "sentinels.roll_back changes the KL's coefficient alone, and there is no KL: the same steps would follow "
            "again. Write a learning_rate_factor below 1"
        )
