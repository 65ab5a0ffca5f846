"""The launcher, with real child processes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.alarms import StageAlarm
from tasks.config import LaunchConfig
from tasks.launch import run_stage_process
from tasks.processes import group_members
from tasks.progress import Progress, RunObserver, observed_by
from training_core import errors
from training_core.errors import (
    ConfigurationError,
    DataError,
    DiskFullError,
    PreemptedError,
    StageLockedError,
    StageTimeoutError,
    TemporaryError,
    TidegateError,
)
from training_core.protocol.directory import StageDirectory
from training_core.protocol.lock import directory_lock
from training_core.records import StageSpec
from training_core.sentinels import ALARMS_FILE, Alarm, append_alarms
from training_core.stages import STAGES

LAUNCH = LaunchConfig(grace_seconds=5.0)
CONFIGURATION = {"steps": 1}
VERSION = STAGES["policy"].version


@pytest.fixture
def launch(workspace) -> Callable[..., Any]:  # type: ignore[no-untyped-def]
    """Run the scripted `policy` stage in a directory of the workspace."""

    def _launch(script: dict[str, Any] | None = None, launch: LaunchConfig = LAUNCH, **named: Any) -> Any:
        if script is not None:
            workspace.script({"policy": script})
        spec = StageSpec(stage="policy", stage_version=VERSION, config=CONFIGURATION, seed=1)
        return run_stage_process("scripted_stages", spec, stage_directory(workspace), launch, **named)

    return _launch


def stage_directory(workspace: Any) -> StageDirectory:
    return StageDirectory.of_spec(
        workspace.root, StageSpec(stage="policy", stage_version=VERSION, config=CONFIGURATION, seed=1)
    )


def process_of(directory: StageDirectory) -> int:
    return int(json.loads(directory.environment_path.read_text())["attempts"][-1]["pid"])


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, KeyError):
            if found := condition():
                return found
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def later(action: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    yield
    thread.join(timeout=30)


def test_a_stage_runs_in_a_session_of_its_own_and_reports_progress(workspace, launch) -> None:  # type: ignore[no-untyped-def]
    seen: list[Progress] = []

    class Watcher(RunObserver):
        def stage_progress(self, progress: Progress) -> None:
            seen.append(progress)
            raise BrokenPipeError  # Its reader went away: no reason to stop training.

    polls: list[Progress | None] = []
    with observed_by(Watcher()):
        result = launch({"steps": 4, "seconds": 0.3}, on_poll=polls.append)
    assert result.summary["digest"]
    assert result.peak_rss_bytes > 0
    assert [progress for progress in polls if progress is not None] == seen
    assert seen[-1].stage == "policy"
    assert seen[-1].total == 4
    assert seen[-1].values["reward/mean"] > 0
    assert any(progress.seconds_left is not None for progress in seen)
    assert group_members(process_of(stage_directory(workspace))) == []


def test_alarms_are_told_while_the_stage_runs_and_at_its_end(workspace, launch) -> None:  # type: ignore[no-untyped-def]
    path = stage_directory(workspace).path / ALARMS_FILE
    told: list[tuple[str, int]] = []

    class Watcher(RunObserver):
        def stage_progress(self, progress: Progress) -> None:
            if not path.exists():
                append_alarms(path, [Alarm("kl_budget", "warn", 1, "too far", 0.2, 0.1)], 0)

        def stage_alarm(self, stage: str, alarm: StageAlarm) -> None:
            told.append((stage, alarm.step))
            if alarm.step == 1:  # Nobody looks again before the end.
                time.sleep(1.0)
                append_alarms(path, [Alarm("kl_budget", "warn", 4, "too far", 0.2, 0.1)], 0)

    with observed_by(Watcher()):
        launch({"steps": 2, "seconds": 0.5})
    assert told == [("policy", 1), ("policy", 4)]


def test_nothing_leaks_a_descriptor(launch) -> None:  # type: ignore[no-untyped-def]
    launch({})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        launch({})
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("ConfigurationError", 2),
        ("DataError", 3),
        ("DigestMismatchError", 3),
        ("ArtifactError", 4),
        ("TrainingDivergedError", 5),
        ("DiskFullError", 75),
        ("ServerUnreachableError", 75),
    ],
)
def test_the_error_keeps_its_type_message_and_log(launch, name: str, code: int) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TidegateError, match="the value 3") as caught:
        launch({"raise": [name, "the value 3 is not allowed"]})
    assert type(caught.value) is getattr(errors, name)
    assert caught.value.exit_code == code
    assert "the value 3" in caught.value.__notes__[0]


def test_a_bug_is_an_internal_error_with_the_end_of_the_log(launch) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TidegateError, match="internal error") as caught:
        launch({"bug": True})
    assert caught.value.exit_code == 70
    assert "RuntimeError: a bug in a stage" in caught.value.__notes__[0]


def test_a_full_disk_is_temporary_and_says_that_checkpoints_are_kept(workspace, launch) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DiskFullError, match="Completed checkpoints are kept"):
        launch({"steps": 3, "os_error": errno.ENOSPC})
    assert stage_directory(workspace).has_started()
    assert launch({"steps": 3}).attempts == 2


def test_an_error_that_could_not_be_written_is_read_from_the_last_line(launch) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DiskFullError, match="no space left"):
        launch({"exit": 75, "last_words": "DiskFullError: no space left"})
    with pytest.raises(DataError, match="exit code 3 and left no message"):
        launch({"exit": 3, "last_words": "nothing of use"})


def test_a_stage_killed_from_outside_is_temporary(launch) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TemporaryError, match="SIGKILL"):
        launch({"kill": signal.SIGKILL})
    with pytest.raises(TidegateError, match="SIGSEGV") as caught:
        launch({"kill": signal.SIGSEGV})
    assert caught.value.exit_code == 70


def test_sigterm_to_the_child_saves_and_the_next_attempt_gives_the_same_bits(workspace, launch) -> None:  # type: ignore[no-untyped-def]
    directory = stage_directory(workspace)

    def stop() -> None:
        wait_for(lambda: (directory.checkpoints_path / "step_000002").exists())
        os.kill(process_of(directory), signal.SIGTERM)

    with later(stop), pytest.raises(PreemptedError, match="stopped after step"):
        launch({"steps": 12, "seconds": 0.1})
    stopped = launch({"steps": 12})
    metrics = directory.metrics_path.read_text()
    assert stopped.attempts == 2
    directory.path.rename(directory.path.with_name("stopped"))
    whole = launch({"steps": 12})
    assert whole.summary["digest"] == stopped.summary["digest"]
    assert directory.metrics_path.read_text() == metrics


def test_a_time_limit_ends_even_a_group_that_ignores_sigterm(workspace, launch) -> None:  # type: ignore[no-untyped-def]
    limits = LaunchConfig(timeout_seconds=4.0, grace_seconds=0.5)
    started = time.monotonic()
    with pytest.raises(StageTimeoutError, match="timeout_seconds = 4"):
        launch({"hang": True}, limits)
    assert time.monotonic() - started < 20
    directory = stage_directory(workspace)
    grandchild = int((directory.path / "grandchild").read_text())
    assert is_gone(process_of(directory))
    assert is_gone(grandchild)


@pytest.fixture
def listens_to_ctrl_c() -> Iterator[None]:
    """Python's own handler, also where the tests run in the background: a shell has SIGINT ignored there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens_to_ctrl_c")
