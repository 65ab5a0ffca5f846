"""Resident memory on the CPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim; None with another C library."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return trim


def release_free_memory() -> bool:
    """Give the pages of freed tensors back to the system; return whether this C library can.

    glibc keeps freed blocks of up to 32 MiB for later, also those between two blocks in use. Loading a model, sampling
    and training ask for blocks of different sizes, so what one phase leaves is of little use to the next and adds up
    to a third of the process. Takes milliseconds; a page that is needed again costs one page fault.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
    return trim is not None
