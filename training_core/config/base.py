"""The base of every config model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Frozen, strict about types (a number written as text is refused), no unknown keys.

    A string under a field is its description: it becomes the JSON schema, the command's help and Prefect's form.
    Paths are plain strings, relative to the folder where the command runs.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
