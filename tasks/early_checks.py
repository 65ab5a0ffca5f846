"""What config and first stages show not to fit: said before the data check or the first training, not after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.consistency import answer_limits, is_online
from training_core.errors import ConfigurationError

if TYPE_CHECKING:
    from tasks.planning import ChainState

MIN_PROMPT_ROOM_TOKENS = 8
"""A chat template alone takes about this many tokens: less room than this for a prompt is none."""


def _model_limit(state: ChainState) -> int | None:
    """Return how many tokens the model reads, prompt included: known only after the intake."""
    limit = state.finished["sft_intake"].result.summary.get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


def check_answer_room(state: ChainState) -> None:
    """Refuse answers that leave no room for a prompt, before the data check and all training.

    Raises:
        ConfigurationError: RL or the evaluation asks for longer ones.
    """
    limit = _model_limit(state)
    in_rl, in_evaluation = answer_limits(state.config)
    # An algorithm that learns from preferences samples for the evaluation alone.
    sampled = [in_rl, in_evaluation] if is_online(state.config) else [in_evaluation]
    for field_name, answer in dict(sampled).items():
        if limit is not None and answer + MIN_PROMPT_ROOM_TOKENS > limit:
            raise ConfigurationError(
                f"{field_name} is {answer}, but the model reads at most {limit} tokens, prompt included. Write at most "
                f"{max(1, limit - state.config.data.max_prompt_tokens)} (the limit less data.max_prompt_tokens)"
            )


def check_prompts(state: ChainState) -> None:
    """Refuse what is known only after the data check, and would else be found after all training.

    Raises:
        ConfigurationError: the prompts are too long or too few.
    """
    _check_longest_prompts(state)
    _check_number_of_prompts(state)


def _check_longest_prompts(state: ChainState) -> None:
    limit, config = _model_limit(state), state.config
    summary = state.finished["check_data"].result.summary
    in_rl, in_evaluation = answer_limits(config)
    found = [("longest_rl_prompt_tokens", "RL prompt", in_rl)] if is_online(config) else []
    if config.evaluation.num_prompts is None:  # Else the longest may be one that is not evaluated.
        found.append(("longest_eval_prompt_tokens", "held-out prompt", in_evaluation))
    for key, what, (field_name, answer) in found:
        longest = summary.get(key)
        if limit is not None and isinstance(longest, int) and longest + answer > limit:
            raise ConfigurationError(
                f"the longest {what} has {longest} tokens and {field_name} is {answer}, together more than the {limit} "
                f"that the model reads. Write at most {field_name}: {max(1, limit - longest)}, or a smaller "
                "data.max_prompt_tokens"
            )


def _check_number_of_prompts(state: ChainState) -> None:
    """How many prompts are held out is known only after the data check; the gate would find out after all training."""
    summary, gate = state.finished["check_data"].result.summary, state.config.gate
    advice = (
        "no verdict would be possible. Give more rows in data.eval_prompts (without that file: hold out a larger share "
        "of the pairs), or lower"
    )
    found, groups = summary.get("num_eval_prompts"), summary.get("num_eval_groups")
    if isinstance(found, int) and found < gate.min_prompts:
        raise ConfigurationError(
            f"the data give {found} held-out prompts, but gate.min_prompts is {gate.min_prompts}: {advice} "
            "gate.min_prompts knowingly"
        )
    if isinstance(groups, int) and groups < gate.min_clusters:
        raise ConfigurationError(
            f"the {found} held-out prompts come in {groups} groups of the same prompt, but gate.min_clusters is "
            f"{gate.min_clusters}: {advice} gate.min_clusters knowingly"
        )
