"""Errors that nobody foresaw, without their messages: what a library says of a value may quote it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from training_core.errors import as_tidegate_error


class UnforeseenError(Exception):
    """A bug met while rows were looked at: its type and place, and not what it said."""


@contextlib.contextmanager
def without_row_text() -> Iterator[None]:
    """Have every error from inside say nothing of a row: one that is not ours keeps its type, place and traceback.

    Errors of the operating system are let through: they name files.

    Raises:
        UnforeseenError: in the place of an error that is a bug.
    """
    try:
        yield
    except Exception as error:
        is_of_system = isinstance(error, OSError) and error.errno is not None
        if is_of_system or isinstance(error, MemoryError | UnforeseenError) or as_tidegate_error(error) is not None:
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        told = (
            f"{type(error).__name__} in {last.name}, line {last.lineno} of {last.filename}. What it said is left out: "
            "it may quote a row"
        )
        raise UnforeseenError(told).with_traceback(error.__traceback__) from None
