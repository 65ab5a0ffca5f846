"""Numbers as people read them."""

from __future__ import annotations

from typing import Any


def duration(seconds: float | None) -> str:
    """Return a duration.

    >>> duration(3.21), duration(75), duration(7322)
    ('3.2 s', '1 min 15 s', '2 h 2 min')
    """
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size(num_bytes: float | None) -> str:
    """Return a size in binary units.

    >>> size(1536 * 1024**2)
    '1.50 GiB'
    """
    if num_bytes is None:
        return "-"
    return f"{num_bytes / 1024**3:.2f} GiB" if num_bytes >= 1024**3 else f"{num_bytes / 1024**2:.0f} MiB"


def number(value: Any) -> str:
    """Return a number with four significant digits, "-" for none."""
    return f"{value:.4g}" if isinstance(value, int | float) and not isinstance(value, bool) else "-"
