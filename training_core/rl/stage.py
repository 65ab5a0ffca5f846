"""Training on the policy's own answers, as stage `policy` runs it: build everything, loop, save, summarise."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training_core.config.algorithms import PolicyStageConfig
from training_core.config.kl import KlInLoss
from training_core.config.online import OnlineConfig
from training_core.config.reward_parts import FixedScale
from training_core.config.rewards import RewardConfig, RewardModelReward
from training_core.data.prompts import read_prompts
from training_core.engines.single import SingleProcessEngine, group_of
from training_core.errors import DataError
from training_core.loop import LoopReport, LoopSettings, run_loop
from training_core.memory import release_free_memory
from training_core.metrics import read_metrics
from training_core.models.chat import encode_prompt
from training_core.models.critic import ValueModel, critic_from_reward_model, new_critic
from training_core.models.loading import (
    checkpoint_dtype,
    load_causal_lm,
    load_tokenizer,
    pad_token_id,
    save_causal_lm,
    training_device,
)
from training_core.models.lora import attach_lora
from training_core.models.moe import is_moe
from training_core.models.recomputation import recompute_layers
from training_core.protocol.context import StageContext
from training_core.protocol.digests import config_digest, weights_digest
from training_core.records import StageOutcome
from training_core.registries import REWARD_RULES
from training_core.rewards.combine import RewardPart, reward_part
from training_core.rewards.model import load_reward_part
from training_core.rl.critic import CriticUpdater
from training_core.rl.reference import build_reference
from training_core.rl.sampling import Prompts, Sampler
from training_core.rl.trainer import PolicyTrainer
from training_core.rl.update import PolicyUpdater, Surroundings
from training_core.rollout.base import RolloutEngine, SamplingSettings
from training_core.rollout.build import build_engine

logger = logging.getLogger(__name__)


def run(context: StageContext, config: PolicyStageConfig) -> StageOutcome:
    """Train, save the policy, and say what came out.

    Raises:
        TidegateError: of the type that says what went wrong; see training_core/errors.py.
    """
    model_directory = context.input_path("model")
    tokenizer = load_tokenizer(model_directory)
    prompts = load_prompts(context.input_path("rl_prompts"), tokenizer)
    engine = build_engine(config.rollout, model_directory, max_prompt_tokens=max(map(len, prompts.token_ids)))
    try:
        return train(context, config, tokenizer, prompts, engine)
    finally:
        engine.close()


def train(
    context: StageContext,
    config: PolicyStageConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    engine: RolloutEngine,
) -> StageOutcome:
    """Train with a given rollout engine and write the output `policy`."""
    algorithm = config.algorithm
    trainer = build_trainer(context, config, tokenizer, prompts, engine)
    warn_of_approximations(algorithm)
    release_free_memory()
    report = run_loop(context, trainer, loop_settings(algorithm))
    model_directory = context.input_path("model")
    save_causal_lm(
        trainer.updater.policy, model_directory, context.new_output("policy"), checkpoint_dtype(model_directory)
    )
    return StageOutcome(
        outputs={"policy": "outputs/policy"}, summary=summarise(context, algorithm, trainer.reference_sha256, report)
    )


def build_trainer(
    context: StageContext,
    config: PolicyStageConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    engine: RolloutEngine,
) -> PolicyTrainer:
    """Return the trainer of a run, before its first step."""
    algorithm, model_directory = config.algorithm, context.input_path("model")
    reference_sha256 = weights_digest(model_directory)
    policy = build_policy(algorithm, model_directory, context.spec.seed)
    updater = build_updater(context, config, policy, pad_token_id(tokenizer))
    sampler = Sampler(
        config=algorithm,
        engine=engine,
        settings=SamplingSettings(config.rollout.max_new_tokens, config.rollout.temperature),
        rewards=[build_reward_part(reward, context, updater.device) for reward in config.rewards],
        tokenizer=tokenizer,
        prompts=prompts,
        seed=context.spec.seed,
        poll=updater.give_up_if_stopped,
    )
    return PolicyTrainer(updater, sampler, reference_sha256, prompts_digest(prompts))


def loop_settings(algorithm: OnlineConfig) -> LoopSettings:
    return LoopSettings(
        num_steps=algorithm.num_steps,
        checkpoint_every_steps=algorithm.checkpoint_every_steps,
        keep_last_checkpoints=algorithm.keep_last_checkpoints,
        phase=algorithm.name,
        keep_best_checkpoints=algorithm.keep_best_checkpoints,
        best_metric="reward/mean",
        sentinels=algorithm.sentinels,
    )


def build_policy(algorithm: OnlineConfig, model_directory: Path, seed: int) -> PreTrainedModel:
    """Return the policy as training starts: float32 weights of the checkpoint, with a new adapter if one is asked
    for."""
    policy: Any = load_causal_lm(model_directory, torch.float32).to(training_device())  # type: ignore[arg-type]
    if algorithm.lora is not None:
        policy = attach_lora(policy, algorithm.lora, seed)
        if is_moe(policy):
            logger.warning("adapters go to linear layers: the experts and routers of %s stay as they are", type(policy))
    if algorithm.gradient_checkpointing:
        recompute_layers(policy)
    return policy  # type: ignore[no-any-return]


def build_updater(context: StageContext, config: PolicyStageConfig, policy: PreTrainedModel, pad: int) -> PolicyUpdater:
    algorithm = config.algorithm
    around = Surroundings(
        temperature=config.rollout.temperature,
        pad_token_id=pad,
        seed=context.spec.seed,
        should_stop=lambda: context.stop.requested,
        max_new_tokens=config.rollout.max_new_tokens,
    )
    return PolicyUpdater(
        algorithm,
        policy,
        build_reference(algorithm, policy),
        build_optimizer(algorithm, policy),
        around,
        build_critic(context, config),
    )


def build_critic(context: StageContext, config: PolicyStageConfig) -> CriticUpdater | None:
    """Return the critic, or None for algorithms without one.

    Raises:
        ConfigurationError: it cannot start from the reward model.
    """
    algorithm, critic = config.algorithm, config.algorithm.critic_config
    if critic is None:
        return None
    directory = context.input_path("model")
    if critic.initialise_from == "policy":
        model = new_critic(directory)
    else:
        (reward,) = [part for part in config.rewards if isinstance(part, RewardModelReward)]
        model = critic_from_reward_model(
            context.input_path("reward_model"),
            directory,
            normalise=reward.normalise,
            weight=reward.weight,
            scale=(reward.scale.mean, reward.scale.std) if isinstance(reward.scale, FixedScale) else (0.0, 1.0),
        )
    model = model.to(training_device())
    if critic.lora is not None:
        model = attach_lora(model, critic.lora, context.spec.seed)
    if algorithm.gradient_checkpointing:
        recompute_layers(model)
    return CriticUpdater(critic, algorithm, model, build_critic_optimizer(algorithm, model))


def prompts_digest(prompts: Prompts) -> str:
    """Return the digest of what the data order runs over: ids and tokens of the prompts, in their order."""
    return config_digest([[row.prompt_id, list(ids)] for row, ids in zip(prompts.rows, prompts.token_ids, strict=True)])


def load_prompts(path: Path, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """Read and tokenize the prompts.

    Raises:
        DataError: there is none.
    """
    rows = read_prompts(path)
    if not rows:
        raise DataError(f"{path} holds no prompt to train on. Look at the data check's report for what was left out")
    return Prompts(rows, [tuple(encode_prompt(tokenizer, row.prompt)) for row in rows])


def warn_of_approximations(algorithm: OnlineConfig) -> None:
    """Say in the log what the config asks for and does not get exactly."""
    if algorithm.updates_per_step > 1 and isinstance(algorithm.kl, KlInLoss) and algorithm.kl.estimator == "k3":
        logger.warning(
            "%d updates a rollout: kl.estimator k3 has the gradient of the forward KL only in the first of them",
            algorithm.updates_per_step,
        )


def build_optimizer(algorithm: OnlineConfig, policy: PreTrainedModel) -> SingleProcessEngine:
    # While the critic warms up, the policy's schedule waits.
    num_updates = (algorithm.num_steps - algorithm.num_warmup_steps) * algorithm.updates_per_step
    group = group_of("policy", policy, algorithm.optimizer.learning_rate)
    return SingleProcessEngine([group], algorithm.optimizer, num_updates, algorithm.autocast)


def build_critic_optimizer(algorithm: OnlineConfig, model: ValueModel) -> SingleProcessEngine:
    critic = algorithm.critic_config
    assert critic is not None
    num_updates = algorithm.num_steps * algorithm.updates_per_step
    group = group_of("critic", model, critic.optimizer.learning_rate)
    return SingleProcessEngine([group], critic.optimizer, num_updates, algorithm.autocast)


def build_reward_part(config: RewardConfig, context: StageContext, device: torch.device) -> RewardPart:
    if isinstance(config, RewardModelReward):
        function = load_reward_part(config, context.input_path("reward_model"), context.input_path("model"), device)
    else:
        function = REWARD_RULES[config.kind](config)
    return reward_part(config, function)


def summarise(
    context: StageContext, algorithm: OnlineConfig, reference_sha256: str, report: LoopReport
) -> dict[str, Any]:
    rows = read_metrics(context.directory.metrics_path)
    return {
        "weights_sha256": weights_digest(context.directory.outputs_path / "policy"),
        "reference_weights_sha256": reference_sha256,
        "num_steps": algorithm.num_steps,
        "num_roll_backs": report.num_roll_backs,
        "best_step": report.best_step,
        "reward_mean_first": rows[0]["reward/mean"],
        "reward_mean_last": rows[-1]["reward/mean"],
    }
