"""Rows of metric files become MLflow metrics once each, in memory against a client that records.

tests/tasks/test_tracking_rollbacks.py has what happens when a training is rolled back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recording import RecordingClient

from tasks.tracking_rows import MetricLog, mlflow_key, rule_numbers, summary_numbers


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def test_each_row_is_sent_once_as_the_file_grows(tmp_path: Path) -> None:
    client = RecordingClient()
    log = MetricLog(client, "r", tmp_path)  # type: ignore[arg-type]
    assert log.send_new() == 0
    for step in range(1, 6):
        write_rows(tmp_path / "metrics.jsonl", [{"step": step, "reward/mean": step / 2}])
        log.send_new()
    assert client.steps("reward/mean") == [1, 2, 3, 4, 5]
    assert [m.value for m in client.metrics] == [0.5, 1.0, 1.5, 2.0, 2.5]


def test_a_line_cut_short_waits_until_it_is_whole(tmp_path: Path) -> None:
    path, client = tmp_path / "metrics.jsonl", RecordingClient()
    log = MetricLog(client, "r", tmp_path)  # type: ignore[arg-type]
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    log.send_new()
    assert client.steps("a") == [1]
    with path.open("a") as stream:
        stream.write(": 2.0}\n")
    log.send_new()
    assert client.steps("a") == [1, 2]


def test_a_file_rewritten_by_a_resumed_stage_duplicates_nothing(tmp_path: Path) -> None:
    path, client = tmp_path / "metrics.jsonl", RecordingClient()
    log = MetricLog(client, "r", tmp_path)  # type: ignore[arg-type]
    write_rows(path, [{"step": s, "a": float(s)} for s in range(1, 6)])
    log.send_new()
    other = tmp_path / "new"
    write_rows(other, [{"step": s, "a": float(s)} for s in range(1, 4)])
    other.replace(path)
    log.send_new()
    write_rows(path, [{"step": s, "a": float(s)} for s in range(4, 8)])
    log.send_new()
    assert client.steps("a") == [1, 2, 3, 4, 5, 6, 7]


def test_another_process_goes_on_where_the_first_one_was_killed(tmp_path: Path) -> None:
    client = RecordingClient()
    write_rows(tmp_path / "metrics.jsonl", [{"step": s, "a": 1.0} for s in (1, 2)])
    write_rows(tmp_path / "timings.jsonl", [{"step": 1, "time/step_seconds": 1.0}])
    MetricLog(client, "r", tmp_path).send_new()  # type: ignore[arg-type]
    write_rows(tmp_path / "metrics.jsonl", [{"step": 3, "a": 1.0, "new": 1.0}])
    write_rows(tmp_path / "timings.jsonl", [{"step": s, "time/step_seconds": 1.0} for s in (2, 3)])
    MetricLog(client, "r", tmp_path).send_new()  # type: ignore[arg-type]
    assert client.steps("a") == [1, 2, 3]
    assert client.steps("new") == [3]
    assert client.steps("time/step_seconds") == [1, 2, 3]


@pytest.mark.parametrize("lose_answer", [False, True])
def test_a_failed_request_loses_and_duplicates_nothing(tmp_path: Path, lose_answer: bool) -> None:
    client = RecordingClient()
    client.fail_on_batch, client.lose_answer = 3, lose_answer
    write_rows(tmp_path / "metrics.jsonl", [{"step": s, "a": 1.0, "b": 2.0} for s in range(1, 2601)])
    log = MetricLog(client, "r", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConnectionError):
        log.send_new()
    log.send_new()
    assert client.steps("a") == client.steps("b") == list(range(1, 2601))


def test_nan_and_infinity_never_reach_mlflow(tmp_path: Path) -> None:
    client = RecordingClient()
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "a": NaN, "b": Infinity, "c": 1.0, "d": true, "e": "x"}\nno row\n{"step": 2, "c": -Infinity}\n'
    )
    MetricLog(client, "r", tmp_path).send_new()  # type: ignore[arg-type]
    assert [(m.key, m.value, m.step) for m in client.metrics] == [("c", 1.0, 1)]
    assert summary_numbers({"a": float("nan"), "b": {"c": 1, "d": float("inf"), "e": True}}) == {"b/c": 1.0}


def test_names_fit_mlflow() -> None:
    assert mlflow_key("kl/policy_ref(nats)%") == "kl/policy_ref_nats__"


def test_a_gate_s_guards_are_numbers_by_their_names() -> None:
    guards = [{"name": "length.ratio_range", "value": 1.1}, {"name": "unmeasured", "value": None}]
    assert rule_numbers({"guards": guards, "primary": {"name": "primary", "value": 1.0}}) == {
        "guards/length.ratio_range": 1.1
    }
    assert rule_numbers({"accuracy": 1.0}) == {}
