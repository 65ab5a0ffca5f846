"""From config files to a `PipelineConfig`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tasks.config import DEFAULT_ROOT, ROOT_VARIABLE, PipelineConfig
from training_core.config.loader import json_schema, load_layer, validate_layer

__all__ = ["load_pipeline", "pipeline_schema", "resolve_root"]


def load_pipeline(files: Sequence[Path], settings: Sequence[str] = (), root: Path | None = None) -> PipelineConfig:
    """Return the config from files merged left to right, then `path=value` settings, then the root.

    Raises:
        ConfigurationError: with file, line and path of every problem.
    """
    layer = load_layer(files, settings)
    if root is not None:
        layer.values["root"] = str(root)
        layer.origins[("root",)] = "--root"
    elif (from_environment := os.environ.get(ROOT_VARIABLE)) is not None:
        layer.values["root"] = from_environment
        layer.origins[("root",)] = ROOT_VARIABLE
    return validate_layer(PipelineConfig, layer)


def resolve_root(root: Path | None) -> Path:
    """Return the root for commands that read no config: `--root`, TIDEGATE_ROOT, or .tidegate."""
    return (root or Path(os.environ.get(ROOT_VARIABLE, DEFAULT_ROOT))).expanduser().absolute()


def pipeline_schema() -> dict[str, object]:
    """Return the JSON schema of the config, for editors."""
    return json_schema(PipelineConfig)
