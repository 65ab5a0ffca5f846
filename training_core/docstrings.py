"""Docstrings of registered functions, read without importing them.

What is registered imports torch, which takes seconds; a command that prints a table must not wait for it. So the
registrations in registries.py (`TABLE.add("name", module.function)`) and the functions' files are parsed. A test holds
what is found here to the registries as they are when imported.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

REGISTRIES = "training_core.registries"
PACKAGES = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"^(Special cases|Args|Returns|Gradient|Raises|Source|Example):$")


@dataclass(frozen=True)
class Docs:
    """A docstring of the house's form, white space as single spaces; what is not there is empty."""

    summary: str = ""
    """The first paragraph."""
    formula: str = ""
    """The second one, unless it is a section."""
    sections: dict[str, str] = field(default_factory=dict)
    """By title: `Gradient`, `Source` and so on."""
    function: str = ""
    """Name of the function, where it is one's docstring."""


def parse_docstring(text: str) -> Docs:
    """Split a docstring.

    >>> docs = parse_docstring("Add one.\\n\\ny = x\\n+ 1.\\n\\nMore.\\n\\nSource:\\n    Peano 1889,\\n    axiom 6.\\n")
    >>> docs.summary, docs.formula, docs.sections
    ('Add one.', 'y = x + 1.', {'Source': 'Peano 1889, axiom 6.'})
    """
    head: list[str] = []
    sections: dict[str, list[str]] = {}
    current = head
    for line in inspect.cleandoc(text).splitlines():
        title = SECTION.match(line)
        if title:
            current = sections.setdefault(title[1], [])
        else:
            current.append(line)
    paragraphs = [one_line(part) for part in "\n".join(head).split("\n\n")] + ["", ""]
    return Docs(paragraphs[0], paragraphs[1], {title: one_line("\n".join(lines)) for title, lines in sections.items()})


def one_line(text: str) -> str:
    """Return a text with single spaces for all white space."""
    return " ".join(text.split())


def registered_docs(table: str) -> dict[str, Docs]:
    """Return name -> docstring of what registries.py adds to the table `table`, in its order.

    Args:
        table: the variable, for example `POLICY_LOSSES`. Its entries must be functions of modules of this package, as
            they are or wrapped by one call.

    Raises:
        LookupError: there is no such table, or an entry's function cannot be found.
    """
    found = {}
    for node in ast.walk(_parsed(REGISTRIES)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=variable), attr="add"), args=[ast.Constant(value=name), entry]
            ) if variable == table:
                found[str(name)] = _docs_of_entry(entry)
    if not found:
        raise LookupError(f"{REGISTRIES} adds nothing to {table}")
    return found


def function_docs(module: str, name: str) -> Docs:
    """Return the docstring of a function, found where it is defined or imported from there.

    Raises:
        LookupError: there is no such function.
    """
    return replace(parse_docstring(_docstring(module, name)), function=name)


def _docs_of_entry(entry: ast.expr) -> Docs:
    match entry:
        case ast.Call(args=[inner]):
            return _docs_of_entry(inner)
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            package, original = _import(REGISTRIES, module)
            return function_docs(f"{package}.{original}", name)
    raise LookupError(f"{REGISTRIES} registers {ast.unparse(entry)}; it must read `module.function`")


def _docstring(module: str, name: str) -> str:
    for node in _parsed(module).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) or ""
    return _docstring(*_import(module, name))


def _import(module: str, name: str) -> tuple[str, str]:
    """Return (module, name there) of what `from ... import` calls `name` in `module`."""
    for node in _parsed(module).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return node.module, alias.name
    raise LookupError(f"{module} neither defines nor imports {name}")


@functools.cache
def _parsed(module: str) -> ast.Module:
    path = PACKAGES.joinpath(*module.split(".")).with_suffix(".py")
    if not path.is_file():
        raise LookupError(f"{module} is no module of this package: there is no {path}")
    return ast.parse(path.read_text(encoding="utf-8"))
