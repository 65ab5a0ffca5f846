"""What sentinels said reaches everyone who looks: show, the report, MLflow, the live output and workers' logs."""

from __future__ import annotations

import io
import json
import logging
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.commands.live import LineObserver
from flows.commands.summary import alarm_lines
from tasks.alarms import ALARMS_FILE, alarm_counts, read_alarms, roll_backs, summarise_alarms
from tasks.progress import GuardedObserver, LogObserver, RunObserver, StageWatch
from tasks.report import MAX_ALARMS, write_report
from tasks.tracking_sync import StageSync
from training_core.protocol.directory import StageDirectory
from training_core.sentinels import Alarm, append_alarms, truncate_alarms


def alarm(step: int, action: str = "warn", name: str = "kl_budget", message: str = "too far") -> Alarm:
    return Alarm(name, action, step, message, 1.0, 0.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Warnings at steps 2 and 3 of two sentinels, a roll-back from 5 to 4, a warning at step 5 as it was done again."""
    path = tmp_path / ALARMS_FILE
    append_alarms(path, [alarm(2)], 0)
    append_alarms(path, [alarm(3, message="further"), alarm(3, name="truncation", message="cut <b>off</b>")], 0)
    append_alarms(path, [alarm(5, "roll_back", "grad_norm", "large")], 0, rolled_back_to=4)
    append_alarms(path, [alarm(5)], 1)
    return path


def test_alarms_are_read_as_they_are_written(path: Path) -> None:
    found = read_alarms(path)
    assert [(a.sentinel, a.action, a.step, a.num_roll_backs, a.rolled_back_to) for a in found] == [
        ("kl_budget", "warn", 2, 0, None),
        ("kl_budget", "warn", 3, 0, None),
        ("truncation", "warn", 3, 0, None),
        ("grad_norm", "roll_back", 5, 0, 4),
        ("kl_budget", "warn", 5, 1, None),
    ]
    assert roll_backs(found) == [4]
    assert alarm_counts(found) == {"grad_norm": 1, "kl_budget": 3, "truncation": 1}
    assert found[3].text == "step 5, sentinel grad_norm (roll_back): large. Rolled back to step 4"


def test_a_damaged_file_says_less_and_stops_nobody(tmp_path: Path, path: Path) -> None:
    assert read_alarms(tmp_path / "none.jsonl") == []
    assert read_alarms(tmp_path) == []
    whole = path.read_bytes()
    path.write_bytes(b'[]\n{"name": "x"}\n\xff\n{"step": "y"}\n' + whole + b'{"name": "cut')
    assert len(read_alarms(path)) == 5


def test_a_summary_has_one_entry_a_sentinel_and_action(path: Path) -> None:
    summary = summarise_alarms(read_alarms(path))
    assert summary[0] == {
        "sentinel": "kl_budget",
        "action": "warn",
        "count": 3,
        "first_step": 2,
        "last_step": 5,
        "message": "too far",
        "rolled_back_to": [],
    }
    assert [entry["rolled_back_to"] for entry in summary] == [[], [], [4]]
    assert alarm_lines({"stages": [{"name": "policy", "alarms": summary}, {"name": "gate"}]}) == [
        "policy: sentinel kl_budget (warn) 3 times, at steps 2 to 5: too far",
        "policy: sentinel truncation (warn) at step 3: cut <b>off</b>",
        "policy: sentinel grad_norm (roll_back) at step 5: large. Rolled back to step 4",
    ]


class Table(HTMLParser):
    """The cells of a page, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.is_in_cell = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.is_in_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.is_in_cell = self.is_in_cell and tag != "td"

    def handle_data(self, data: str) -> None:
        if self.is_in_cell:
            self.rows[-1][-1] += data.strip()


def alarm_rows(tmp_path: Path, path: Path) -> tuple[str, list[list[str]]]:
    stage = {"name": "policy", "state": "Completed", "spec_hash": "0", "seconds": 1.0, "directory": str(path.parent)}
    page = write_report({"run_id": "r", "state": "Failed", "stages": [stage]}, tmp_path / "r.html").read_text()
    table = Table()
    table.feed(page)
    return page, [row for row in table.rows if len(row) == 5 and row[2] in ("warn", "stop", "roll_back")]


def test_the_report_lists_them(tmp_path: Path, path: Path) -> None:
    page, rows = alarm_rows(tmp_path, path)
    assert "kl_budget: 3" in page
    assert rows == [
        ["2", "kl_budget", "warn", "too far", "–"],
        ["3", "kl_budget", "warn", "further", "–"],
        ["3", "truncation", "warn", "cut <b>off</b>", "–"],
        ["5", "grad_norm", "roll_back", "large", "4"],
        ["5", "kl_budget", "warn", "too far", "–"],
    ]
    path.unlink()
    assert "Alarms" not in alarm_rows(tmp_path, path)[0]


def test_of_very_many_the_report_has_the_newest_and_what_changed_the_training(tmp_path: Path, path: Path) -> None:
    for step in range(6, 6 + MAX_ALARMS):
        append_alarms(path, [alarm(step)], 1)
    page, rows = alarm_rows(tmp_path, path)
    assert [row[0] for row in rows] == ["5", *map(str, range(6, 6 + MAX_ALARMS))]
    assert rows[0][1] == "grad_norm"
    assert f"{MAX_ALARMS + 1} of {MAX_ALARMS + 5} shown" in page


class Watcher(RunObserver):
    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []

    def stage_alarm(self, stage: str, alarm: Any) -> None:
        assert stage == "policy"
        self.told.append((alarm.step, alarm.sentinel))


def test_each_is_told_once_while_the_stage_runs(tmp_path: Path) -> None:
    path, watcher = tmp_path / ALARMS_FILE, Watcher()
    append_alarms(path, [alarm(1)], 0)
    watch = StageWatch("policy", StageDirectory(tmp_path))  # What an attempt before left was told then.
    watch.tell_alarms(watcher)
    append_alarms(path, [alarm(4)], 0)
    append_alarms(path, [alarm(5)], 0)  # Step after step: the first one is news.
    watch.tell_alarms(GuardedObserver(watcher))
    append_alarms(path, [alarm(6), alarm(6, name="truncation")], 0)
    watch.tell_alarms(watcher)
    truncate_alarms(path, 4, 0)
    append_alarms(path, [alarm(7, "roll_back", "grad_norm")], 0, rolled_back_to=4)
    watch.tell_alarms(watcher)
    append_alarms(path, [alarm(5)], 1)
    watch.tell_alarms(watcher)
    watch.tell_alarms(watcher)
    assert watcher.told == [(4, "kl_budget"), (6, "truncation"), (7, "grad_norm"), (5, "kl_budget")]


def test_a_terminal_and_a_worker_s_log_have_a_warning_line(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found, shown = read_alarms(path)[3], io.StringIO()
    LineObserver(shown).stage_alarm("policy", found)
    LogObserver().stage_alarm("policy", found)
    text = "policy: step 5, sentinel grad_norm (roll_back): large. Rolled back to step 4"
    assert shown.getvalue() == f"warning: {text}\n"
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.WARNING, f"stage {text}")]


