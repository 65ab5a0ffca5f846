"""How token losses become one number; each variant says who gets more weight."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from training_core.config.base import Config


class TokenMean(Config):
    """Every token of the optimizer step weighs the same (DAPO, arXiv 2503.14476, equation 12): long answers weigh
    more."""

    kind: Literal["token_mean"] = "token_mean"
    """Chooses this variant: the mean over all tokens."""


class SequenceMeanTokenMean(Config):
    """Every answer weighs the same, and every token within it (GRPO, arXiv 2402.03300, equation 3): tokens of short
    answers weigh more."""

    kind: Literal["sequence_mean_token_mean"] = "sequence_mean_token_mean"
    """Chooses this variant: the mean over answers of the mean over tokens."""


class SequenceMeanTokenSum(Config):
    """The mean over answers of the sum over tokens, the policy gradient of whole answers: long answers weigh more."""

    kind: Literal["sequence_mean_token_sum"] = "sequence_mean_token_sum"
    """Chooses this variant: the mean over answers of the sum over tokens."""


class ConstantNormaliser(Config):
    """The sum over tokens, divided by answers times a constant (Dr. GRPO, arXiv 2503.20783): long answers weigh more,
    and the step's size does not depend on how long they were."""

    kind: Literal["constant"] = "constant"
    """Chooses this variant: the sum over tokens, divided by a constant."""
    num_tokens: int | None = Field(default=None, ge=1)
    """The constant, in tokens. Default: the token limit, `rollout.max_new_tokens`, as in Dr. GRPO."""


class BatchMean(Config):
    """As `sequence_mean_token_mean`, but divided by all answers of the step, those left out too: a step with many
    masked answers moves less."""

    kind: Literal["batch_mean"] = "batch_mean"
    """Chooses this variant: the mean over all answers, with or without counted tokens."""


class PromptMean(Config):
    """Every prompt weighs the same, and every token of its answers: tokens of prompts with short answers weigh more."""

    kind: Literal["prompt_mean"] = "prompt_mean"
    """Chooses this variant: the mean over prompts of the mean over their answers' tokens."""


AggregationConfig = Annotated[
    TokenMean | SequenceMeanTokenMean | SequenceMeanTokenSum | ConstantNormaliser | BatchMean | PromptMean,
    Field(discriminator="kind"),
]
