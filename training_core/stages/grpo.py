"""Stage `grpo`: train a policy by group relative policy optimisation. docs/stages.md has inputs and outputs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from training_core.config.algorithms import GrpoConfig, GrpoStageConfig, KlInLoss, NoKl
from training_core.config.rewards import RewardConfig, RewardModelReward
from training_core.data.prompts import read_prompts
from training_core.determinism import make_deterministic
from training_core.engines.single import SingleProcessEngine, group_of
from training_core.errors import DataError
from training_core.loop import LoopSettings, run_loop
from training_core.memory import release_free_memory
from training_core.metrics import read_metrics
from training_core.models.chat import encode_prompt
from training_core.models.loading import (
    DTYPES,
    load_causal_lm,
    load_tokenizer,
    pad_token_id,
    save_causal_lm,
    training_device,
)
from training_core.protocol.context import StageContext
from training_core.protocol.digests import weights_digest
from training_core.records import StageOutcome
from training_core.registries import REWARD_RULES
from training_core.rewards.combine import RewardPart
from training_core.rewards.model import load_reward_part
from training_core.rollout.base import RolloutEngine, SamplingSettings
from training_core.rollout.build import build_engine
from training_core.stages.grpo_step import GrpoTrainer, Prompts
from training_core.stages.grpo_update import GrpoUpdater
from training_core.stages.policy_forward import Precision, frozen_copy

logger = logging.getLogger(__name__)


def run(context: StageContext) -> StageOutcome:
    """Train, save the policy, and say what came out.

    Raises:
        TidegateError: of the type that says what went wrong; see training_core/errors.py.
    """
    make_deterministic()
    config = GrpoStageConfig.model_validate(context.spec.config)
    model_directory = context.input_path("model")
    tokenizer = load_tokenizer(model_directory)
    prompts = load_prompts(context.input_path("rl_prompts"), tokenizer)
    sampler = build_engine(config.rollout, model_directory, max_prompt_tokens=max(map(len, prompts.token_ids)))
    try:
        return train(context, config, tokenizer, prompts, sampler)
    finally:
        sampler.close()


def train(
    context: StageContext,
    config: GrpoStageConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    sampler: RolloutEngine,
) -> StageOutcome:
    """Train with a given sampler and write the output `policy`."""
    algorithm, model_directory = config.algorithm, context.input_path("model")
    device = training_device()
    reference_sha256 = weights_digest(model_directory)
    policy = load_causal_lm(model_directory, torch.float32).to(device)  # type: ignore[arg-type]
    updater = GrpoUpdater(
        algorithm,
        policy,
        build_reference(algorithm, policy),
        build_optimizer(algorithm, policy),
        temperature=config.rollout.temperature,
        pad_token_id=pad_token_id(tokenizer),
        seed=context.spec.seed,
        should_stop=lambda: context.stop.requested,
    )
    trainer = GrpoTrainer(
        updater,
        sampler,
        SamplingSettings(config.rollout.max_new_tokens, config.rollout.temperature),
        [build_reward_part(reward, context, device) for reward in config.rewards],
        tokenizer,
        prompts,
        reference_sha256,
    )
    settings = LoopSettings(
        num_steps=algorithm.num_steps,
        checkpoint_every_steps=algorithm.checkpoint_every_steps,
        keep_last_checkpoints=algorithm.keep_last_checkpoints,
        phase="grpo",
    )
    warn_of_approximations(updater)
    release_free_memory()
    run_loop(context, trainer, settings)
    save_causal_lm(policy, model_directory, context.new_output("policy"), checkpoint_dtype(model_directory))
    return StageOutcome(outputs={"policy": "outputs/policy"}, summary=summarise(context, algorithm, reference_sha256))


def load_prompts(path: Path, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """Read and tokenize the prompts.

    Raises:
        DataError: there is none.
    """
    rows = read_prompts(path)
    if not rows:
        raise DataError(f"{path} holds no prompt to train on. Look at the data check's report for what was left out")
    return Prompts(rows, [tuple(encode_prompt(tokenizer, row.prompt)) for row in rows])


def build_reference(algorithm: GrpoConfig, policy: PreTrainedModel) -> PreTrainedModel | None:
    """Return the frozen reference, or None when nothing asks for a KL.

    Args:
        algorithm: its knobs.
        policy: as it starts: before a checkpoint of the training is loaded into it.
    """
    if isinstance(algorithm.kl, NoKl) and not algorithm.kl.measure:
        return None
    return frozen_copy(policy, Precision(algorithm.autocast, policy.device))


def warn_of_approximations(updater: GrpoUpdater) -> None:
    """Say in the log what the config asks for and does not get exactly."""
    algorithm, model = updater.config, type(updater.policy).__name__
    if algorithm.share_prompt and not updater.shares_prompts:
        logger.warning(
            "share_prompt is left off: %s has layers other than full attention, whose result would change", model
        )
    if algorithm.updates_per_step > 1 and isinstance(algorithm.kl, KlInLoss) and algorithm.kl.estimator == "k3":
        logger.warning(
            "%d updates a rollout: kl.estimator k3 has the gradient of the forward KL only in the first of them",
            algorithm.updates_per_step,
        )


def build_optimizer(algorithm: GrpoConfig, policy: PreTrainedModel) -> SingleProcessEngine:
    num_updates = algorithm.num_steps * algorithm.updates_per_step
    group = group_of("policy", policy, algorithm.optimizer.learning_rate)
    return SingleProcessEngine([group], algorithm.optimizer, num_updates, algorithm.autocast)


def build_reward_part(config: RewardConfig, context: StageContext, device: torch.device) -> RewardPart:
    if isinstance(config, RewardModelReward):
        function = load_reward_part(config, context.input_path("reward_model"), context.input_path("model"), device)
    else:
        function = REWARD_RULES[config.kind](config)
    return RewardPart(config.part_name, config.weight, function)


def checkpoint_dtype(model_directory: Path) -> torch.dtype:
    """Return the dtype of a checkpoint's weights, so that an untrained policy is saved as the same bytes."""
    config: Any = AutoConfig.from_pretrained(str(model_directory), local_files_only=True)
    return config.dtype if isinstance(config.dtype, torch.dtype) else DTYPES[str(config.dtype or "float32")]


def summarise(context: StageContext, algorithm: GrpoConfig, reference_sha256: str) -> dict[str, Any]:
    rows = read_metrics(context.directory.metrics_path)
    return {
        "weights_sha256": weights_digest(context.directory.outputs_path / "policy"),
        "reference_weights_sha256": reference_sha256,
        "num_steps": algorithm.num_steps,
        "reward_mean_first": rows[0]["reward/mean"],
        "reward_mean_last": rows[-1]["reward/mean"],
    }
