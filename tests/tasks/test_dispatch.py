"""Stages as flow runs of their own: what is said when one ends without a result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tasks.dispatch
from tasks.planning import CHAIN
from training_core.errors import DataError, TemporaryError
from training_core.protocol.atomic import write_json
from training_core.protocol.directory import StageDirectory
from training_core.records import StageSpec


@pytest.mark.parametrize("reports", [False, True])
def test_the_error_of_an_earlier_attempt_is_not_the_answer_of_this_one(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, reports: bool
) -> None:
    spec = StageSpec(stage="grpo", stage_version=1, config={}, seed=1)
    directory = StageDirectory.of_spec(tmp_path, spec)
    directory.prepare(spec)

    def report(message: str) -> None:
        write_json(directory.error_path, {"type": "DataError", "exit_code": 3, "message": message})

    def wait(*_arguments: Any) -> Any:
        if reports:
            report("of this attempt")
        state = SimpleNamespace(name="Crashed", message="lost", is_crashed=lambda: True, is_cancelled=lambda: False)
        return SimpleNamespace(name="flow-run", state=state)

    report("of an earlier attempt")
    monkeypatch.setattr(tasks.dispatch, "_start_flow_run", lambda *_arguments: SimpleNamespace(id=1))
    monkeypatch.setattr(tasks.dispatch, "_wait", wait)
    config: Any = SimpleNamespace(orchestration=SimpleNamespace(mode="deployments", poll_seconds=1.0))
    stage = next(stage for stage in CHAIN if stage.name == "grpo")
    expected = (DataError, "of this attempt") if reports else (TemporaryError, "ended Crashed: lost")
    with pytest.raises(expected[0], match=expected[1]):
        tasks.dispatch.run_stage(stage, spec, directory, config, "run-1", "key", lambda progress: None)
