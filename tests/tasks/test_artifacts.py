"""What Prefect shows: content without a server, and that trouble with Prefect stops nothing."""

from __future__ import annotations

import logging

import pytest

from tasks import artifacts


def test_stage_table_has_the_columns_people_look_for() -> None:
    rows = [{"stage": "policy", "state": "Completed", "seconds": 12.345, "spec_hash": "ab", "peak_rss_bytes": 5}]
    (row,) = artifacts.stage_table(rows)
    assert list(row) == ["stage", "state", "seconds", "attempts", "spec_hash", "why", "error"]
    assert (row["seconds"], row["error"]) == (12.3, "")


def test_gate_report_shows_rules_and_reasons() -> None:
    text = artifacts.gate_markdown(
        {
            "verdict": "fail",
            "reasons": ["length_tokens.ratio_range: too | long"],
            "primary": {"name": "primary", "verdict": "pass", "detail": "gain 7 %"},
            "champion": None,
            "guards": [{"name": "length_tokens.ratio_range", "verdict": "fail", "detail": "1.4\nabove 1.25"}],
            "weights_sha256": {"candidate": "ab" * 32},
        }
    )
    assert text.startswith("# Gate: FAIL\n")
    assert "| primary | pass | gain 7 % |" in text
    assert "| length_tokens.ratio_range | fail | 1.4 above 1.25 |" in text
    assert "too \\| long" in text
    assert "abababababababab…" in text


def test_outside_of_a_flow_run_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    artifacts.publish_stage_table([{"stage": "x"}])
    artifacts.publish_gate_report({"verdict": "pass"})
    artifacts.publish_progress("policy", 1, 2)
    assert caplog.records == []


def test_trouble_with_prefect_is_logged_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import prefect.artifacts

    def fail(*args: object, **values: object) -> None:
        raise ConnectionError("server gone")

    for name in ("create_table_artifact", "create_markdown_artifact", "create_progress_artifact"):
        monkeypatch.setattr(prefect.artifacts, name, fail)
    monkeypatch.setattr(artifacts, "flow_run_id", lambda: "a flow run")
    with caplog.at_level(logging.WARNING):
        artifacts.publish_stage_table([{"stage": "x"}])
        artifacts.publish_gate_report({"verdict": "pass"})
        artifacts.publish_progress("policy", 1, 2)
    assert len(caplog.records) == 3


def test_progress_is_one_artifact_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    import prefect.artifacts

    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(artifacts, "flow_run_id", lambda: "run")
    monkeypatch.setattr(artifacts, "_progress_ids", {})

    def create(percent: float, key: str, description: str) -> str:
        calls.append(("create", percent, key))
        return "id"

    monkeypatch.setattr(prefect.artifacts, "create_progress_artifact", create)
    monkeypatch.setattr(prefect.artifacts, "update_progress_artifact", lambda *a: calls.append(("update", *a)))
    artifacts.publish_progress("reward_model", 1, 4)
    artifacts.publish_progress("reward_model", 3, 4)
    artifacts.publish_progress("reward_model", 9, 4)
    assert calls == [("create", 25.0, "progress-reward-model"), ("update", "id", 75.0), ("update", "id", 100.0)]
