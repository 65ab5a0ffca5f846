"""The body of a stage process: `python -m <package> SPEC_JSON` ends here.

Order: lock, spec, inputs verified, signals, run, outputs digested, result.json last. Whatever goes wrong becomes an
exit code of the error's type, with the message on stderr and in error.json.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from training_core.errors import (
    EXIT_CONFIGURATION,
    EXIT_INTERNAL,
    ConfigurationError,
    PreemptedError,
    StageLockedError,
    StopRequestedError,
    as_tidegate_error,
)
from training_core.protocol.atomic import fsync_tree, write_json
from training_core.protocol.context import StageContext, StopSignal
from training_core.protocol.digests import path_digest, verify_digest
from training_core.protocol.directory import StageDirectory
from training_core.protocol.environment import record_attempt
from training_core.protocol.lock import directory_lock
from training_core.records import Artifact, StageOutcome, StageResult, StageSpec

PARENT_PIPE_VARIABLE = "TIDEGATE_PARENT_PIPE"
"""Number of an inherited file descriptor: the read end of a pipe whose write end the parent holds."""
GRACE_VARIABLE = "TIDEGATE_GRACE_SECONDS"
DEFAULT_GRACE_SECONDS = 25.0

logger = logging.getLogger("tidegate.stage")


@dataclass(frozen=True)
class StageEntry:
    """Where a stage lives and which version of its computation this is."""

    module: str
    """Module with `run(context: StageContext) -> StageOutcome`; imported only in the stage process."""
    version: int


class JsonLinesHandler(logging.FileHandler):
    """log.jsonl: one object a record."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": record.created, "level": record.levelname, "logger": record.name}
        entry["message"] = record.getMessage()
        if record.exc_info:
            entry["exception"] = logging.Formatter().formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def main(arguments: list[str], stages: Mapping[str, StageEntry]) -> int:
    """Run the stage whose spec.json is the only argument; return the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(f"usage: python -m PACKAGE SPEC_JSON   (stages here: {', '.join(sorted(stages))})", file=sys.stderr)
        return EXIT_CONFIGURATION
    spec_path = Path(arguments[0]).resolve()
    watch_parent()
    directory = StageDirectory(spec_path.parent)
    try:
        run_stage_here(load_spec(spec_path, stages), directory, stages)
    except BaseException as error:
        # From here on only the report is left, and a second SIGTERM must not cost the exit code.
        signal.signal(signal.SIGTERM, lambda signum, frame: None)
        return report_failure(error, directory)
    return 0


def load_spec(path: Path, stages: Mapping[str, StageEntry]) -> StageSpec:
    try:
        spec = StageSpec.load(path)
    except (OSError, ValueError) as error:  # ValidationError is a ValueError.
        raise ConfigurationError(f"{path} is no stage spec: {error}") from None
    if spec.stage not in stages:
        raise ConfigurationError(f"{path} names stage {spec.stage!r}; this process runs: {', '.join(sorted(stages))}")
    if spec.stage_version != stages[spec.stage].version:
        raise ConfigurationError(
            f"{path} was planned for version {spec.stage_version} of stage {spec.stage}, the code has version "
            f"{stages[spec.stage].version}. Plan again with `tidegate run`"
        )
    return spec


def run_stage_here(spec: StageSpec, directory: StageDirectory, stages: Mapping[str, StageEntry]) -> StageResult:
    """Run one stage in this process and return its result; a complete one is returned as it is.

    Raises:
        TidegateError: of the type that says what went wrong.
    """
    stop = StopSignal()
    if threading.current_thread() is threading.main_thread():
        stop.install()
    try:
        return _run_locked(spec, directory, stages, stop)
    except StopRequestedError as error:
        raise PreemptedError(str(error)) from error
    except Exception:
        stop.raise_if_swallowed()  # Some library turned the stop into an error of its own.
        raise


def _run_locked(
    spec: StageSpec, directory: StageDirectory, stages: Mapping[str, StageEntry], stop: StopSignal
) -> StageResult:
    started = time.monotonic()
    with directory_lock(directory.path):
        if (finished := directory.result()) is not None:
            return finished
        directory.error_path.unlink(missing_ok=True)
        with logging_to(directory.log_path):
            attempt, changes = record_attempt(directory.environment_path)
            if changes:
                logger.warning("the environment differs from the last attempt: %s", "; ".join(changes))
            for name, artifact in spec.inputs.items():
                verify_digest(Path(artifact.path), artifact.sha256, f"input {name!r} of stage {spec.stage}")
            apply_execution(spec)
            module = importlib.import_module(stages[spec.stage].module)
            logger.info("stage %s %s starts, attempt %d", spec.stage, spec.spec_hash, attempt)
            outcome: StageOutcome = module.run(StageContext(spec, directory, stop))
            outputs = {
                name: Artifact(path=path, sha256=path_digest(directory.path / path))
                for name, path in sorted(outcome.outputs.items())
            }
            result = StageResult(
                stage=spec.stage,
                spec_hash=spec.spec_hash,
                outputs=outputs,
                summary=outcome.summary,
                seconds=time.monotonic() - started,
                peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                attempts=attempt,
            )
            # The result promises the outputs: after a power cut it must not be there without them.
            for output in outputs.values():
                fsync_tree(directory.path / output.path)
            stop.close()
            write_json(directory.result_path, result.model_dump(mode="json"))
            # Nothing resumes a complete stage, and optimizer state is several times the size of the model.
            shutil.rmtree(directory.checkpoints_path, ignore_errors=True)
            logger.info("stage %s %s is complete after %.1f s", spec.stage, spec.spec_hash, result.seconds)
            return result


def apply_execution(spec: StageSpec) -> None:
    """Set thread counts before anything imports torch."""
    # Threads that spin while they wait starve each other on shared cores: vLLM's many short parallel regions then take
    # ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # cuBLAS gives the same bits each time only with a workspace of fixed size.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if num_threads := spec.execution.get("num_threads"):
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        os.environ["MKL_NUM_THREADS"] = str(num_threads)


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Send log records of this process to a JSON lines file as well."""
    handler = JsonLinesHandler(path, encoding="utf-8")
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()


