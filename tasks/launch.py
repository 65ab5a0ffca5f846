"""Run one stage as a child process: its own session, its own log files, and no way to outlive its parent.

The child leads a process group of its own, so that ending the group ends everything that it started. It holds the
read end of a pipe: when this process dies, however it dies, the child sees end-of-file, saves and ends. Its output
goes to a file, never to an inherited pipe, which a stray grandchild could keep open.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tasks.config import LaunchConfig
from tasks.processes import end_group, kill_leftovers
from tasks.progress import Progress, RunObserver, StageWatch, observer
from training_core.errors import (
    EXIT_TEMPORARY,
    ArtifactError,
    ConfigurationError,
    DataError,
    PreemptedError,
    StageLockedError,
    StageTimeoutError,
    TemporaryError,
    TidegateError,
    TrainingDivergedError,
    error_class,
)
from training_core.protocol.atomic import read_json
from training_core.protocol.child import GRACE_VARIABLE, PARENT_PIPE_VARIABLE
from training_core.protocol.directory import StageDirectory
from training_core.protocol.lock import is_locked, read_owner
from training_core.records import StageResult, StageSpec

POLL_SECONDS = 0.2
LOG_TAIL_LINES = 25
LOG_TAIL_BYTES = 64 * 1024

ERRORS_BY_EXIT_CODE: dict[int, type[TidegateError]] = {
    2: ConfigurationError,
    3: DataError,
    4: ArtifactError,
    5: TrainingDivergedError,
    EXIT_TEMPORARY: TemporaryError,
}

OFFLINE_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "TOKENIZERS_PARALLELISM": "false",
}


def run_stage_process(
    package: str,
    spec: StageSpec,
    directory: StageDirectory,
    launch: LaunchConfig,
    on_poll: Callable[[Progress | None], None] = lambda progress: None,
) -> StageResult:
    """Run `python -m <package> spec.json` to its end and return the stage's result.

    Args:
        package: `training_core`, `data_checks` or `tasks`.
        spec: written to the directory before the process starts.
        directory: where the stage works.
        launch: interpreter, time limit, grace time.
        on_poll: called several times a second with the newest progress; must not raise.

    Raises:
        StageLockedError: another live process works in the directory.
        StageTimeoutError: it ran longer than `launch.timeout_seconds`; its group was ended.
        PreemptedError: it was asked to stop and saved.
        TidegateError: of the type that the process reported in error.json.
        BaseException: whatever interrupts this process; the child's group is ended before it goes on.
    """
    refuse_if_running(directory)
    directory.prepare(spec)
    directory.error_path.unlink(missing_ok=True)
    code = _run_process(package, spec.stage, directory, launch, on_poll)
    if code != 0:
        raise stage_error(spec.stage, code, directory)
    result = directory.result()
    if result is None:
        raise TidegateError(f"stage {spec.stage} ended without an error and without {directory.result_path}")
    return result


def _run_process(
    package: str,
    stage: str,
    directory: StageDirectory,
    launch: LaunchConfig,
    on_poll: Callable[[Progress | None], None],
) -> int:
    """Start the process, wait for its end and return its exit code; whatever interrupts that ends its group first."""
    watch, told = StageWatch(stage, directory), observer()
    read_end, write_end = os.pipe()
    process: subprocess.Popen[bytes] | None = None
    try:
        process = _start(package, directory, launch, read_end)
        code = _wait(process, stage, launch, told, watch, on_poll)
        watch.tell_alarms(told)
    except BaseException:
        if process is not None and process.poll() is None:
            told.stage_stopping(stage, launch.grace_seconds)
            _end(process, stage, launch.grace_seconds)
        raise
    finally:
        os.close(read_end)
        # Should this process be interrupted inside Popen, the closed pipe still ends the child.
        os.close(write_end)
    kill_leftovers(process)
    return code


def refuse_if_running(directory: StageDirectory) -> None:
    """Raises: StageLockedError: a live process works in the directory."""
    if not is_locked(directory.path):
        return
    owner = read_owner(directory.path) or {}
    raise StageLockedError(
        f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown host')} works in {directory.path} at "
        "this moment. Wait until it ends and run the same command again (its result is used), or stop that process"
    )


def child_environment(launch: LaunchConfig, read_end: int) -> dict[str, str]:
    """Return the environment of a stage: as ours, no telemetry, and the hub only when `launch.offline` is false."""
    environment = {**OFFLINE_DEFAULTS, **os.environ}
    if launch.offline:
        environment.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    environment[PARENT_PIPE_VARIABLE] = str(read_end)
    environment[GRACE_VARIABLE] = str(launch.grace_seconds)
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def _start(package: str, directory: StageDirectory, launch: LaunchConfig, read_end: int) -> subprocess.Popen[bytes]:
    command = [launch.python or sys.executable, "-m", package, str(directory.spec_path.resolve())]
    with directory.output_log_path.open("ab") as log:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(read_end,),
                env=child_environment(launch, read_end),
            )
        except (FileNotFoundError, PermissionError) as error:
            raise ConfigurationError(
                f"launch.python is {command[0]!r}, which cannot be started ({error.strerror}). Name a Python "
                "interpreter that has the packages installed, or leave it out to use this one"
            ) from None


def _wait(
    process: subprocess.Popen[bytes],
    stage: str,
    launch: LaunchConfig,
    told: RunObserver,
    watch: StageWatch,
    on_poll: Callable[[Progress | None], None],
) -> int:
    started = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=POLL_SECONDS)
        if (progress := watch.look()) is not None:
            told.stage_progress(progress)
        watch.tell_alarms(told)
        on_poll(progress)
        if launch.timeout_seconds is not None and time.monotonic() - started > launch.timeout_seconds:
            _end(process, stage, launch.grace_seconds)
            raise StageTimeoutError(
                f"stage {stage} ran longer than launch.timeout_seconds = {launch.timeout_seconds:g} and was ended. Its "
                "last checkpoint is kept: raise the limit and run the same command again to continue from it"
            )


def _end(process: subprocess.Popen[bytes], stage: str, grace_seconds: float) -> None:
    left = end_group(process, grace_seconds)
    if left:
        observer().note(
            f"stage {stage}: processes {left} did not end after SIGKILL; they are blocked in the kernel (a device or "
            "a network file system). Look at them before running again"
        )


def stage_error(stage: str, code: int, directory: StageDirectory) -> TidegateError:
    """Return the typed error of a stage that ended with `code` (negative: a signal), the end of its log as a note."""
    error = reported_error(directory) or _unreported(stage, code, directory)
    if tail := log_tail(directory.output_log_path):
        error.add_note(f"last lines of {directory.output_log_path}:\n{tail}")
    return error


def reported_error(directory: StageDirectory) -> TidegateError | None:
    """Return the error of error.json, or None when there is none."""
    try:
        content = read_json(directory.error_path)
        return error_class(str(content["type"]))(str(content["message"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def named_error(text: str) -> TidegateError | None:
    """Return the error that `Type: message` names, or None when it names none."""
    name, _, message = text.partition(": ")
    found = error_class(name)
    return None if found is TidegateError else found(message)


def _unreported(stage: str, code: int, directory: StageDirectory) -> TidegateError:
    if code == -signal.SIGTERM:
        return PreemptedError(
            f"stage {stage} was ended by SIGTERM before it could save. Run the same command again to continue from its "
            "last checkpoint"
        )
    if code == -signal.SIGKILL:
        return TemporaryError(
            f"stage {stage} was killed (SIGKILL): by someone, or by the system because memory ran out. Lower the batch "
            "size if it was memory; the same command again continues from the last checkpoint"
        )
    if code < 0:
        name = signal.Signals(-code).name
        return TidegateError(f"stage {stage} died of {name}: a crash in native code. See {directory.output_log_path}")
    # error.json could not be written: the process printed "Type: message" last.
    lines = log_tail(directory.output_log_path).splitlines()
    found = named_error(lines[-1] if lines else "")
    if found is not None and found.exit_code == code:
        return found
    return ERRORS_BY_EXIT_CODE.get(code, TidegateError)(
        f"stage {stage} ended with exit code {code} and left no message. See {directory.output_log_path}"
    )


def log_tail(path: Path, num_lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a text file, or "" when there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            data = stream.read()
    except OSError:
        return ""
    return "\n".join(data.decode("utf-8", errors="replace").splitlines()[-num_lines:])
