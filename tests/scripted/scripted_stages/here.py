"""Run scripted stages in this process: for tests of what surrounds stages, where a process each would only cost time.

The real launcher has its own tests, and the command's tests use it.
"""

from __future__ import annotations

import signal
from typing import Any

from scripted_stages.table import STAGES

from tasks.launch import refuse_if_running
from training_core.errors import TidegateError
from training_core.protocol.child import report_failure, run_stage_here
from training_core.protocol.directory import StageDirectory
from training_core.records import StageResult, StageSpec


def run_stage_process(
    package: str, spec: StageSpec, directory: StageDirectory, launch: Any, on_poll: Any = None
) -> StageResult:
    """Do what `tasks.launch.run_stage_process` does, without a process."""
    refuse_if_running(directory)
    directory.prepare(spec)
    directory.error_path.unlink(missing_ok=True)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return run_stage_here(spec, directory, STAGES)
    except TidegateError as error:
        report_failure(error, directory)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)
