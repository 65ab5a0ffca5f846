"""The fixtures of tests/scripted, and a command in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scripted_stages.workspace import scripted, workspace

__all__ = ["scripted", "workspace"]


@pytest.fixture
def here(scripted: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process, one that starts nothing: (exit code, standard output, standard error)."""
    from flows.cli import app
    from flows.commands.errors import exit_code_of

    def _here(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = exit_code_of(app, arguments)
        return code, *capsys.readouterr()

    return _here
