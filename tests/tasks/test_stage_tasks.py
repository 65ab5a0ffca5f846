"""What a stage's task shows and returns."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_stages.chain import config_of

import tasks.stage_tasks
from tasks.pipeline import PipelineRun
from tasks.progress import RunObserver, observed_by
from tasks.stage_tasks import stage_task_body
from training_core.errors import DataError


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """The stage tables that were published."""
    tables: list[list[dict[str, Any]]] = []
    monkeypatch.setattr(tasks.stage_tasks, "publish_stage_table", tables.append)
    return tables


def test_the_stage_table_shows_failures_too(scripted, shown) -> None:  # type: ignore[no-untyped-def]
    preempted = {"raise": ["PreemptedError", "the machine is needed"], "bad_attempts": 1}
    scripted.script({"sft_intake": preempted, "check_data": {"raise": ["DataError", "row 3 is bad"]}})
    notes: list[str] = []

    class Watcher(RunObserver):
        def note(self, text: str) -> None:
            notes.append(text)

    with observed_by(Watcher()), PipelineRun(config_of(scripted)) as run:
        state = stage_task_body(run, "sft_intake")
        assert (state.name, state.is_failed()) == ("Pre-empted", True)
        assert shown[-1][0]["error"] == "PreemptedError: the machine is needed"
        assert "stage sft_intake is tried again: the stage saved its state" in notes[0]
        assert stage_task_body(run, "sft_intake")["state"] == "Completed"
        assert (shown[-1][0]["state"], shown[-1][0]["error"]) == ("Completed", None)
        with pytest.raises(DataError):
            stage_task_body(run, "check_data")
    assert (shown[-1][1]["state"], shown[-1][1]["error"]) == ("Failed", "DataError: row 3 is bad")


def test_what_stops_the_process_asks_for_nothing(scripted, shown, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def interrupt(_stage: Any) -> Any:
        raise KeyboardInterrupt

    with PipelineRun(config_of(scripted)) as run:
        monkeypatch.setattr(run, "_assess", interrupt)
        stage_task_body(run, "sft_intake")
    assert shown == []
    assert isinstance(run.stopped, KeyboardInterrupt)