class Client:
    """Metrics as an MLflow client keeps them: of each run and key the last value."""

    def __init__(self) -> None:
        self.metrics: dict[str, dict[str, float]] = {"stage": {}, "pipeline": {}}
        self.num_batches = 0

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(metrics=dict(self.metrics[run_id])))

    def log_batch(self, run_id: str, metrics: Any) -> None:
        self.num_batches += 1
        self.metrics[run_id].update({metric.key: metric.value for metric in metrics})


def test_mlflow_has_their_number_and_forgets_those_undone(tmp_path: Path, path: Path) -> None:
    client = Client()
    sync = StageSync(client, "stage", tmp_path, None, "policy", "pipeline")  # type: ignore[arg-type]
    sync._send_alarms()
    assert client.metrics["stage"] == {"alarms/grad_norm": 1.0, "alarms/kl_budget": 3.0, "alarms/truncation": 1.0}
    assert client.metrics["pipeline"]["policy/alarms/kl_budget"] == 3.0
    sent = client.num_batches
    sync._send_alarms()
    assert client.num_batches == sent
    truncate_alarms(path, 2, 0)
    later = StageSync(client, "stage", tmp_path, None, "policy", "pipeline")  # type: ignore[arg-type]
    later._send_alarms()
    assert client.metrics["stage"] == {"alarms/grad_norm": 0.0, "alarms/kl_budget": 1.0, "alarms/truncation": 0.0}
    assert client.metrics["pipeline"]["policy/alarms/grad_norm"] == 0.0


def test_rows_are_json_a_machine_can_read(path: Path) -> None:
    assert json.loads(json.dumps(summarise_alarms(read_alarms(path)))) == summarise_alarms(read_alarms(path))
