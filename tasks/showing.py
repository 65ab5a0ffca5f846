"""How nested values, numbers, durations and a gate's rules are shown: in reports, in MLflow and in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


def flatten(value: Any, path: str = "", *, lists: bool = False) -> dict[str, Any]:
    """Return dotted path -> leaf. Empty mappings are leaves, and lists are, unless `lists` asks for their items, too.

    >>> flatten({"a": {"b": 1}, "c": [2], "d": {}})
    {'a.b': 1, 'c': [2], 'd': {}}
    >>> flatten({"c": [2, {"x": 3}]}, "data", lists=True)
    {'data.c.0': 2, 'data.c.1.x': 3}
    """
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping) and (value or not path):
        items = value.items()
    elif lists and isinstance(value, list) and value:
        items = enumerate(value)
    else:
        return {path: value}
    leaves: dict[str, Any] = {}
    for key, item in items:
        leaves |= flatten(item, f"{path}.{key}" if path else str(key), lists=lists)
    return leaves


def show_number(value: Any, missing: str = "-") -> str:
    """Return a number for people: four significant digits, no exponent where it fits; `missing` for what is none.

    >>> show_number(0.123456), show_number(12345.0), show_number(1e-9), show_number(None)
    ('0.1235', '12,345', '1.00e-09', '-')
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return missing
    if value == 0:
        return "0"
    if float(value).is_integer() and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:.4g}" if 1e-4 <= abs(value) < 1e7 else f"{value:.2e}"


def show_duration(seconds: float | None, missing: str = "-") -> str:
    """Return seconds as people say them.

    >>> [show_duration(s) for s in (0.4, 75, 3700, None)]
    ['0.4 s', '1 min 15 s', '1 h 1 min', '-']
    """
    if seconds is None:
        return missing
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def gate_rules(gate: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (role, rule) of each rule of gate.json or of the gate's summary; a role is primary, champion or guard."""
    found = [("primary", gate.get("primary")), ("champion", gate.get("champion"))]
    found += [("guard", guard) for guard in gate.get("guards") or []]
    return [(role, rule) for role, rule in found if isinstance(rule, Mapping) and rule]
