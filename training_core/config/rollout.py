"""How answers are sampled: the engine and its knobs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from training_core.config.base import Config


class _Sampling(Config):
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer in tokens, the end-of-turn token included. Default: TRL's `max_completion_length`."""
    temperature: float = Field(default=1.0, gt=0.0, le=10.0)
    """Divides the logits before sampling. Log-probabilities in training are taken at the same temperature, so that the
    policy that is trained is the one that was sampled; there is no top-p or top-k, which would break that. Default: 1,
    the model's own distribution."""


class VllmRolloutConfig(_Sampling):
    """vLLM inside the training process; its weights are replaced before each rollout."""

    engine: Literal["vllm"]
    """Chooses this engine: vLLM."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Number format of the engine's weights and activations. Default: bfloat16, as in training with autocast."""
    kv_cache_gib: float = Field(default=1.0, gt=0.0)
    """Memory for keys and values in GiB. Default: 1, which holds about 45,000 tokens of a 135 M-parameter Llama."""
    max_num_sequences: int = Field(default=128, ge=1)
    """Most answers sampled at the same time. Default: 128, enough for a whole step of the examples."""


class TransformersRolloutConfig(_Sampling):
    """A plain sampling loop over a transformers model: slower, without a compiled extension."""

    engine: Literal["transformers"]
    """Chooses this engine: a sampling loop over transformers."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Number format of the engine's weights and activations. Default: bfloat16, as in training with autocast."""
    max_num_sequences: int = Field(default=32, ge=1)
    """Answers sampled in one batch. Default: 32, four groups of eight."""


RolloutConfig = Annotated[VllmRolloutConfig | TransformersRolloutConfig, Field(discriminator="engine")]
