"""One table of names for everything that a config can choose."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from training_core.errors import ConfigurationError

T = TypeVar("T")


def nearest_name(name: str, names: list[str]) -> str | None:
    """Return the entry of `names` closest to `name`, or None when nothing is close."""
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return matches[0] if matches else None


class Registry(Generic[T], Mapping[str, T]):
    """Names to entries. A name is registered once; an unknown name raises with all names and the nearest one.

    >>> colours: Registry[int] = Registry("colour")
    >>> colours.add("red", 1)
    1
    >>> colours["rde"]
    Traceback (most recent call last):
    ...
    training_core.errors.ConfigurationError: unknown colour 'rde'. Known: red. Did you mean 'red'?
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            near = nearest_name(name, list(self._entries))
            hint = f" Did you mean {near!r}?" if near else ""
            raise ConfigurationError(
                f"unknown {self.kind} {name!r}. Known: {', '.join(sorted(self._entries))}.{hint}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
