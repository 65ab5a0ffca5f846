"""From a rollout config to an engine."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, GenerationConfig

from training_core.config.rollout import RolloutConfig
from training_core.errors import ArtifactError, DataError
from training_core.models.chat_setup import eos_ids
from training_core.models.loading import load_tokenizer
from training_core.rollout.base import RolloutEngine


def read_eos_token_ids(model_directory: Path) -> list[int]:
    """Return the tokens that end an answer, sorted: all of generation_config.json, and the tokenizer's own.

    Raises:
        ArtifactError: the checkpoint names none.
    """
    found: set[int] = set()
    if (model_directory / "generation_config.json").is_file():
        found.update(eos_ids(GenerationConfig.from_pretrained(str(model_directory)).eos_token_id))
    if not found:
        found.update(eos_ids(AutoConfig.from_pretrained(str(model_directory), local_files_only=True).eos_token_id))
    found.update(eos_ids(load_tokenizer(model_directory).eos_token_id))
    if not found:
        raise ArtifactError(
            f"{model_directory} names no end-of-answer token. Set eos_token_id in its generation_config.json, or "
            "eos_token in tokenizer_config.json"
        )
    return sorted(found)


def build_engine(
    config: RolloutConfig, model_directory: Path, *, max_prompt_tokens: int, max_new_tokens: int | None = None
) -> RolloutEngine:
    """Start the engine that `config.engine` names on a checkpoint.

    Args:
        config: engine and sampling.
        model_directory: checkpoint of the model.
        max_prompt_tokens: longest prompt it must take.
        max_new_tokens: longest answer; None takes the config's.

    Raises:
        ConfigurationError: the engine is not installed, unknown, or cannot run the model.
        DataError: prompt and answer do not fit the model's context.
    """
    from training_core.registries import ROLLOUT_ENGINES

    num_new = max_new_tokens or config.max_new_tokens
    limit = getattr(
        AutoConfig.from_pretrained(str(model_directory), local_files_only=True), "max_position_embeddings", None
    )
    if limit is not None and max_prompt_tokens + num_new > limit:
        raise DataError(
            f"the longest prompt has {max_prompt_tokens} tokens and answers may have {num_new}, together more than the "
            f"model's {limit}. Lower rollout.max_new_tokens to {max(limit - max_prompt_tokens, 0)}, or leave long "
            "prompts out"
        )
    return ROLLOUT_ENGINES[config.engine](
        config,
        model_directory,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=num_new,
        eos_token_ids=read_eos_token_ids(model_directory),
    )
