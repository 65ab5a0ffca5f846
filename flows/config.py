"""From config files to a `PipelineConfig`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tasks.config import DEFAULT_ROOT, ROOT_VARIABLE, PipelineConfig
from tasks.mlflow_store import locate_store
from training_core.config.loader import json_schema, load_layer, validate_layer
from training_core.errors import ConfigurationError

__all__ = ["load_pipeline", "pipeline_schema", "resolve_root"]


def load_pipeline(files: Sequence[Path], settings: Sequence[str] = (), root: Path | None = None) -> PipelineConfig:
    """Return the config from files merged left to right, then `path=value` settings, then the root.

    What can be refused without work is refused here, before anything is written: a root that is no folder, a store
    that MLflow does not take, a password in the store's address.

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
    config = validate_layer(PipelineConfig, layer)
    locate_store(config.tracking, usable_root(Path(config.root)))
    return config


def resolve_root(root: Path | None) -> Path:
    """Return the root for commands that read no config: `--root`, TIDEGATE_ROOT, or .tidegate."""
    return usable_root(root or Path(os.environ.get(ROOT_VARIABLE, DEFAULT_ROOT)))


def usable_root(root: Path) -> Path:
    """Return `root` as an absolute path.

    Raises:
        ConfigurationError: something that is no folder lies there, or on the way.
    """
    path = root.expanduser().absolute()
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise ConfigurationError(
                f"root {path} cannot be a folder: {part} is a file. Name a folder, or a place where one can be made "
                "(--root, TIDEGATE_ROOT or `root` in the config)"
            )
    return path


def pipeline_schema() -> dict[str, object]:
    """Return the JSON schema of the config, for editors."""
    return json_schema(PipelineConfig)
