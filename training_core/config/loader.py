"""Config files: YAML 1.2 layers merged left to right, then `path=value` settings; every value remembers its origin.

Dictionaries merge deeply, lists and everything else are replaced by the later layer. Duplicate keys, merge keys and
tags are refused. `training_core.config.problems` turns what pydantic finds into messages with file and line.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from training_core.config.paths import describe_missing
from training_core.config.problems import Problem, describe_problems
from training_core.errors import ConfigurationError

ModelT = TypeVar("ModelT", bound=BaseModel)
DataPath = tuple[str | int, ...]

MERGE_TAG = "tag:yaml.org,2002:merge"
CONFIG_SUFFIXES = (".yaml", ".yml")
PLAIN_TYPES = (str, int, float, bool, type(None))


YAML_ADVICE = {
    r"'\t'": "Indent with spaces, not with tabs",
    "mapping values are not allowed here": "A value that holds `: ` must be in quotes; else look at the indentation",
    "but found another document": "Put one config into a file, without a line of `---` after its start",
    "but got": "A bracket or quote is not closed, on this line or before it",
    "<stream end>": "A bracket or quote is not closed",
    "while scanning": "A quote is not closed",
    "expected <block end>": "Look at the indentation: the fields of one section start in one column",
    "could not find expected ':'": "Write `key: value`, with a space after the colon",
}
"""Part of a YAML library's message -> what to do."""


@dataclass
class ConfigLayer:
    """Values and where each of them was written."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[DataPath, str] = field(default_factory=dict)
    """Path of a key, list item or value -> "file:line", or the setting that gave it."""

    def origin(self, path: DataPath) -> str:
        """Return where `path` was written; for a path that is absent, where the nearest parent was."""
        for length in range(len(path), -1, -1):
            if (found := self.origins.get(path[:length])) is not None:
                return found
        return "config"


def dotted(path: Iterable[str | int]) -> str:
    """Return `a.b.0.c` for a data path.

    >>> dotted(("rewards", 0, "weight"))
    'rewards.0.weight'
    """
    return ".".join(str(part) for part in path)


def load_layer(files: Sequence[Path], settings: Sequence[str] = ()) -> ConfigLayer:
    """Return the values of YAML files merged left to right, then `a.b.c=value` settings; not validated yet.

    Raises:
        ConfigurationError: a file is missing or no YAML, or a setting is malformed.
    """
    merged = ConfigLayer()
    merged.origins[()] = ", ".join(map(str, files)) or "config"
    for file in files:
        merge_layer(merged, read_layer(file))
    for setting in settings:
        apply_setting(merged, setting)
    return merged


def validate_layer(model: type[ModelT], layer: ConfigLayer) -> ModelT:
    """Return `model` with the layer's values.

    Raises:
        ConfigurationError: values are not valid; one message lists every problem with its file and line.
    """
    try:
        return model.model_validate(layer.values)
    except ValidationError as error:
        lines = [_problem_line(layer, problem) for problem in describe_problems(error, model)]
        count = "one problem" if len(lines) == 1 else f"{len(lines)} problems"
        raise ConfigurationError(f"the configuration has {count}:\n  " + "\n  ".join(lines)) from None


def _problem_line(layer: ConfigLayer, problem: Problem) -> str:
    origin, path = layer.origin(problem.path), dotted(problem.path)
    # The path is said once: not after a setting of that path, nor before a text that starts with it.
    said = origin == f"--set {path}" or problem.text.startswith(path)
    return f"{origin}: {problem.text if said else f'{path}: {problem.text}'}"


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of `model` for editors and forms."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}


def read_layer(file: Path) -> ConfigLayer:
    """Read one YAML file whose top level is a mapping; an empty file is an empty layer.

    Raises:
        ConfigurationError: with file and line.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"config file {_unreadable(file, error)}") from None
    root = _compose(text, str(file))
    if root is None:
        return ConfigLayer()
    if not isinstance(root, MappingNode):
        raise ConfigurationError(f"{file}:1: the top level must be `key: value` lines, found {_kind(root)}")
    layer = ConfigLayer()
    layer.values = _convert(root, (), str(file), layer.origins, ())
    return layer


def merge_layer(base: ConfigLayer, over: ConfigLayer) -> None:
    """Merge `over` into `base` in place."""
    _merge_mapping(base, over, base.values, over.values, ())


def _merge_mapping(
    base: ConfigLayer, over: ConfigLayer, into: dict[str, Any], values: dict[str, Any], path: DataPath
) -> None:
    for key, value in values.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            base.origins[here] = over.origin(here)
            _merge_mapping(base, over, into[key], value, here)
            continue
        _forget(base, here)
        into[key] = copy.deepcopy(value)
        base.origins.update({p: origin for p, origin in over.origins.items() if p[: len(here)] == here})


def _forget(layer: ConfigLayer, path: DataPath) -> None:
    for known in [p for p in layer.origins if p[: len(path)] == path]:
        del layer.origins[known]


