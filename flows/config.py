"""From config files to a `PipelineConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tasks.config import PipelineConfig
from tasks.mlflow_store import locate_store
from tasks.roots import ROOT_VARIABLE, check_expressible, resolve_root, root_from_environment, usable_root
from training_core.config.loader import json_schema, load_layer, validate_layer
from training_core.errors import ConfigurationError

__all__ = ["load_pipeline", "pipeline_schema", "resolve_root"]


def load_pipeline(
    files: Sequence[Path], settings: Sequence[str] = (), root: str | Path | None = None
) -> PipelineConfig:
    """Return the config from files merged left to right, then `path=value` settings, then the root.

    What can be refused without work is refused here, before anything is written: a root that is no folder, a store
    that MLflow does not take, a password in the store's address.

    Raises:
        ConfigurationError: with file, line and path of every problem.
    """
    # Before anything quotes them; the words of a config file are UTF-8 text.
    for text in (*settings, *([] if root is None else [root])):
        check_expressible(text)
    try:
        layer = load_layer(files, settings)
    except RecursionError:
        names = ", ".join(map(str, files))
        raise ConfigurationError(f"config {names}: brackets or indentation are nested too deeply to be read") from None
    if root is not None:
        layer.values["root"] = str(root)
        layer.origins[("root",)] = "--root"
    elif (from_environment := root_from_environment()) is not None:
        layer.values["root"] = from_environment
        layer.origins[("root",)] = ROOT_VARIABLE
    config = validate_layer(PipelineConfig, layer)
    where = usable_root(config.root)
    locate_store(config.tracking, where)
    # `~` means the same here as for the commands that only read; `..` would be in every path that is shown.
    is_plain = not config.root.startswith("~") and ".." not in Path(config.root).parts
    return config if is_plain else config.model_copy(update={"root": str(where)})


def pipeline_schema() -> dict[str, object]:
    """Return the JSON schema of the config, for editors."""
    return json_schema(PipelineConfig)
