"""The training loop around a trainer that only counts: resume, pre-emption, damaged checkpoints, the best one."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from training_core.errors import ArtifactError, ConfigurationError, PreemptedError
from training_core.loop import (
    LoopReport,
    LoopSettings,
    StepAbandonedError,
    StepRecord,
    append_samples,
    run_loop,
    truncate_samples,
)
from training_core.metrics import read_metrics
from training_core.protocol.context import StageContext
from training_core.protocol.directory import StageDirectory
from training_core.records import StageSpec

SETTINGS = LoopSettings(num_steps=7, checkpoint_every_steps=3, keep_last_checkpoints=2, phase="test")


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class CountingTrainer:
    """Its state is the sum of the steps it did."""

    def __init__(self, context: StageContext, *, kill_in: int = 0, stop_in: int = 0, abandon: bool = False) -> None:
        self.context = context
        self.total = 0
        self.kill_in = kill_in
        self.stop_in = stop_in
        self.abandon = abandon

    def train_step(self, step: int) -> StepRecord:
        if step == self.kill_in:
            raise Killed
        if step == self.stop_in:
            self.context.stop.requested = True
            if self.abandon:
                raise StepAbandonedError
        self.total += step
        return StepRecord({"test/total": self.total}, {"time/x_seconds": 0.1}, [{"text": f"\u2028 step {step}"}])

    def save(self, directory: Path, step: int) -> None:
        (directory / "total.json").write_text(json.dumps([step, self.total]))

    def load(self, directory: Path) -> int:
        step, self.total = json.loads((directory / "total.json").read_text())
        return int(step)


def new_context(path: Path) -> StageContext:
    spec = StageSpec(stage="policy", stage_version=1, config={})
    directory = StageDirectory(path)
    directory.prepare(spec)
    return StageContext(spec, directory)


def deterministic_files(path: Path) -> list[str]:
    return [(path / name).read_text() for name in ("metrics.jsonl", "samples.jsonl")]


@pytest.fixture
def uninterrupted(tmp_path: Path) -> list[str]:
    context = new_context(tmp_path / "whole")
    run_loop(context, CountingTrainer(context), SETTINGS)
    return deterministic_files(tmp_path / "whole")


@pytest.mark.parametrize("kill_in", range(1, 8))
def test_killed_anywhere_and_continued_writes_the_same_files(
    tmp_path: Path, uninterrupted: list[str], kill_in: int
) -> None:
    context = new_context(tmp_path / "killed")
    with pytest.raises(Killed):
        run_loop(context, CountingTrainer(context, kill_in=kill_in), SETTINGS)
    trainer = CountingTrainer(context)
    run_loop(context, trainer, SETTINGS)
    assert trainer.total == sum(range(1, 8))
    assert deterministic_files(tmp_path / "killed") == uninterrupted
    assert [row["step"] for row in read_metrics(context.directory.timings_path)] == list(range(1, 8))


@pytest.mark.parametrize("abandon", [False, True])
@pytest.mark.parametrize("stop_in", [1, 2, 3, 5])
def test_sigterm_saves_the_last_whole_step(
    tmp_path: Path, uninterrupted: list[str], stop_in: int, abandon: bool
) -> None:
    context = new_context(tmp_path / "stopped")
    with pytest.raises(PreemptedError, match="Run the same command again"):
        run_loop(context, CountingTrainer(context, stop_in=stop_in, abandon=abandon), SETTINGS)
    done = stop_in - 1 if abandon else stop_in
    latest = context.checkpoints().latest()
    assert (latest.step if latest else 0) == done
    context = new_context(tmp_path / "stopped")
    run_loop(context, CountingTrainer(context), SETTINGS)
    assert deterministic_files(tmp_path / "stopped") == uninterrupted


def test_a_stop_in_the_last_step_lets_the_stage_finish(tmp_path: Path, uninterrupted: list[str]) -> None:
    context = new_context(tmp_path / "last")
    run_loop(context, CountingTrainer(context, stop_in=7), SETTINGS)
    assert deterministic_files(tmp_path / "last") == uninterrupted


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, uninterrupted: list[str]) -> None:
    context = new_context(tmp_path / "damaged")
    with pytest.raises(Killed):
        run_loop(context, CountingTrainer(context, kill_in=7), SETTINGS)
    (context.directory.checkpoints_path / "step_000006" / "total.json").write_text("[6, 0]")
    run_loop(context, CountingTrainer(context), SETTINGS)
    assert deterministic_files(tmp_path / "damaged") == uninterrupted


def test_no_valid_checkpoint_is_an_error_and_not_a_new_start(tmp_path: Path) -> None:
    context = new_context(tmp_path / "ruined")
    run_loop(context, CountingTrainer(context), SETTINGS)
    before = deterministic_files(tmp_path / "ruined")
    for path in context.directory.checkpoints_path.glob("step_*"):
        (path / "total.json").write_text("")
    with pytest.raises(ArtifactError, match="none of them is whole"):
        run_loop(context, CountingTrainer(context), SETTINGS)
    assert deterministic_files(tmp_path / "ruined") == before


def test_a_finished_training_does_no_step_again(tmp_path: Path, uninterrupted: list[str]) -> None:
    context = new_context(tmp_path / "done")
    reports = [run_loop(context, CountingTrainer(context), SETTINGS)]
    trainer = CountingTrainer(context, kill_in=1)
    reports.append(run_loop(context, trainer, SETTINGS))
    assert reports == [LoopReport(steps=7, best_step=None, num_roll_backs=0)] * 2
    assert trainer.total == sum(range(1, 8))
    assert deterministic_files(tmp_path / "done") == uninterrupted


def test_more_steps_done_than_asked_for_is_an_error(tmp_path: Path) -> None:
    context = new_context(tmp_path)
    run_loop(context, CountingTrainer(context), SETTINGS)
    before = deterministic_files(tmp_path)
    with pytest.raises(ArtifactError, match="checkpoint of 7 steps, but only 5 are asked for"):
        run_loop(context, CountingTrainer(context), dataclasses.replace(SETTINGS, num_steps=5))
    assert deterministic_files(tmp_path) == before


@pytest.mark.parametrize("kept", [[], [1, 3], [1, 2, 2, 3]])
def test_rows_of_metrics_that_are_gone_are_an_error(tmp_path: Path, kept: list[int]) -> None:
    context = new_context(tmp_path)
    with pytest.raises(Killed):
        run_loop(context, CountingTrainer(context, kill_in=5), SETTINGS)
    lines = context.directory.metrics_path.read_text().splitlines(keepends=True)
    context.directory.metrics_path.write_text("".join(lines[step - 1] for step in kept))
    with pytest.raises(ArtifactError, match="one row for each of the 3 steps"):
        run_loop(context, CountingTrainer(context), SETTINGS)


class ScoredTrainer(CountingTrainer):
    """Reports a score that is best after step 4; an off-schedule step 5 has an even better one."""

    def train_step(self, step: int) -> StepRecord:
        record = super().train_step(step)
        scores = {1: 0.1, 2: 0.2, 3: 0.9, 4: 0.8, 5: 0.99, 6: 0.3, 8: 0.5}
        record.metrics.update({"test/score": scores[step]} if step in scores else {})
        return record


BEST = LoopSettings(8, 2, 1, "test", keep_best_checkpoints=1, best_metric="test/score")


@pytest.mark.parametrize("stop_in", [0, 3, 5, 7])
def test_the_best_checkpoint_is_kept_and_reported(tmp_path: Path, stop_in: int) -> None:
    context = new_context(tmp_path)
    if stop_in:
        with pytest.raises(PreemptedError):
            run_loop(context, ScoredTrainer(context, stop_in=stop_in), BEST)
        context = new_context(tmp_path)
    report = run_loop(context, ScoredTrainer(context), BEST)
    # Not 3 or 5: whether there is a checkpoint depends on when the process was stopped.
    assert report == LoopReport(steps=8, best_step=4, num_roll_backs=0)
    assert sorted(path.name for path in context.directory.checkpoints_path.iterdir()) == ["step_000004", "step_000008"]


def test_a_best_metric_that_is_not_reported_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = new_context(tmp_path)
    settings = dataclasses.replace(BEST, best_metric="test/scroe")
    assert run_loop(context, ScoredTrainer(context), settings).best_step is None
    assert "step 2 reports no test/scroe, so it cannot be the best; it has test/score, test/total" in caplog.text


def test_the_best_needs_a_metric() -> None:
    with pytest.raises(ConfigurationError, match="keep_best_checkpoints is 2, but best_metric"):
        LoopSettings(8, 2, 1, "test", keep_best_checkpoints=2)


def test_samples_reach_the_disk_before_they_replace_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "samples.jsonl"
    append_samples(path, 1, [{"text": "kept"}])
    append_samples(path, 2, [{"text": "dropped"}])
    events: list[str] = []

    def spy(name: str) -> None:
        original = getattr(os, name)

        def wrapper(*arguments: Any) -> Any:
            events.append(name)
            return original(*arguments)

        monkeypatch.setattr(os, name, wrapper)

    spy("fsync")
    spy("replace")
    truncate_samples(path, 1)
    assert read_metrics(path) == [{"step": 1, "text": "kept"}]
    # The file, then its new name.
    assert events == ["fsync", "replace", "fsync"]