def apply_setting(layer: ConfigLayer, setting: str, origin: str | None = None) -> None:
    """Apply one `a.b.c=value`; the value is YAML, a number in the path is an index of an existing list.

    Raises:
        ConfigurationError: no `=`, an empty path, an index outside the list, or a step below a plain value.
    """
    text, equals, raw = setting.partition("=")
    parts = text.strip().split(".")
    if not equals or not all(parts):
        raise ConfigurationError(f"--set {setting}: write it as path.to.field=value, for example --set seed=3")
    origin = origin or f"--set {text.strip()}"
    node = _compose(raw, origin)
    container: Any = layer.values
    path: DataPath = ()
    for part in parts[:-1]:
        key = _step(container, part, path, setting)
        path = (*path, key)
        # A section that is absent or null springs into being; its other fields keep their defaults.
        if isinstance(container, dict) and container.get(key) is None:
            container[key] = {}
            layer.origins[path] = origin
        container = container[key]
    key = _step(container, parts[-1], path, setting)
    path = (*path, key)
    _forget(layer, path)
    layer.origins[path] = origin
    container[key] = None if node is None else _convert(node, path, origin, layer.origins, ())


def _step(container: Any, part: str, path: DataPath, setting: str) -> str | int:
    where = dotted(path) or "the top level"
    if isinstance(container, dict):
        return part
    if not isinstance(container, list):
        raise ConfigurationError(f"--set {setting}: {where} is {container!r}, which has no field {part!r} below it")
    if not part.isdigit() or int(part) >= len(container):
        allowed = f"0 to {len(container) - 1}" if container else "none, the list is empty"
        raise ConfigurationError(
            f"--set {setting}: {where} is a list; after it comes an index ({allowed}), not {part!r}. To replace the "
            f"whole list write --set {where}='[...]'"
        )
    return int(part)


def _compose(text: str, origin: str) -> Node | None:
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 2)
    try:
        return reader.compose(text)  # type: ignore[no-any-return]
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = _at(origin, mark.line) if mark is not None else origin
        problem = str(error.problem or error.context)
        advice = next((f". {text}" for start, text in YAML_ADVICE.items() if start in problem), "")
        raise ConfigurationError(f"{where}: not valid YAML: {problem}{advice}") from None
    except YAMLError as error:
        raise ConfigurationError(f"{origin}: not valid YAML: {error}") from None


def _convert(node: Node, path: DataPath, origin: str, origins: dict[DataPath, str], parents: tuple[int, ...]) -> Any:
    """Return plain Python values for a node, noting where each was written."""
    if id(node) in parents:
        raise ConfigurationError(f"{_at(origin, node.start_mark.line)}: {dotted(path)} contains itself")
    origins.setdefault(path, _at(origin, node.start_mark.line))
    parents = (*parents, id(node))
    if isinstance(node, SequenceNode):
        return [_convert(item, (*path, i), origin, origins, parents) for i, item in enumerate(node.value)]
    if isinstance(node, MappingNode):
        return _convert_mapping(node, path, origin, origins, parents)
    return _convert_scalar(node, path, origin)


def _convert_mapping(
    node: MappingNode, path: DataPath, origin: str, origins: dict[DataPath, str], parents: tuple[int, ...]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    lines: dict[str, str] = {}
    for key_node, value_node in node.value:
        where = _at(origin, key_node.start_mark.line)
        if key_node.tag == MERGE_TAG:
            raise ConfigurationError(
                f"{where}: `<<` is not YAML 1.2. Put the common part into a file of its own and "
                "name both files: tidegate run common.yaml this.yaml"
            )
        key = _convert_scalar(key_node, path, origin) if isinstance(key_node, ScalarNode) else None
        if not isinstance(key, str):
            raise ConfigurationError(f"{where}: a key must be plain text, found {key_node.value!r}")
        if key in values:
            raise ConfigurationError(
                f"{where}: {dotted((*path, key))} is given twice, first at {lines[key]}. Keep one of them"
            )
        lines[key] = where
        origins[(*path, key)] = where
        values[key] = _convert(value_node, (*path, key), origin, origins, parents)
    return values


def _convert_scalar(node: Node, path: DataPath, origin: str) -> Any:
    where = _at(origin, node.start_mark.line)
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 2)
    try:
        value = reader.constructor.construct_object(node)
    except (YAMLError, ValueError) as error:
        problem = str(getattr(error, "problem", None) or error)
        if "constructor" in problem:
            tag = str(node.tag).replace("tag:yaml.org,2002:", "!!")
            problem = f"the tag {tag} is not read: write a plain value"
        raise ConfigurationError(f"{where}: {dotted(path)}: {problem}. Text goes in quotes") from None
    if not isinstance(value, PLAIN_TYPES):
        return str(node.value)  # A date or a binary: the text as written, for the field's own check to judge.
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{where}: {dotted(path)} is {node.value}; a number must be finite")
    return value


def _at(origin: str, line: int) -> str:
    return origin if origin.startswith("--") or origin.isupper() else f"{origin}:{line + 1}"


def _kind(node: Node) -> str:
    return "a list" if isinstance(node, SequenceNode) else f"the text {node.value!r}"


def _unreadable(file: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{file} {describe_missing(file, CONFIG_SUFFIXES)}"
    if isinstance(error, IsADirectoryError):
        there = sorted(entry.name for entry in file.iterdir() if entry.name.endswith(CONFIG_SUFFIXES))
        held = f" It holds: {', '.join(there[:5])}." if there else ""
        return f"{file} is a folder.{held} Name a YAML file"
    if isinstance(error, UnicodeDecodeError):
        line = error.object.count(b"\n", 0, error.start) + 1
        return f"{file}:{line} is not UTF-8 text (byte {error.start}). Save it as UTF-8"
    return f"{file} cannot be read: {getattr(error, 'strerror', None) or error}"
