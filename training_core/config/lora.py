"""Low-rank adapters: which part of a model is trained, and how large it is."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from training_core.config.base import Config


class LoraConfig(Config):
    """Train low-rank adapters and leave the checkpoint's own weights as they are (Hu et al. 2021, arXiv 2106.09685).

    An adapted matrix W becomes W + scale * B A with B = 0 at the start. There is no dropout: the ratio of new to old
    probabilities would then measure its noise, and at the start the policy would differ from its reference.
    """

    rank: int = Field(default=16, ge=1)
    """Columns of B and rows of A: the rank of the change to each matrix. Default: 16; a policy gradient carries a few
    bits an answer, for which small ranks are enough (Schulman et al. 2025, "LoRA Without Regret")."""
    alpha: float = Field(default=32.0, gt=0.0)
    """Strength of the adapters: scale = alpha / rank. Default: 32 (same source)."""
    target_modules: Literal["all_linear"] | list[str] = "all_linear"
    """Linear layers of the decoder that get an adapter: all of them, or those with these names (the last part of the
    module's path, `q_proj` say). The output head and the embeddings never do, nor a mixture's experts and routers.
    Default: all_linear; adapters on attention alone learn worse (same source)."""
    rank_stabilised: bool = False
    """Take scale = alpha / sqrt(rank), so that a large rank does not shrink what it learns (Kalajdzievski 2023, arXiv
    2312.03732). Default: false, the scale of the first paper."""

    @field_validator("target_modules")
    @classmethod
    def _has_a_target(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list) and (not value or len(set(value)) != len(value) or "" in value):
            raise ValueError(
                f"target_modules must be all_linear or a list of different names, at least one, got {value}"
            )
        return value

    @property
    def scale(self) -> float:
        """Factor of B A.

        >>> LoraConfig(rank=16, alpha=32.0).scale, LoraConfig(rank=16, alpha=32.0, rank_stabilised=True).scale
        (2.0, 8.0)
        """
        divisor: float = float(self.rank) ** 0.5 if self.rank_stabilised else float(self.rank)
        return self.alpha / divisor
