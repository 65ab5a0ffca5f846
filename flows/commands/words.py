"""Sizes as people read them; numbers and durations are in tasks.showing."""

from __future__ import annotations


def size(num_bytes: float | None) -> str:
    """Return a size in binary units.

    >>> size(1536 * 1024**2)
    '1.50 GiB'
    """
    if num_bytes is None:
        return "-"
    return f"{num_bytes / 1024**3:.2f} GiB" if num_bytes >= 1024**3 else f"{num_bytes / 1024**2:.0f} MiB"
