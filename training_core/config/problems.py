"""What pydantic finds wrong with a config, in words: path, value, what is allowed, the nearest name."""

from __future__ import annotations

import json
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from training_core.config.patterns import pattern_in_words
from training_core.registry import nearest_name

MAX_VALUE_CHARACTERS = 80
PLAIN_WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
}


@dataclass(frozen=True)
class Problem:
    """One wrong value."""

    path: tuple[str | int, ...]
    """Where it is in the data (without the tags that pydantic puts between)."""
    text: str


@dataclass(frozen=True)
class _Place:
    """A position in the model: the type there, and the tag field when it is a choice between models."""

    annotation: Any
    discriminator: str | None = None
    description: str = ""
    """The field's docstring."""


def describe_problems(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Return one problem a place, in the order of pydantic's errors."""
    found: dict[tuple[str | int, ...], list[str]] = {}
    for detail in error.errors(include_url=False):
        path, place = _locate(detail["loc"], model, detail["type"])
        for problem in _describe(detail, path, place):
            texts = found.setdefault(problem.path, [])
            if problem.text not in texts:
                texts.append(problem.text)
    return [Problem(path, " or: ".join(texts)) for path, texts in found.items()]


def _locate(location: tuple[str | int, ...], model: type[BaseModel], kind: str) -> tuple[tuple[str | int, ...], _Place]:
    """Follow pydantic's location through the model's types; return the data path and the place it leads to."""
    place = _Place(model)
    path: list[str | int] = []
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if last and kind == "extra_forbidden":
            path.append(part)  # `place` stays the model that does not know the key.
            break
        place = _simplify(place)
        members = _members(place.annotation)
        if members:
            chosen = _choose(members, place.discriminator, str(part))
            # A tag or the name of a union's member: it is not in the data.
            place = _Place(chosen)
            continue
        if place.discriminator is not None and part in _tags_of(place.annotation, place.discriminator):
            place = _Place(place.annotation)  # A choice with one variant has a tag in the location all the same.
            continue
        path.append(part)
        place = _child(place.annotation, part)
    return tuple(path), _simplify(place)


def _simplify(place: _Place) -> _Place:
    """Take off Annotated, and None from a union with one other member."""
    annotation, discriminator = place.annotation, place.discriminator
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *metadata = get_args(annotation)
            for item in metadata:
                if isinstance(item, FieldInfo) and item.discriminator is not None:
                    discriminator = str(item.discriminator)
            continue
        members = _members(annotation)
        if len(members) == 1:
            annotation = members[0]
            continue
        return _Place(annotation, discriminator, place.description)


def _members(annotation: Any) -> list[Any]:
    if get_origin(annotation) not in (Union, types.UnionType):
        return []
    return [member for member in get_args(annotation) if member is not types.NoneType]


def _choose(members: list[Any], discriminator: str | None, tag: str) -> Any:
    for member in members:
        if discriminator is not None and tag in _tags_of(member, discriminator):
            return member
        if getattr(member, "__name__", str(member)) == tag:
            return member
    return members[0]


def _tags_of(member: Any, discriminator: str) -> list[str]:
    member = _simplify(_Place(member)).annotation
    if not isinstance(member, type) or not issubclass(member, BaseModel):
        return []
    field = member.model_fields.get(discriminator)
    return [str(value) for value in get_args(field.annotation)] if field is not None else []


def _child(annotation: Any, part: str | int) -> _Place:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(part))
        if field is None:
            return _Place(Any)
        discriminator = str(field.discriminator) if field.discriminator is not None else None
        return _Place(field.annotation, discriminator, field.description or "")
    arguments = get_args(annotation)
    if get_origin(annotation) in (list, set, frozenset) and arguments:
        return _Place(arguments[0])
    if get_origin(annotation) is dict and len(arguments) == 2:
        return _Place(arguments[1])
    return _Place(Any)


def _describe(detail: ErrorDetails, path: tuple[str | int, ...], place: _Place) -> list[Problem]:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "value_error":
        return _own_words(str(context.get("error", detail["msg"])), path, place)
    if kind == "union_tag_invalid":
        given = value.get(place.discriminator) if isinstance(value, Mapping) else value
        return [Problem((*path, str(place.discriminator)), _not_one_of(given, _tags(place)))]
    return [Problem(path, _in_words(detail, path, place))]


