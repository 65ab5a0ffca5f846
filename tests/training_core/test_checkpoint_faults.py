"""A save that fails, or whose process is killed, at any system call: the last good and the best stay loadable."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from training_core import errors
from training_core.checkpoint import CheckpointStore

CALLS = ("open", "mkdir", "fsync", "replace", "rename", "chmod", "unlink", "rmdir", "close")
"""What writing, renaming and pruning go through; a write itself fails in `write`."""
MAX_CALLS = 200


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine fails here; the calls are counted all the same."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def write_state(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        # Through `os`, so that each piece is a place to fail.
        (path / "part").mkdir()
        for name in ("state", "part/more"):
            descriptor = os.open(path / name, os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
            os.close(descriptor)

    return write


def arm(monkeypatch: pytest.MonkeyPatch, number: int, fail: Callable[[str], None]) -> list[int]:
    """Let `fail` be called at the `number`-th of the calls; the list holds how many there were."""
    count = [0]

    def wrap(name: str, original: Any) -> Any:
        def call(*arguments: Any, **others: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                fail(name)
            return original(*arguments, **others)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, wrap(name, getattr(os, name)))
    return count


def prepare(path: Path, scene: str) -> CheckpointStore:
    """Make a store in which the next save is step 3, and 1 is the best."""
    store = CheckpointStore(path, keep_last=1, keep_best=1)
    store.save(1, write_state("best"), 0.9)
    store.save(2, write_state("last"), 0.1)
    if scene == "again":  # As a roll-back does, which saves the state that it went back to with other knobs.
        store.save(3, write_state("before"), 0.1)
    return store


def check(path: Path, store: CheckpointStore, scene: str) -> None:
    """What holds however a save of step 3 ended."""
    latest, best = CheckpointStore(path).latest(), CheckpointStore(path).best()
    assert latest is not None
    assert best is not None
    allowed = {(3, "new"), (3, "before") if scene == "again" else (2, "last")}
    for name in ("state", "part/more"):
        assert (latest.step, (latest.path / name).read_text()) in allowed
        assert (best.step, (best.path / name).read_text()) == (1, "best")
    # And the next save finds its way.
    store.save(4, write_state("next"), 0.2)
    assert sorted(os.listdir(path)) == ["step_000001", "step_000004"]


@pytest.mark.parametrize("scene", ["new", "again"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_an_error_at_any_call(tmp_path: Path, scene: str, code: int) -> None:
    outcomes = set()
    for number in range(1, MAX_CALLS):
        path = tmp_path / str(number)
        store = prepare(path, scene)

        def fail(name: str) -> None:
            raise OSError(code, "injected", name)

        with pytest.MonkeyPatch.context() as patch:
            arm(patch, number, fail)
            try:
                store.save(3, write_state("new"), 0.2)
            except OSError as error:
                translated = errors.as_tidegate_error(error)
                assert isinstance(translated, errors.DiskFullError) == (code != errno.EIO)
                failed = True
            else:
                failed = False
        outcomes.add(failed)
        check(path, store, scene)
        shutil.rmtree(path)
        if not failed:
            break
    assert outcomes == {True, False}
    assert 20 < number < MAX_CALLS - 1


@pytest.mark.parametrize("scene", ["new", "again"])
def test_a_kill_at_any_call(tmp_path: Path, scene: str) -> None:
    for number in range(1, MAX_CALLS):
        path = tmp_path / str(number)
        store = prepare(path, scene)
        child = os.fork()
        if not child:
            with pytest.MonkeyPatch.context() as patch:
                arm(patch, number, lambda name: os._exit(9))
                store.save(3, write_state("new"), 0.2)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        check(path, store, scene)
        shutil.rmtree(path)
        if code == 0:
            break
    assert 20 < number < MAX_CALLS - 1


def test_what_reaches_the_disk_before_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files before the name, the name before an older one goes: so a power cut leaves one or the other."""
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(1, write_state("old"))
    events: list[tuple[str, str]] = []
    replace = os.replace

    def flush(descriptor: int) -> None:
        events.append(("flush", os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path.resolve())))

    def rename(source: Any, target: Any) -> None:
        events.append(("rename", os.path.relpath(source, tmp_path)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    store.save(2, write_state("new"))
    named = events.index(("rename", ".tmp_step_000002"))
    for name in ("", "/part", "/state", "/part/more"):
        assert ("flush", f".tmp_step_000002{name}") in events[:named]
    assert any(name.startswith(".tmp_step_000002/.manifest.json") for kind, name in events[:named] if kind == "flush")
    assert events[named:] == [("rename", ".tmp_step_000002"), ("flush", "."), ("rename", "step_000001")]
