"""Functions of a user's own, named `package.module:function` in a config."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from training_core.errors import ConfigurationError


def import_function(path: str, what: str) -> Callable[..., Any]:
    """Return the function that `path` names.

    Args:
        path: `package.module:function`.
        what: what it is used as, for the message.

    Raises:
        ConfigurationError: it cannot be imported, or is no function.
    """
    module_name, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # A module of the user's may fail in any way while it is imported.
        raise ConfigurationError(
            f"{what}: import_path {path!r} cannot be imported: {error!r}. It must read `package.module:function`, and "
            "the package must be installed or lie on PYTHONPATH"
        ) from error
    if not callable(found):
        raise ConfigurationError(f"{what}: import_path {path!r} names a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]
