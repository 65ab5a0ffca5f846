"""The files from outside that a pipeline reads: found, digested, and taken out of what a config's hash sees.

In a stage's config a path is replaced (by "input", or by its last component, with the input's name in front where two
data files have the same one), so that moving a folder changes no hash: the content's digest stands for the file, and
the stage opens the path that its spec's inputs give.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_checks.config import CheckDataConfig, FeedbackFile, PreferenceFile
from data_checks.files import SUFFIXES, check_file, distinct_names
from tasks.code_files import digest_code_files
from tasks.config import PipelineConfig
from training_core.config.intake import HUB_PREFIX, INPUT
from training_core.config.paths import describe_missing, resolved
from training_core.errors import ConfigurationError, DigestMismatchError
from training_core.models.source_files import check_source, read_template
from training_core.protocol.digests import path_digest
from training_core.records import Artifact

FieldPath = tuple[str | int, ...]
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2", ".txt")


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

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"{self.dotted}: {self.path or repr(self.path)}"

    def check(self, path: Path) -> None:
        """Make the checks of the stage that reads it, as far as they take no time.

        Raises:
            TidegateError: of the type, and with the words, of the stage.
        """
        if self.stage == "check_data":
            check_file(path, self.label)
        elif self.input_name == "chat_template":
            read_template(path)
        else:
            check_source(path)


def external_files(config: PipelineConfig) -> list[ExternalFile]:
    """Return every file from outside, in the order of the stages."""
    found = [
        ExternalFile(("checkpoint", name), "sft_intake", name, path, INPUT)
        for name, path in config.checkpoint.local_inputs().items()
    ]
    return found + _data_files(config.data)


def _data_files(data: CheckDataConfig) -> list[ExternalFile]:
    lists: dict[str, Sequence[PreferenceFile | FeedbackFile]] = {
        "preferences": data.preferences,
        "feedback": data.feedback,
    }
    # Input -> where the config names it, the path there, and the digest that it demands.
    named: dict[str, tuple[FieldPath, str, str | None]] = {
        f"{name}_{index}": (("data", name, index, "path"), file.path, file.sha256)
        for name, files in lists.items()
        for index, file in enumerate(files)
    }
    prompts = {"rl_prompts": data.rl_prompts, "eval_prompts": data.eval_prompts}
    named |= {name: (("data", name), path, None) for name, path in prompts.items() if path is not None}
    portable = distinct_names({name: Path(path).name for name, (_, path, _) in named.items()})
    return [
        ExternalFile(field, "check_data", name, path, portable[name], sha256)
        for name, (field, path, sha256) in named.items()
    ]


def digest_external_files(config: PipelineConfig) -> dict[str, Artifact]:
    """Return dotted field -> absolute path and digest, for every file from outside, modules with rewards included.

    Raises:
        ConfigurationError: a file is missing, cannot be read or is of a kind that no stage reads; the message names the
            field and the nearest file.
        DataError, ArtifactError: the stage that reads it would refuse it at once.
        DigestMismatchError: it is not the file that the config demands.
    """
    files = external_files(config)
    paths = {file.dotted: _checked_path(file) for file in files}  # All of them: a digest of weights takes a while.
    artifacts = {}
    for file in files:
        path = paths[file.dotted]
        try:
            found = path_digest(path)
        except OSError as error:
            raise _unreadable(file, error) from None
        if file.sha256 not in (None, found):
            raise DigestMismatchError(
                f"{file.dotted}: {file.path} has sha256 {found}, the config demands {file.sha256}. Restore it, or "
                f"write the new digest into {file.dotted.removesuffix('path')}sha256"
            )
        artifacts[file.dotted] = Artifact(path=str(path), sha256=found)
    return artifacts | digest_code_files(config)


def _checked_path(file: ExternalFile) -> Path:
    try:
        path = resolved(file.path)
        if not path.exists():
            raise ConfigurationError(_missing(file, path))
        file.check(path)
    except OSError as error:
        raise _unreadable(file, error) from None
    return path


def _unreadable(file: ExternalFile, error: OSError) -> ConfigurationError:
    where = f" ({error.filename})" if error.filename not in (None, file.path) else ""
    return ConfigurationError(f"{file.label} cannot be read: {error.strerror or error}{where}")


def _missing(file: ExternalFile, path: Path) -> str:
    if file.stage == "check_data" and file.path.startswith("hf:"):
        return (
            f"{file.label} is a data set of the Hugging Face hub: `tidegate check` reads it, a run reads files, whose "
            "bytes it can pin. Download one of its files (Parquet, JSONL) and name that"
        )
    is_source = file.input_name == "source"
    suffixes = (".gguf",) if is_source else SUFFIXES if file.stage == "check_data" else TEMPLATE_SUFFIXES
    text = f"{file.label} {describe_missing(path, suffixes, folders=is_source)}"
    if "does not exist" in text and "Did you mean" not in text and not Path(file.path).expanduser().is_absolute():
        text = f"{text.rstrip('.')}. Looked for {path}: paths are relative to the folder where the command runs"
    if is_source and HUB_NAME.fullmatch(file.path) and not file.path.endswith(".gguf"):
        text += (
            f". If it is a repository of the Hugging Face hub, write {HUB_PREFIX}{file.path} and checkpoint.revision"
        )
    return text


def without_folders(config: PipelineConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Return a dump of the whole config in which no path is left."""
    values = copy.deepcopy(values)
    for file in external_files(config):
        _put(values, file.field, file.portable)
    return values


def with_absolute_paths(config: PipelineConfig) -> PipelineConfig:
    """Return the same config for a process that runs in another folder."""
    values = config.model_dump(mode="json")
    values["root"] = str(Path(config.root).expanduser().absolute())
    for file in external_files(config):
        _put(values, file.field, str(resolved(file.path)))
    return PipelineConfig.model_validate(values)


def _put(values: Any, field: FieldPath, value: str) -> None:
    for part in field[:-1]:
        values = values[part]
    values[field[-1]] = value
