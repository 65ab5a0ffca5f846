"""Where the packages read fields of config models, found by mypy's types and not by names alone.

A field counts as read where `config.field` (or `getattr(config, "field", ...)`) stands in code that itself is used:
a validator's reading does not count, and that of a config's own property or method only when something reads those.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mypy import build, nodes
from mypy.modulefinder import BuildSource
from mypy.options import Options
from mypy.types import Instance, TypeType, TypeVarType, UnionType, get_proper_type

VALIDATORS = ("field_validator", "model_validator")
PACKAGES = ("flows", "tasks", "training_core", "data_checks")

REFERENCES = frozenset({"node", "info", "original_def", "analyzed", "callee_node"})
"""Attributes of mypy's nodes that lead elsewhere in the program, not down the tree."""

Member = tuple[str, str]
"""(full name of a class, name of its field, property or method)."""


@dataclass(frozen=True)
class Read:
    member: Member
    within: Member | None
    """The config's own method that does it; None elsewhere."""


def sources_of(root: Path) -> list[BuildSource]:
    """Return the modules of the packages below `root`."""
    found = []
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(BuildSource(str(path), module, None))
    return found


def reads_in(sources: Sequence[BuildSource], configs: Iterable[str]) -> list[Read]:
    """Return every read of a member of the classes `configs` (full names) in the sources."""
    options = Options()
    options.export_types = options.preserve_asts = options.check_untyped_defs = True
    options.ignore_missing_imports = options.ignore_errors = True
    options.follow_imports = "skip"
    # What `Model.model_validate` returns is known only with pydantic's own types.
    options.per_module_options = {"pydantic.*": {"follow_imports": "silent"}, "pydantic": {"follow_imports": "silent"}}
    options.process_error_codes(error_callback=lambda message: None)
    options.incremental = False
    options.cache_dir = "/dev/null"
    options.python_version = (3, 11)
    result = build.build(list(sources), options)
    finder = _Finder(result.types, frozenset(configs))
    for source in sources:
        finder.visit(result.files[source.module])
    return finder.reads


class _Finder:
    """Walks mypy's trees by their attributes: its compiled visitors cannot be inherited from."""

    def __init__(self, types: dict[nodes.Expression, Any], configs: frozenset[str]) -> None:
        self.types = types
        self.configs = configs
        self.reads: list[Read] = []
        self.seen: set[int] = set()

    def visit(self, node: nodes.Node, owner: str | None = None, within: Member | None = None) -> None:
        """Look at a node and below: `owner` is the class around it, `within` the config's method around it."""
        if id(node) in self.seen:
            return
        self.seen.add(id(node))
        if isinstance(node, nodes.Decorator) and any(_name(d) in VALIDATORS for d in node.original_decorators):
            return
        if isinstance(node, nodes.ClassDef):
            owner, within = node.fullname, None
        elif isinstance(node, nodes.FuncDef) and within is None and owner in self.configs:
            within = (str(owner), node.name)
        elif isinstance(node, nodes.MemberExpr):
            self.add(node.expr, node.name, within)
        elif isinstance(node, nodes.CallExpr) and _name(node.callee) == "getattr":
            owner_node, name_node = node.args[:2]
            if isinstance(name_node, nodes.StrExpr):
                self.add(owner_node, name_node.value, within)
        for child in _children(node):
            self.visit(child, owner, within)

    def add(self, owner: nodes.Expression, name: str, within: Member | None) -> None:
        found = [fullname for fullname in _classes(self.types.get(owner)) if fullname in self.configs]
        self.reads += [Read((fullname, name), within) for fullname in found]


@functools.cache
def _attributes(kind: type) -> list[str]:
    members = {name: value for base in kind.__mro__ for name, value in vars(base).items()}
    return [name for name, value in members.items() if inspect.isgetsetdescriptor(value) and name not in REFERENCES]


def _children(node: nodes.Node) -> Iterable[nodes.Node]:
    values: list[Any] = []
    for name in _attributes(type(node)):
        with contextlib.suppress(AssertionError):  # A property of a node that has no such thing.
            values.append(getattr(node, name, None))
    while values:
        value = values.pop()
        if isinstance(value, list | tuple):
            values.extend(value)
        elif isinstance(value, nodes.Statement | nodes.Expression | nodes.Argument | nodes.FuncItem | nodes.Decorator):
            yield value


def _name(node: nodes.Expression) -> str:
    if isinstance(node, nodes.CallExpr):
        return _name(node.callee)
    return node.name if isinstance(node, nodes.NameExpr | nodes.MemberExpr) else ""


def _classes(found: Any) -> Iterable[str]:
    """Yield the full names of the classes that a type stands for."""
    if found is None:
        return
    proper = get_proper_type(found)
    if isinstance(proper, Instance):
        yield proper.type.fullname
    elif isinstance(proper, UnionType):
        for item in proper.items:
            yield from _classes(item)
    elif isinstance(proper, TypeVarType):
        yield from _classes(proper.upper_bound)
    elif isinstance(proper, TypeType):
        yield from _classes(proper.item)


def used_members(reads: Sequence[Read], families: dict[str, set[str]]) -> set[Member]:
    """Return the members that are read by code which is used.

    Args:
        reads: all reads.
        families: class -> the class itself, its config ancestors and descendants. What is read of one of them is read
            of all of them that have it.
    """
    used: set[Member] = set()
    while True:
        found = {
            (relative, read.member[1])
            for read in reads
            if read.within is None or read.within in used
            for relative in families[read.member[0]]
        }
        if found <= used:
            return used
        used |= found
