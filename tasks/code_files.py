"""Functions of your own (rewards, an advantage estimator, a loss) are code: their files are inputs of the stages that
call them.

Without that a changed function would find the results of the old one. Modules are found, never imported: a reward
function may import anything. Only the named module's own file counts; what it imports in turn is not looked at.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.config import PipelineConfig
from training_core.errors import ConfigurationError
from training_core.protocol.digests import file_digest
from training_core.records import Artifact


@dataclass(frozen=True)
class CodeFile:
    """A module that the config names with `package.module:function`."""

    dotted: str
    """Where the config names it, e.g. `rewards.0.import_path`."""
    stage: str
    input_name: str
    import_path: str

    def artifact(self) -> Artifact:
        """Return the module's file with its digest.

        Raises:
            ConfigurationError: it cannot be found.
        """
        module = self.import_path.partition(":")[0]
        path = find_module_file(module)
        if path is None:
            raise ConfigurationError(
                f"{self.dotted}: no file of the module {module!r} of {self.import_path!r} was found. It must be a "
                "Python source file in the folder where the command runs, on PYTHONPATH, or in an installed package"
            )
        return Artifact(path=str(path), sha256=file_digest(path))


def code_files(config: PipelineConfig) -> list[CodeFile]:
    """Return the modules with functions of the user's own, for each stage that calls them."""
    places: tuple[tuple[str, str, Sequence[Any]], ...] = (
        ("rewards", "policy", config.rewards),
        ("evaluation.metrics", "evaluate", config.evaluation.metrics),
    )
    found = [
        CodeFile(f"{section}.{index}.import_path", stage, f"code_{part.part_name}", part.import_path)
        for section, stage, parts in places
        for index, part in enumerate(parts)
        if part.kind == "custom"
    ]
    for plug in ("advantage", "loss"):
        part: Any = getattr(config.algorithm, plug, None)
        if part is not None and part.kind == "custom":
            found.append(CodeFile(f"algorithm.{plug}.import_path", "policy", f"code_of_{plug}", part.import_path))
    return found


def digest_code_files(config: PipelineConfig) -> dict[str, Artifact]:
    """Return dotted field -> the module's file as it is here and now.

    Raises:
        ConfigurationError: one cannot be found.
    """
    return {file.dotted: file.artifact() for file in code_files(config)}


def find_module_file(module: str) -> Path | None:
    """Return the source file that `import module` would read in a stage's process, without importing anything.

    A stage runs with the current folder first on its path, as every `python -m` does.
    """
    places: Sequence[str] | None = None
    names = module.split(".")
    for depth in range(1, len(names) + 1):
        spec = _find_spec(".".join(names[:depth]), places)
        if spec is None:
            return None
        places = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
        if places is None and depth < len(names):
            return None
    if spec is None or not spec.has_location or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return Path(spec.origin).absolute()


def _find_spec(name: str, places: Iterable[str] | None) -> importlib.machinery.ModuleSpec | None:
    path = [str(Path.cwd()), *sys.path] if places is None else list(places)
    # A long-lived process (a worker, a test) remembers what folders held; a file may be newer.
    importlib.machinery.PathFinder.invalidate_caches()
    if (spec := importlib.machinery.PathFinder.find_spec(name, path)) is not None:
        return spec
    for finder in sys.meta_path:  # Editable installs bring finders of their own.
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is not None and (spec := find_spec(name, None if places is None else path)) is not None:
            found: importlib.machinery.ModuleSpec = spec
            return found
    return None
