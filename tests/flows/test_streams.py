"""Readers that go away, closed descriptors, full devices, encodings without the letter: the command as a process."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from scripted_stages.chain import run

COMMAND = f"{sys.executable} -m flows.cli"
PRINTS = [("plan pipeline.yaml", 0), ("plan pipeline.yaml --json", 0), ("schema", 0), ("show", 0), ("--help", 0)]
ASCII = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture
def shell(workspace, scripted) -> Callable[..., tuple[int, str, str]]:  # type: ignore[no-untyped-def]
    """Run a line of shell after a whole run of the chain: (exit code of its first command, output, errors)."""
    run(scripted)

    def _shell(line: str, **variables: str) -> tuple[int, str, str]:
        done = subprocess.run(
            ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"],
            env={**workspace.environment, **variables},
            cwd=workspace.path,
            capture_output=True,
            timeout=60,
        )
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    return _shell


def test_a_reader_who_went_away_changes_no_exit_code(shell) -> None:  # type: ignore[no-untyped-def]
    for arguments, code in [*PRINTS, ("plan nothing.yaml --json", 2)]:
        found, _, errors = shell(f"{COMMAND} {arguments} | true")
        assert found == code, (arguments, errors)
        assert errors == "" or code, errors
        assert "Traceback" not in errors
        assert "Broken pipe" not in errors


def test_a_closed_standard_output_is_dev_null(shell) -> None:  # type: ignore[no-untyped-def]
    for arguments, code in PRINTS[1:4]:
        assert shell(f"{COMMAND} {arguments} >&-") == (code, "", ""), arguments
    assert shell(f"{COMMAND} show <&- >&- 2>&-") == (0, "", "")
    # What is opened later does not get its number: no printed word lands in a file.
    code = (
        "import sys; from flows.commands.streams import guard_streams; guard_streams(); print(1); "
        "print(open('pipeline.yaml').fileno() > 2, file=sys.stderr)"
    )
    assert shell(f'{sys.executable} -c "{code}" <&- >&-') == (0, "", "True\n")


def test_a_full_device_is_temporary_and_said(shell) -> None:  # type: ignore[no-untyped-def]
    for arguments, _ in PRINTS[1:4]:
        found, _, errors = shell(f"{COMMAND} {arguments} >/dev/full")
        assert found == 75, (arguments, errors)
        assert errors == "standard output could not be written: No space left on device. The answer is lost\n"
    found, _, errors = shell(f"{COMMAND} plan nothing.yaml >/dev/full")
    assert (found, "nothing.yaml does not exist" in errors) == (2, True)
    assert shell(f"{COMMAND} plan nothing.yaml 2>/dev/full")[0] == 2


@pytest.mark.parametrize("variables", [{"PYTHONIOENCODING": "ascii"}, ASCII])
def test_what_the_encoding_lacks_is_escaped(shell, variables: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    found, output, errors = shell(f"{COMMAND} show", **variables)
    assert (found, errors) == (0, "")
    assert "\\u2026" in output
    found, output, _ = shell(f"{COMMAND} plan gone-ä.yaml --json", **variables)
    assert found == 2
    assert output.isascii()
    assert "gone-" in json.loads(output)["error"]["message"]


def test_a_root_that_the_locale_cannot_express(shell, workspace) -> None:  # type: ignore[no-untyped-def]
    (workspace.path / "wurzel-ä").mkdir()
    for arguments in ("plan pipeline.yaml --root wurzel-ä", "list --root wurzel-ä", "plan pipeline.yaml --set name=ä"):
        found, _, errors = shell(f"{COMMAND} {arguments}", **ASCII)
        assert found == 2, errors
        assert "cannot be expressed in the locale, whose encoding is ascii. Set LC_ALL=C.UTF-8" in errors
        assert len(errors) < 400
    assert shell(f"{COMMAND} list --root wurzel-ä")[0] == 0


@pytest.mark.parametrize("at_once", [False, True])
def test_a_terminal_that_is_closed_ends_no_command(workspace: Any, at_once: bool) -> None:
    # It waits until its terminal is gone, then prints.
    code = (
        "import sys, flows.cli as cli, flows.commands.show as show\n"
        "show.load_runs = lambda root: (print('there', file=sys.stderr), sys.stdin.read(), [])[2]\n"
        "cli.main()"
    )
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, "list"],
        env=workspace.environment,
        stdin=subprocess.PIPE,
        stdout=terminal,
        stderr=subprocess.PIPE,
    )
    os.close(terminal)
    if at_once:
        os.close(master)
    assert process.stderr is not None
    assert process.stderr.readline() == b"there\n"
    if not at_once:
        os.close(master)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
