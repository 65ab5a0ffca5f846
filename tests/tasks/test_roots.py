"""Roots that can be used, and disks that are full, before anything is started."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.roots import MIN_FREE_BYTES, free_bytes, prepare_root, usable_root, write_problem
from tasks.servers import MIN_SERVER_BYTES, Server
from training_core.errors import ConfigurationError, DiskFullError, ServerUnreachableError


def disk(monkeypatch: pytest.MonkeyPatch, **changed: int) -> None:
    """Make every disk look as given."""
    found = {"f_blocks": 1000, "f_files": 100, "f_favail": 50, "f_bavail": 2**40, "f_bfree": 0, "f_frsize": 1} | changed
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**found))


def test_a_root_is_made_and_left_empty(tmp_path: Path) -> None:
    prepare_root(tmp_path / "a" / "b")
    prepare_root(tmp_path / "a" / "b")
    assert list((tmp_path / "a").rglob("*")) == [tmp_path / "a" / "b"]


@pytest.mark.parametrize("changed", [{"f_bavail": MIN_FREE_BYTES - 1}, {"f_favail": 0}])
def test_too_little_space_is_said_with_numbers_before_anything_is_made(tmp_path: Path, monkeypatch, changed) -> None:  # type: ignore[no-untyped-def]
    disk(monkeypatch, **changed)
    with pytest.raises(DiskFullError) as caught:
        prepare_root(tmp_path / "root")
    message = str(caught.value)
    assert str(tmp_path / "root") in message
    assert f"bytes = {MIN_FREE_BYTES / 1024**2:.0f} MiB" in message
    assert f"free at {tmp_path}" in message
    assert "Free some space" in message
    assert caught.value.exit_code == 75
    assert not (tmp_path / "root").exists()
    disk(monkeypatch, f_bavail=MIN_FREE_BYTES)
    prepare_root(tmp_path / "root")


def test_a_root_has_no_dots_in_it_unless_a_link_gives_them_a_meaning(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "far" / "deep")
    monkeypatch.chdir(tmp_path / "here")
    assert usable_root("../root") == tmp_path / "root"
    assert usable_root("link/root") == tmp_path / "here" / "link" / "root"
    assert usable_root("link/../root") == tmp_path / "here" / "link" / ".." / "root"  # In `far`, not in `here`.


def test_a_file_system_without_a_size_is_not_full(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    disk(monkeypatch, f_blocks=0, f_bavail=0)
    assert free_bytes(Path("/")) > 2**60


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EROFS, ConfigurationError),
        (errno.EACCES, ConfigurationError),
    ],
)
def test_what_the_first_file_meets(tmp_path: Path, monkeypatch, code: int, kind: type[Exception]) -> None:  # type: ignore[no-untyped-def]
    def refuse(**_named: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(kind, match=str(tmp_path)):
        prepare_root(tmp_path)


def test_a_folder_that_takes_no_file(tmp_path: Path) -> None:
    assert write_problem(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    assert write_problem(Path("/proc")) is not None
    with pytest.raises(ConfigurationError, match="cannot be written"):
        prepare_root(Path("/proc/nowhere/root"))


def ended_server(folder: Path, log: str) -> Server:
    path = folder / "server.log"
    path.write_text(log)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return Server("The server", "http://127.0.0.1:9/health", process, path)


@pytest.mark.parametrize(
    "line",
    [
        "OSError: [Errno 28] No space left on device: 'x'",
        "OSError: [Errno 122] Disk quota exceeded",
        "sqlite3.OperationalError: database or disk is full",
    ],
)
def test_a_server_that_dies_of_a_full_disk_says_so(tmp_path: Path, line: str) -> None:
    with pytest.raises(DiskFullError, match="The server did not come up: no space left") as caught:
        ended_server(tmp_path, f"starting\n{line}\nmore\n").wait_until_ready()
    assert f"free at {tmp_path}" in str(caught.value)
    assert "Free some space" in str(caught.value)


def test_a_server_too_short_of_disk_to_say_why(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    server = ended_server(tmp_path, "ImportError: no module\n")
    with pytest.raises(ServerUnreachableError, match="ImportError"):
        server.wait_until_ready()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=MIN_SERVER_BYTES - 1))
    assert isinstance(server.failure("ended"), DiskFullError)


def test_a_root_that_would_end_the_path_of_a_database_is_refused(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    for name in ("what?", "what?/root"):
        with pytest.raises(ConfigurationError, match=r"root .*what\?.* has a '\?'"):
            usable_root(tmp_path / name)
    (tmp_path / "what?").mkdir()
    monkeypatch.chdir(tmp_path / "what?")
    with pytest.raises(ConfigurationError, match="absolute path"):
        usable_root("root")
    assert usable_root(tmp_path / "a b#c%20d") == tmp_path / "a b#c%20d"
