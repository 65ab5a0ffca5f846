"""Rules that span stages: what each stage's own config cannot see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training_core.config.algorithms import PREFERENCE_NAMES, unknown_gold
from training_core.config.online import OnlineConfig
from training_core.config.rewards import rule_conflicts
from training_core.errors import ConfigurationError
from training_core.registry import nearest_name

if TYPE_CHECKING:
    from tasks.config import PipelineConfig
    from training_core.config.base import Config
    from training_core.config.reward_model import RewardModelConfig


def answer_limits(config: PipelineConfig) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return (field that sets it, most tokens of an answer) of RL and of the evaluation."""
    in_rl, in_evaluation = config.rollout.max_new_tokens, config.evaluation.sampling.max_new_tokens
    of_rl = ("rollout.max_new_tokens", in_rl)
    return of_rl, of_rl if in_evaluation is None else ("evaluation.sampling.max_new_tokens", in_evaluation)


def is_online(config: PipelineConfig) -> bool:
    """Return whether the policy learns from answers that it samples, rather than from preferences."""
    return config.algorithm.name not in PREFERENCE_NAMES


def learns_from_feedback(config: PipelineConfig) -> bool:
    """Return whether the policy learns from answers judged one by one, as logged."""
    return config.algorithm.name == "kto" and bool(config.data.feedback)


def find_conflicts(config: PipelineConfig) -> list[str]:
    """Return one message for each pair of sections that do not fit: it starts with the field to change."""
    return [
        *_algorithm_conflicts(config),
        *_reward_model_conflicts(config),
        *_length_conflicts(config),
        *_data_conflicts(config),
        *_gate_conflicts(config),
        *_other(config),
    ]


def _algorithm_conflicts(config: PipelineConfig) -> list[str]:
    """What an algorithm needs of the other sections: rewards, pairs, a reward model to start a critic from."""
    name, found = config.algorithm.name, []
    if is_online(config) and not config.rewards:
        found.append(
            f"rewards is empty, but algorithm.name {name} learns from scores of answers: add at least one, for example "
            "`- kind: reward_model`"
        )
    if config.rewards and all(reward.weight == 0.0 for reward in config.rewards):
        found.append("rewards all have weight 0, so every answer would score the same: give one of them a weight")
    if not is_online(config) and config.rewards:
        found.append(f"rewards are given, but algorithm.name {name} learns from the preferences alone: leave them out")
    if not is_online(config) and not learns_from_feedback(config) and not config.data.preferences:
        found.append(f"data.preferences is empty, but algorithm.name {name} learns from pairs: name a file of pairs")
    if isinstance(config.algorithm, OnlineConfig) and config.rewards:
        problem = unknown_gold(config.algorithm, config.rewards)
        found += [problem] if problem else []
    critic = getattr(config.algorithm, "critic", None)
    if critic is not None and critic.initialise_from == "reward_model":
        models = [(index, reward) for index, reward in enumerate(config.rewards) if reward.kind == "reward_model"]
        if len(models) != 1:
            found.append(
                f"algorithm.critic.initialise_from is reward_model, but {len(models)} of the rewards are of that kind. "
                "Write `initialise_from: policy`, or one reward of kind reward_model"
            )
        for index, reward in models:
            if reward.scale is not None and reward.scale.kind == "running":
                found.append(
                    f"rewards.{index}.scale is running, so the critic could not start in the reward's unit. Write "
                    "algorithm.critic.initialise_from: policy, or a fixed scale"
                )
    return found


def _reward_model_conflicts(config: PipelineConfig) -> list[str]:
    if config.reward_model is not None:
        return _reward_model_needs(config, config.reward_model)
    found = [
        f"rewards.{i} is of kind reward_model, but there is no `reward_model` section. Write one (its "
        "reward_model.optimizer.learning_rate is required), or take a rule as reward"
        for i, reward in enumerate(config.rewards)
        if reward.kind == "reward_model"
    ]
    if config.evaluation.reward_model:
        found.append(
            "evaluation.reward_model is true, but there is no `reward_model` section. Write evaluation.reward_model: "
            "false, or add the section"
        )
    return found


def _reward_model_needs(config: PipelineConfig, reward_model: RewardModelConfig) -> list[str]:
    """What the reward model's loss needs of the data, and rewards of the reward model."""
    found = []
    if reward_model.needs_feedback and not config.data.feedback:
        found.append(
            f"data.feedback is empty, but reward_model.loss.kind {reward_model.loss.kind} learns from answers judged "
            "one by one: name a file of them, or take loss.kind: bradley_terry"
        )
    if not reward_model.needs_feedback and not config.data.preferences:
        found.append(
            "data.preferences is empty, but reward_model.loss.kind bradley_terry learns from pairs: name a file of "
            "them, or take loss.kind: regression on data.feedback"
        )
    for index, reward in enumerate(config.rewards):
        if reward.kind == "reward_model" and reward.disagreement_penalty > 0.0 and reward_model.num_members == 1:
            found.append(
                f"rewards.{index}.disagreement_penalty is {reward.disagreement_penalty}, but one reward model does not "
                "disagree with itself. Write reward_model.num_members: 3, say, or leave the penalty out"
            )
    return found


def _length_conflicts(config: PipelineConfig) -> list[str]:
    found = []
    sections: tuple[tuple[str, Sequence[Config]], ...] = (
        ("rewards", config.rewards),
        ("evaluation.metrics", config.evaluation.metrics),
    )
    for (section, rules), (field, limit) in zip(sections, answer_limits(config), strict=True):
        found += [f"{section}.{index}.{text}" for index, text in rule_conflicts(rules, limit, field)]
    data = config.data
    if data.max_prompt_tokens >= data.max_total_tokens:
        found.append(
            f"data.max_prompt_tokens is {data.max_prompt_tokens}, which leaves no room for an answer within "
            f"data.max_total_tokens = {data.max_total_tokens}: lower the one or raise the other"
        )
    return found


def _data_conflicts(config: PipelineConfig) -> list[str]:
    """What the data checks would refuse only after they have read everything."""
    from data_checks.checks.thresholds import check_names

    found = []
    try:
        check_names(config.data)
        if config.data.languages:  # The detector's module brings numpy and Arrow.
            from data_checks.samples.language import families

            families(config.data.languages)
    except ConfigurationError as error:
        found.append(str(error))
    return found


def _gate_conflicts(config: PipelineConfig) -> list[str]:
    names = config.evaluation.metric_names()
    wanted = {"gate.primary.metric": config.gate.primary.metric}
    wanted.update({f"gate.guards.{i}.metric": guard.metric for i, guard in enumerate(config.gate.guards)})
    found = []
    for field, name in wanted.items():
        if name not in names:
            near = nearest_name(name, names)
            found.append(
                f"{field} is {name!r}, which the evaluation does not measure. Measured are: {', '.join(names)}."
                f"{f' Did you mean {near!r}?' if near else ''} Add it to evaluation.metrics, or name one of these"
            )
    num_prompts = config.evaluation.num_prompts
    if num_prompts is not None and num_prompts < config.gate.min_prompts:
        found.append(
            f"evaluation.num_prompts is {num_prompts}, less than gate.min_prompts = {config.gate.min_prompts}: "
            "evaluate more prompts, or lower gate.min_prompts knowingly"
        )
    return found


def _other(config: PipelineConfig) -> list[str]:
    if config.checkpoint.hub_repository and config.launch.offline:
        return ["checkpoint.source is on the hub, but launch.offline is true: write launch.offline: false"]
    return []
