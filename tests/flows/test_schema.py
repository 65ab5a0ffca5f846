"""The JSON schema that editors and forms show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flows.config import pipeline_schema


def properties(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, schema) of every property, however deep."""
    if isinstance(node, list):
        for item in node:
            yield from properties(item, path)
    if not isinstance(node, dict):
        return
    for name, inner in node.items():
        if name == "properties":
            yield from ((f"{path}/{key}", schema) for key, schema in inner.items())
        yield from properties(inner, f"{path}/{name}")


def test_every_property_says_what_it_means() -> None:
    found = dict(properties(pipeline_schema()))
    assert {"/seed", "/$defs/GrpoConfig/name", "/$defs/RegexReward/kind"} <= set(found)
    silent = [path for path, schema in found.items() if not str(schema.get("description", "")).strip()]
    assert silent == []


def test_every_section_says_what_it_is_for() -> None:
    assert [name for name, schema in pipeline_schema()["$defs"].items() if not schema.get("description")] == []  # type: ignore[attr-defined]
