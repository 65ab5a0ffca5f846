"""A full disk is named with its place; see test_checkpoint.py for which errors are one."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest

from training_core.errors import DiskFullError, as_tidegate_error, free_space
from training_core.protocol.child import report_failure
from training_core.protocol.directory import StageDirectory


@pytest.mark.parametrize("name", ["model.safetensors", b"model.safetensors", Path("model.safetensors")])
def test_the_file_that_the_system_names(tmp_path: Path, name: str | bytes | Path) -> None:
    file = name if isinstance(name, bytes) else tmp_path / name
    error = as_tidegate_error(OSError(errno.ENOSPC, "full", file), Path("/elsewhere"))
    assert isinstance(error, DiskFullError)
    assert "while writing" in str(error)
    assert "model.safetensors" in str(error)
    assert "bytes = " in str(error)
    assert "/elsewhere" not in str(error)


@pytest.mark.parametrize("file", [None, 3])
def test_else_the_folder_of_the_work_and_what_is_free_there(tmp_path: Path, file: int | None) -> None:
    error = as_tidegate_error(OSError(errno.ENOSPC, "full", file), tmp_path / "gone")
    assert f"a file below {tmp_path / 'gone'} (" in str(error)
    assert f"MiB free at {tmp_path})" in str(error)
    assert "a file." in str(as_tidegate_error(OSError(errno.ENOSPC, "full")))
    assert free_space(Path("/no/such/place")).endswith("free at /")


def test_a_database_without_space_is_a_full_disk() -> None:
    assert isinstance(as_tidegate_error(sqlite3.OperationalError("database or disk is full")), DiskFullError)
    assert as_tidegate_error(sqlite3.OperationalError("no such table: runs")) is None


def test_a_stage_names_its_directory(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert report_failure(OSError(errno.ENOSPC, "full"), StageDirectory(tmp_path)) == 75
    assert f"DiskFullError: no space left while writing a file below {tmp_path} (" in capsys.readouterr().err
