"""What MLflow has of a training that was rolled back: every step that counts, with the undone ones told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recording import RecordingClient

from tasks.alarms import ALARMS_FILE
from tasks.tracking_rows import ROLL_BACKS, MetricLog
from training_core.metrics import MetricsWriter
from training_core.sentinels import Alarm, append_alarms, truncate_alarms

KEY = "policy/loss"


class Training:
    """The files of a stage as training_core/loop.py writes them; a value says after how many roll-backs it came."""

    def __init__(self, directory: Path) -> None:
        self.alarms = directory / ALARMS_FILE
        self.metrics = MetricsWriter(directory / "metrics.jsonl")
        self.timings = MetricsWriter(directory / "timings.jsonl")
        self.num_roll_backs = 0

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.timings.write(step, {"time/step_seconds": 1.0})
            self.metrics.write(step, {KEY: step + 1000 * self.num_roll_backs})

    def cut(self, step: int) -> None:
        self.metrics.truncate_after(step)
        self.timings.truncate_after(step)

    def note(self, step: int, target: int) -> None:
        truncate_alarms(self.alarms, target, self.num_roll_backs)
        alarm = Alarm("grad_norm", "roll_back", step, "large", 20.0, 10.0)
        append_alarms(self.alarms, [alarm], self.num_roll_backs, rolled_back_to=target)

    def roll_back(self, step: int, target: int) -> None:
        self.cut(target)
        self.note(step, target)
        self.num_roll_backs += 1


def open_log(client: RecordingClient, directory: Path) -> MetricLog:
    return MetricLog(client, "r", directory)  # type: ignore[arg-type]


def newest(client: RecordingClient, key: str = KEY) -> dict[int, float]:
    """What a chart shows: of each step the value with the latest time."""
    found: dict[int, Any] = {}
    for metric in client.metrics:
        if metric.key == key and (metric.step not in found or metric.timestamp >= found[metric.step].timestamp):
            found[metric.step] = metric
    return {step: metric.value for step, metric in sorted(found.items())}


@pytest.fixture
def client() -> RecordingClient:
    return RecordingClient()


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


@pytest.mark.parametrize("is_new_process", [False, True])
def test_redone_steps_are_sent_again_once_each(
    client: RecordingClient, training: Training, tmp_path: Path, is_new_process: bool
) -> None:
    log = open_log(client, tmp_path)
    training.steps(1, 7)
    log.send_new()
    training.roll_back(7, 4)
    training.steps(5, 5)
    for step in range(6, 10):
        log = open_log(client, tmp_path) if is_new_process else log
        log.send_new()
        training.steps(step, step)
    log.send_new()
    assert open_log(client, tmp_path).send_new() == 0
    assert client.steps(KEY) == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9]
    assert client.steps("time/step_seconds") == client.steps(KEY)
    assert newest(client) == {1: 1, 2: 2, 3: 3, 4: 4, 5: 1005, 6: 1006, 7: 1007, 8: 1008, 9: 1009}
    (mark,) = [metric for metric in client.metrics if metric.key == ROLL_BACKS]
    assert mark.value == 1
    # The mark's time tells undone values from those that count.
    assert all((m.timestamp >= mark.timestamp) == (m.value > 1000) for m in client.metrics if m.key == KEY)


def test_a_file_that_is_longer_again_before_the_next_look(
    client: RecordingClient, training: Training, tmp_path: Path
) -> None:
    log = open_log(client, tmp_path)
    training.steps(1, 3)
    log.send_new()
    training.roll_back(3, 0)
    training.steps(1, 4)
    training.roll_back(4, 2)
    training.steps(3, 6)
    log.send_new()
    assert client.steps(KEY) == [1, 2, 3, 1, 2, 3, 4, 5, 6]
    assert newest(client) == {1: 1001, 2: 1002, 3: 2003, 4: 2004, 5: 2005, 6: 2006}
    assert [m.value for m in client.metrics if m.key == ROLL_BACKS] == [2]


@pytest.mark.parametrize("is_new_process", [False, True])
def test_a_second_roll_back_further_back(
    client: RecordingClient, training: Training, tmp_path: Path, is_new_process: bool
) -> None:
    log = open_log(client, tmp_path)
    training.steps(1, 6)
    log.send_new()
    training.roll_back(6, 4)
    training.steps(5, 5)
    log.send_new()
    training.roll_back(6, 2)
    training.steps(3, 3)
    log.send_new()
    training.steps(4, 4)
    log = open_log(client, tmp_path) if is_new_process else log
    log.send_new()
    assert client.steps(KEY) == [1, 2, 3, 4, 5, 6, 5, 3, 4]
    # 5 and 6 are undone and not there again yet.
    assert newest(client) == {1: 1, 2: 2, 3: 2003, 4: 2004, 5: 1005, 6: 6}


@pytest.mark.parametrize("lose_answer", [False, True])
@pytest.mark.parametrize("batch", [2, 3, 4])
def test_a_failed_request_around_a_roll_back(
    client: RecordingClient, training: Training, tmp_path: Path, batch: int, lose_answer: bool
) -> None:
    """The first batches are of the metrics and of the timings; the next the mark, then redone rows of either file."""
    log = open_log(client, tmp_path)
    training.steps(1, 5)
    log.send_new()
    training.roll_back(5, 2)
    training.steps(3, 6)
    client.fail_on_batch, client.lose_answer = batch + 1, lose_answer
    with pytest.raises(ConnectionError):
        log.send_new()
    log.send_new()
    assert client.steps(KEY) == [1, 2, 3, 4, 5, 3, 4, 5, 6]
    assert client.steps("time/step_seconds") == [1, 2, 3, 4, 5, 3, 4, 5, 6]
    assert newest(client) == {1: 1, 2: 2, 3: 1003, 4: 1004, 5: 1005, 6: 1006}


def test_rows_read_while_the_training_rolls_back_are_not_taken_for_redone_ones(
    client: RecordingClient, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(client, tmp_path)
    training.steps(1, 4)
    log.send_new()
    training.steps(5, 6)
    read = log.tails[0].rows

    def read_then_roll_back() -> Any:
        found = read()
        monkeypatch.setattr(log.tails[0], "rows", read)
        training.roll_back(6, 3)
        training.steps(4, 4)
        return found

    monkeypatch.setattr(log.tails[0], "rows", read_then_roll_back)
    log.send_new()
    assert client.steps(KEY) == [1, 2, 3, 4, 4]  # The undone 5 and 6 came too late to be sent, and 5 is still to come.
    training.steps(5, 5)
    log.send_new()
    assert newest(client) == {1: 1, 2: 2, 3: 3, 4: 1004, 5: 1005}


def test_a_training_that_dies_while_it_rolls_back_and_does_it_again(
    client: RecordingClient, training: Training, tmp_path: Path
) -> None:
    log = open_log(client, tmp_path)
    training.steps(1, 5)
    log.send_new()
    training.cut(2)
    training.note(5, 2)
    log.send_new()
    # Killed before it saved the changed knobs: the resumed process forgets the alarm and does the same steps again.
    truncate_alarms(training.alarms, 2, 0)
    training.steps(3, 4)
    log.send_new()
    training.steps(5, 5)
    training.roll_back(5, 2)
    training.steps(3, 6)
    open_log(client, tmp_path).send_new()
    assert [m.value for m in client.metrics if m.key == ROLL_BACKS] == [1, 0, 1]
    assert newest(client) == {1: 1, 2: 2, 3: 1003, 4: 1004, 5: 1005, 6: 1006}


def test_a_clock_that_goes_backwards_hides_no_redone_step(
    client: RecordingClient, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [2000.0]
    monkeypatch.setattr("tasks.tracking_rows.time.time", lambda: now[0])
    monkeypatch.setattr("tasks.row_tail.time.time", lambda: now[0])
    training.steps(1, 4)
    open_log(client, tmp_path).send_new()
    now[0] = 1000.0
    training.roll_back(4, 1)
    training.steps(2, 3)
    open_log(client, tmp_path).send_new()
    training.steps(4, 4)
    open_log(client, tmp_path).send_new()
    assert newest(client) == {1: 1, 2: 1002, 3: 1003, 4: 1004}
    assert client.steps(KEY) == [1, 2, 3, 4, 2, 3, 4]


def test_alarms_that_roll_nothing_back_send_nothing_again(
    client: RecordingClient, training: Training, tmp_path: Path
) -> None:
    log = open_log(client, tmp_path)
    training.steps(1, 3)
    append_alarms(training.alarms, [Alarm("truncation", "warn", 3, "cut", 0.9, 0.5)], 0)
    log.send_new()
    training.alarms.write_text(training.alarms.read_text() + '{"step": 4, "na')
    assert open_log(client, tmp_path).send_new() == 0
    assert json.loads(training.alarms.read_text().splitlines()[0])["rolled_back_to"] is None
    assert client.steps(KEY) == [1, 2, 3]
    assert client.steps(ROLL_BACKS) == []