def report_failure(error: BaseException, directory: StageDirectory) -> int:
    """Print `error`, record it in error.json unless the directory is another process's, and return its exit code."""
    known = as_tidegate_error(error, directory.path)
    if known is None and isinstance(error, ValidationError):
        known = ConfigurationError(f"the spec's config is not valid: {error}")
    if known is not None:
        code, name, message = known.exit_code, type(known).__name__, str(known)
    elif isinstance(error, SystemExit):
        code, name, message = EXIT_INTERNAL, "SystemExit", f"the stage called exit({error.code})"
    else:
        code, name = EXIT_INTERNAL, type(error).__name__
        message = f"internal error: {error!r}. The traceback is in {directory.output_log_path}"
        traceback.print_exception(error)
    print(f"{name}: {message}", file=sys.stderr, flush=True)
    if isinstance(known, StageLockedError):
        return code  # The directory is another process's: what it finds there must be its own.
    # On a full disk the exit code and stderr must still tell what happened.
    with contextlib.suppress(OSError):
        write_json(directory.error_path, {"type": name, "exit_code": code, "message": message})
    return code


def watch_parent() -> None:
    """End this process group when the parent dies, however it dies.

    The parent holds the write end of a pipe; end-of-file on the read end means that it is gone. The stage then gets
    SIGTERM, so that it can save, and SIGKILL for its whole group after the grace time.
    """
    descriptor = os.environ.pop(PARENT_PIPE_VARIABLE, None)
    if descriptor is None:
        return
    grace = float(os.environ.get(GRACE_VARIABLE, DEFAULT_GRACE_SECONDS))
    threading.Thread(target=_wait_for_parent, args=(int(descriptor), grace), name="parent-watch", daemon=True).start()


def _wait_for_parent(descriptor: int, grace_seconds: float) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_seconds)
    if os.getsid(0) == os.getpid():
        os.killpg(os.getpgid(0), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
