"""Config of the stage `sft_intake`."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from training_core.config.base import Config

HUB_PREFIX = "hub:"
INPUT = "input"
"""Stands in a stage's spec for a local path, which is an input with a digest there."""


class IntakeConfig(Config):
    """Where the SFT checkpoint comes from and how it is stored."""

    source: str = Field(min_length=1)
    """A Hugging Face folder (config, tokenizer, *.safetensors), a .gguf file, or `hub:owner/name` for a repository of
    the Hugging Face hub (needs `revision`)."""
    revision: str | None = None
    """Commit of the hub repository, 40 hex digits: a branch could change between two runs. Only with `hub:`."""
    dtype: Literal["source", "float32", "bfloat16"] = "source"
    """Type of the stored weights. Default: as in the source; a GGUF file, whose weights are packed, becomes bfloat16.
    Training uses float32 master weights whatever this is."""
    chat_template: str | None = None
    """File with a Jinja chat template, in place of the checkpoint's own."""

    @model_validator(mode="after")
    def check_source(self) -> IntakeConfig:
        if self.hub_repository is None:
            if self.revision is not None:
                raise ValueError(f"revision belongs to a source that starts with {HUB_PREFIX!r}; drop it for a path")
            return self
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.hub_repository):
            raise ValueError(f"source must look like {HUB_PREFIX}owner/name, got {self.source!r}")
        if self.revision is None or not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            given = "none is given" if self.revision is None else f"got {self.revision!r}"
            raise ValueError(f"source {self.source!r} needs revision: the repository's commit, 40 hex digits; {given}")
        return self

    @property
    def hub_repository(self) -> str | None:
        """`owner/name` of a hub source, None for a local one."""
        return self.source.removeprefix(HUB_PREFIX) if self.source.startswith(HUB_PREFIX) else None

    def local_inputs(self) -> dict[str, str]:
        """Return the local paths this config names, keyed as the stage's inputs: `source`, `chat_template`."""
        inputs = {} if self.hub_repository else {"source": self.source}
        return inputs | ({"chat_template": self.chat_template} if self.chat_template else {})
