"""The files from outside that a pipeline reads: found, digested, and taken out of what a config's hash sees.

In a stage's config a path is replaced (by "input", or by its last component), so that moving a folder changes no hash:
the content's digest stands for the file, and the stage opens the path that its spec's inputs give.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.code_files import digest_code_files
from tasks.config import PipelineConfig
from training_core.config.intake import INPUT
from training_core.errors import ConfigurationError, DigestMismatchError
from training_core.protocol.digests import path_digest
from training_core.records import Artifact
from training_core.registry import nearest_name

FieldPath = tuple[str | int, ...]


@dataclass(frozen=True)
class ExternalFile:
    """A file or folder named in a config."""

    field: FieldPath
    """Where the config names it, e.g. ("data", "preferences", 0, "path")."""
    stage: str
    input_name: str
    path: str
    portable: str
    """What stands for the path in specs and hashes."""
    sha256: str | None = None
    """The digest that the config demands, if it does."""

    @property
    def dotted(self) -> str:
        return ".".join(str(part) for part in self.field)


def external_files(config: PipelineConfig) -> list[ExternalFile]:
    """Return every file from outside, in the order of the stages."""
    found = [
        ExternalFile(("checkpoint", name), "sft_intake", name, path, INPUT)
        for name, path in config.checkpoint.local_inputs().items()
    ]
    for index, file in enumerate(config.data.preferences):
        field = ("data", "preferences", index, "path")
        portable = Path(file.path).name
        found.append(ExternalFile(field, "check_data", f"preferences_{index}", file.path, portable, file.sha256))
    prompts = {"rl_prompts": config.data.rl_prompts, "eval_prompts": config.data.eval_prompts}
    found.extend(
        ExternalFile(("data", name), "check_data", name, path, Path(path).name)
        for name, path in prompts.items()
        if path is not None
    )
    return found


def digest_external_files(config: PipelineConfig) -> dict[str, Artifact]:
    """Return dotted field -> absolute path and digest, for every file from outside, modules with rewards included.

    Raises:
        ConfigurationError: a file is missing or cannot be read; the message names the field and the nearest file.
        DigestMismatchError: it is not the file that the config demands.
    """
    artifacts = {}
    for file in external_files(config):
        path = Path(file.path).expanduser().absolute()
        if not path.exists():
            raise ConfigurationError(_missing(file, path))
        try:
            found = path_digest(path)
        except OSError as error:
            raise ConfigurationError(f"{file.dotted}: {file.path} cannot be read: {error.strerror}") from None
        if file.sha256 not in (None, found):
            raise DigestMismatchError(
                f"{file.dotted}: {file.path} has sha256 {found}, the config demands {file.sha256}. Restore it, or "
                "write the new digest"
            )
        artifacts[file.dotted] = Artifact(path=str(path), sha256=found)
    return artifacts | digest_code_files(config)


def _missing(file: ExternalFile, path: Path) -> str:
    text = f"{file.dotted}: {file.path} does not exist"
    if not Path(file.path).is_absolute():
        text += f" (looked for {path}; paths are relative to the folder where the command runs)"
    parent = path.parent
    if not parent.is_dir():
        return f"{text}. The folder {parent} does not exist either"
    near = nearest_name(path.name, [entry.name for entry in parent.iterdir()])
    return f"{text}.{f' Did you mean {parent / near}?' if near else ''}"


def without_folders(config: PipelineConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Return a dump of the whole config in which no path is left."""
    values = copy.deepcopy(values)
    for file in external_files(config):
        container: Any = values
        for part in file.field[:-1]:
            container = container[part]
        container[file.field[-1]] = file.portable
    return values


def with_absolute_paths(config: PipelineConfig) -> PipelineConfig:
    """Return the same config for a process that runs in another folder."""
    values = config.model_dump(mode="json")
    values["root"] = str(Path(config.root).expanduser().absolute())
    for file in external_files(config):
        container: Any = values
        for part in file.field[:-1]:
            container = container[part]
        container[file.field[-1]] = str(Path(file.path).expanduser().absolute())
    return PipelineConfig.model_validate(values)