def _in_words(detail: ErrorDetails, path: tuple[str | int, ...], place: _Place) -> str:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "extra_forbidden":
        return _unknown_key(str(path[-1]), place)
    if kind == "missing":
        return f"is required and not given. {_expected(place)}".rstrip()
    if kind == "union_tag_not_found":
        return f"says no `{place.discriminator}`. `{place.discriminator}` must be one of {', '.join(_tags(place))}"
    if kind == "literal_error":
        return _not_one_of(value, _literals(place.annotation))
    if kind == "string_pattern_mismatch":
        words = pattern_in_words(str(context["pattern"]))
        form = " ".join(place.description.split(". ")[0].split()) or f"what matches {context['pattern']}"
        return f"{_shown(value)} is not allowed. Write {words or form}"
    if kind in ("list_type", "tuple_type"):
        return f"{_shown(value)}: must be a list. {_list_advice(value, path)}"
    if kind == "too_short" and isinstance(value, list):
        least = context["min_length"]
        return f"{_shown(value)}: must have at least {'one entry' if least == 1 else f'{least} entries'}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{_shown(value)}: must be a section of `key: value` lines. {_expected(place)}".rstrip(" .")
    advice = _type_advice(kind, value)
    message = detail["msg"].replace("Input should be", "must be").replace("String should", "must")
    for words, plain in PLAIN_WORDS.items():
        message = message.replace(words, plain)
    return f"{_shown(value)}: {message}{f'. {advice}' if advice else ''}"


def _own_words(text: str, path: tuple[str | int, ...], place: _Place) -> list[Problem]:
    """Return what a config's own rule says: one problem a line, each at the field that its line starts with."""
    annotation = place.annotation
    fields = annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, BaseModel) else {}
    if path:
        first = text.partition(" ")[0].rstrip(":")
        # A field may have come from elsewhere than its section.
        where = (*path, first) if first in fields else path
        return [Problem(where, _with_full_paths(text, ".".join(map(str, path)), list(fields)))]
    found = []
    for line in text.splitlines():
        parts = [int(part) if part.isdigit() else part for part in line.partition(" ")[0].split(".")]
        found.append(Problem(tuple(parts) if parts[0] in fields else (), line))
    return found


def _with_full_paths(text: str, prefix: str, fields: list[str]) -> str:
    """Return a rule's message with the section's path before its fields.

    A word is taken for a field where it can hardly be another: at the start, before a colon or a value in brackets, or
    with an underscore.
    """
    for name in fields:
        pattern = rf"(?<![\w.`'\"/]){name}(?![\w.])" if "_" in name else rf"^{name}(?!\w)|(?<= ){name}(?=: | \()"
        text = re.sub(pattern, f"{prefix}.{name}", text)
    return text


def _not_one_of(value: Any, options: list[str]) -> str:
    near = nearest_name(str(value), options)
    return f"{_shown(value)} is not one of {', '.join(options)}.{f' Did you mean {near!r}?' if near else ''}"


def _list_advice(value: Any, path: tuple[str | int, ...]) -> str:
    if isinstance(value, Mapping) and value and all(str(key).isdigit() for key in value):
        # `--set guards.0.x=…` where no file writes the list: there is no item 0 to change.
        return f"No file writes it, so it has no items to change: --set {'.'.join(map(str, path))}='[…]' gives it whole"
    return "Write [a, b], or one item a line, each after `- `"


def _tags(place: _Place) -> list[str]:
    members = _members(place.annotation) or [place.annotation]
    return [tag for member in members for tag in _tags_of(member, place.discriminator or "kind")]


def _unknown_key(key: str, place: _Place) -> str:
    annotation = place.annotation
    known = list(annotation.model_fields) if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
    near = nearest_name(key, known)
    hint = f" Did you mean {near!r}?" if near else ""
    return f"unknown key. Known here: {', '.join(known)}.{hint}"


def _literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [text for member in typing.get_args(annotation) for text in _literals(member)]


def _expected(place: _Place) -> str:
    if place.discriminator and (tags := _tags(place)):
        return f"A section with `{place.discriminator}` one of {', '.join(tags)}"
    if options := _literals(place.annotation):
        return f"One of {', '.join(options)}"
    annotation = place.annotation
    if get_origin(annotation) is list:
        return "A list"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        required = [name for name, field in annotation.model_fields.items() if field.is_required()]
        return f"A section with {', '.join(required)}" if required else "A section"
    return ""


def _type_advice(kind: str, value: Any) -> str:
    numeric = kind.startswith(("float_", "int_"))
    if value is None:
        return "Give a value, or drop the line where the field has a default"
    if isinstance(value, list | dict) and kind != "too_long":
        return "One value is needed, not a list or section"
    if numeric and isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return ""
        if not math.isfinite(number):
            return "A finite number is needed; YAML writes not-a-number as .nan and infinity as .inf, both are refused"
        if kind.startswith("int_") and not number.is_integer():
            return ""
        text = value if kind.startswith("float_") else f"{number:.0f}"
        return f"{value!r} is text: write {text} without quotes"
    if kind.startswith("int_") and isinstance(value, float):
        return f"Write {value:.0f}" if value.is_integer() else ""
    if kind == "string_type" and isinstance(value, int | float | bool):
        return f'Write it in quotes: "{value}"'
    if kind == "bool_type" and str(value).lower() in ("yes", "no", "on", "off", "true", "false", "0", "1"):
        return "Write true or false, without quotes"
    return ""


def _shown(value: Any) -> str:
    """Return a value as a config writes it, text in quotes."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 1]}…"