def test_ctrl_c_ends_the_group_before_it_goes_on(workspace, launch) -> None:  # type: ignore[no-untyped-def]
    directory = stage_directory(workspace)
    stopping: list[str] = []

    class Watcher(RunObserver):
        def stage_stopping(self, stage: str, grace_seconds: float) -> None:
            stopping.append(stage)

    def interrupt() -> None:
        wait_for(lambda: (directory.checkpoints_path / "step_000002").exists())
        os.kill(os.getpid(), signal.SIGINT)

    with observed_by(Watcher()), later(interrupt), pytest.raises(KeyboardInterrupt):
        launch({"steps": 1000, "seconds": 0.05})
    assert stopping == ["policy"]
    assert is_gone(process_of(directory))
    assert "stopped after step" in json.loads(directory.error_path.read_text())["message"]


def test_a_killed_parent_takes_its_stage_along(workspace) -> None:  # type: ignore[no-untyped-def]
    workspace.script({"policy": {"steps": 1000, "seconds": 0.05}})
    code = f"""
from pathlib import Path
from tasks.config import LaunchConfig
from tasks.launch import run_stage_process
from training_core.protocol.directory import StageDirectory
from training_core.records import StageSpec
spec = StageSpec(stage="policy", stage_version={VERSION}, config={CONFIGURATION!r}, seed=1)
directory = StageDirectory.of_spec(Path({str(workspace.root)!r}), spec)
run_stage_process("scripted_stages", spec, directory, LaunchConfig(grace_seconds=5.0))
"""
    directory = stage_directory(workspace)
    parent = subprocess.Popen([sys.executable, "-c", code], env=workspace.environment)
    wait_for(lambda: (directory.checkpoints_path / "step_000002").exists())
    child = process_of(directory)
    parent.kill()
    parent.wait()
    wait_for(lambda: is_gone(child), 10)
    assert json.loads(directory.error_path.read_text())["type"] == "PreemptedError"


def test_a_directory_with_a_live_owner_is_refused(workspace, launch) -> None:  # type: ignore[no-untyped-def]
    directory = stage_directory(workspace)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom training_core.protocol.lock import directory_lock\n"
        "with directory_lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(directory.path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    try:
        with pytest.raises(StageLockedError, match=str(owner.pid)):
            launch({})
    finally:
        owner.kill()
        owner.wait()
    assert launch({}).attempts == 1  # A dead owner is taken over.
    with directory_lock(directory.path):
        pass


def test_an_interpreter_that_is_not_there(launch) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=r"launch\.python"):
        launch({}, LaunchConfig(python="/no/such/python"))


def test_the_hub_is_off_unless_asked_for(workspace, launch, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from tasks.launch import child_environment

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert child_environment(LaunchConfig(), 3)["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in child_environment(LaunchConfig(offline=False), 3)
    assert Path(child_environment(LaunchConfig(), 3)["PYTHONPATH"]).is_dir()
