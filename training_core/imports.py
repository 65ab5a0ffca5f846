"""Functions of a user's own, named `package.module:function` in a config."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from training_core.errors import ConfigurationError
from training_core.registry import nearest_name


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


def check_parameters(function: Callable[..., Any], parameters: Mapping[str, Any], what: str, path: str) -> None:
    """Check that a function takes these keyword arguments.

    Raises:
        ConfigurationError: it does not; names those that it takes.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some callables do not tell.
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return
    unknown = sorted(set(parameters) - set(signature.parameters))
    if unknown:
        near = nearest_name(unknown[0], list(signature.parameters))
        hint = f". Did you mean {near!r}?" if near else ""
        raise ConfigurationError(
            f"{what}: parameters has {', '.join(unknown)}, which {path} does not take; it takes "
            f"{', '.join(signature.parameters)}{hint}"
        )
