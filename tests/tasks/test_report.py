"""The report of a run: complete, one file, nothing hostile gets through."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.report import clean_text, stage_charts, write_report
from tasks.report_svg import Series, line_chart, nice_ticks, rule_track
from training_core.errors import ArtifactError

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)> \x00\x1b[31m \u202egnirts </div></main> & {{ 7*7 }}'
VOID = {"meta", "br", "img", "hr", "link", "input"}


class Page(HTMLParser):
    """Collects text and attributes and checks that tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parse(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    return page


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def stage(root: Path, name: str, summary: dict | None = None, outputs: dict | None = None, metrics=()) -> dict:
    directory = root / "stages" / name / "0123456789abcdef"
    write(directory / "spec.json", {"seed": 3, "stage_version": 1, "inputs": {"model": {"sha256": "ab" * 32}}})
    write(
        directory / "result.json",
        {
            "outputs": {n: {"path": f"outputs/{n}", "sha256": "cd" * 32} for n in outputs or {}},
            "summary": summary or {},
            "peak_rss_bytes": 2**30,
            "attempts": 2,
        },
    )
    write(directory / "environment.json", {"attempts": [{"python": "3.11", "packages": {"torch": "2.13.0"}}]})
    lines = "".join(json.dumps({"step": i + 1, **row}) + "\n" for i, row in enumerate(metrics))
    (directory / "metrics.jsonl").write_text(lines, encoding="utf-8")
    for output, make in (outputs or {}).items():
        target = directory / "outputs" / output
        target.parent.mkdir(parents=True, exist_ok=True)
        make(target)
    return {
        "name": name,
        "state": "Completed",
        "spec_hash": "0123456789abcdef",
        "seconds": 75.2,
        "directory": str(directory.relative_to(root)),
    }


def rule(name: str, **values) -> dict:
    base = {
        "name": name,
        "kind": "primary",
        "metric": "sentiment",
        "baseline": "reference",
        "verdict": "pass",
        "reason": "",
        "detail": f"detail of {name}",
        "scale": "relative",
        "candidate_mean": 0.44,
        "baseline_mean": 0.4,
        "value": 0.1,
        "threshold": 0.05,
        "threshold_low": None,
        "bound": 0.03,
        "bound_threshold": 0.0,
        "interval": [0.03, 0.17],
        "difference": 0.04,
    }
    return base | values


def gate(verdict: str = "pass") -> dict:
    return {
        "verdict": verdict,
        "reasons": [] if verdict == "pass" else ["length_tokens.ratio_range.above_maximum: grew <b>too</b> long"],
        "primary": rule("primary"),
        "champion": None,
        "guards": [
            rule(
                "length_tokens.ratio_range",
                kind="ratio_range",
                scale="absolute",
                verdict="fail" if verdict == "fail" else "pass",
                value=1.31,
                threshold=1.25,
                threshold_low=0.8,
                bound=None,
                interval=[1.2, 1.4],
            ),
            rule("broken.maximum", kind="maximum", verdict="error", value=None, threshold=None, interval=None),
        ],
        "preconditions": [{"name": "coverage", "holds": True, "detail": "scores are complete"}],
        "num_prompts": 200,
        "num_clusters": 190,
        "num_samples_per_prompt": 1,
        "config": {"alpha": 0.05, "primary": {"metric": "sentiment"}},
    }


def make_evaluation(folder: Path) -> None:
    folder.mkdir()
    entry = {"standard_errors": {"sentiment": 0.01}, "num_missing": {"sentiment": 1}, "weights_sha256": "ef" * 32}
    models = {n: {**entry, "means": {"sentiment": v}} for n, v in (("candidate", 0.44), ("reference", 0.4))}
    write(folder / "evaluation.json", {"models": models})
    rows = [
        {
            "prompt_id": f"p{i}",
            "prompt_text": f"prompt {i} <i>",
            "model": model,
            "sample_index": 0,
            "answer": HOSTILE if i == 0 else ("x" * 5000 if i == 1 else ""),
            "num_tokens": 7,
            "stop_reason": "length" if i == 0 else "eos",
            "sentiment": None if i == 2 else i / 20 * (1 if model == "candidate" else -1) * (-1 if 10 <= i < 14 else 1),
        }
        for i in range(20)
        for model in ("candidate", "reference")
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "samples.parquet")


def make_quarantine(path: Path) -> None:
    rows = [
        {"reason_code": "empty_chosen", "detail": "no text", "source_file": "a.jsonl", "source_row": i, "raw": HOSTILE}
        for i in range(1, 12)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def run(tmp_path: Path) -> dict:
    grpo = [
        {"reward/mean": 0.1 * i, "kl/policy_ref_nats": 0.01 * i, "policy/entropy_nats": 2 - 0.1 * i, "lr": 1e-5}
        for i in range(9)
    ]
    checks = [{"name": "not_empty", "passed": True}]
    data = {"rows": 120, "kept": 109, "quarantined": {"empty_chosen": 11}, "fingerprint": "aa" * 32, "checks": checks}
    once = [{"length/mean_tokens": 41.5}]
    return {
        "run_id": "demo-1",
        "name": "demo <run>",
        "state": "Completed",
        "stages": [
            stage(tmp_path, "check_data", data, {"quarantine.parquet": make_quarantine}, once),
            stage(tmp_path, "reward_model", {}, {}, [{"train/loss": 0.7, "train/accuracy": 0.5}] * 3),
            stage(tmp_path, "policy", {}, {}, grpo),
            stage(tmp_path, "evaluate", {}, {"evaluation": make_evaluation}),
            stage(tmp_path, "gate", {}, {"gate.json": lambda path: write(path, gate())}),
        ],
        "gate": {"verdict": "pass"},
        "model": {"name": "tiny", "version": "3", "aliases": ["champion"], "weights_sha256": "12" * 32},
    }


def test_a_complete_run_shows_every_section(run, tmp_path):
    path = write_report(run, tmp_path / "out" / "report.html", root=tmp_path)
    page = parse(path)
    for text in (
        "demo <run>", "pass", "registered as", "champion", "detail of primary", "1 min 15 s", "1.00 GiB",
        "Reward model: loss", "Reward model: accuracy", "Reward", "KL to the reference, a token", "Entropy",
        "1 more metrics",
        "largest rise", "largest fall", "(empty)", "cut off", "(3,500 more characters)", "empty_chosen", "not_empty",
        "abababababababab", "torch", "190 groups", "12" * 32,
    ):  # fmt: skip
        assert text in page.text, text
    # Two rules, five charts, one more metric; what check_data wrote once is a number, not a curve with one dot.
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == 2 + 5 + 1
    assert "Answer length" not in page.text
    assert "1 number written once" in page.text
    assert "length/mean_tokens" in page.text
    assert "41.5" in page.text
    assert page.text.count("no text") == 6


def test_nothing_hostile_becomes_markup(run, tmp_path):
    path = write_report(run, tmp_path / "report.html", root=tmp_path)
    text, page = path.read_text(encoding="utf-8"), parse(path)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "iframe", "i "}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "\x00" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "{{ 7*7 }}" in page.text
    assert '<script>alert("x")</script>' in page.text


def test_the_file_refers_to_no_network(run, tmp_path):
    path = write_report(run, tmp_path / "report.html", root=tmp_path)
    page = parse(path)
    assert not any({"src", "href", "action"} & set(attributes) for _, attributes in page.tags)
    urls = set(re.findall(r"https?://[^\s\"'<]+", path.read_text(encoding="utf-8")))
    assert urls <= {"http://www.w3.org/2000/svg"}
    assert "url(" not in path.read_text(encoding="utf-8")


def test_a_failed_verdict_names_its_reasons(run, tmp_path):
    directory = tmp_path / "stages/gate/0123456789abcdef/outputs/gate.json"
    write(directory, gate("fail"))
    page = parse(write_report(run, tmp_path / "report.html", root=tmp_path))
    assert "grew <b>too</b> long" in page.text
    assert ("header", {"class": "card v-fail"}) in page.tags


def test_an_unfinished_run_still_has_a_report(tmp_path):
    directory = tmp_path / "stages" / "policy" / "1"
    write(directory / "error.json", {"type": "TrainingDivergedError", "exit_code": 5, "message": "loss is <nan>"})
    (directory / "result.json").write_text("{broken", encoding="utf-8")
    run = {
        "run_id": "run without a name",
        "state": "Failed",
        "stages": [
            {"name": "grpo", "state": "Failed", "spec_hash": "1", "seconds": None, "directory": str(directory)},
            {"name": "evaluate", "state": "Pending", "spec_hash": None, "seconds": None, "directory": None},
        ],
        "gate": None,
        "model": None,
    }
    page = parse(write_report(run, tmp_path / "report.html"))
    assert "no verdict" in page.text
    assert "run without a name" in page.text
    assert "TrainingDivergedError: loss is <nan>" in page.text
    assert "no stage has started" in parse(write_report({**run, "stages": []}, tmp_path / "r2.html")).text


@pytest.mark.parametrize("name", ["samples.parquet", "quarantine.parquet"])
def test_a_damaged_table_is_named(run, tmp_path, name):
    (path,) = tmp_path.rglob(name)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ArtifactError, match=f"{name} is damaged.*Delete that stage's directory"):
        write_report(run, tmp_path / "report.html", root=tmp_path)


def test_the_same_run_gives_the_same_bytes(run, tmp_path):
    first = write_report(run, tmp_path / "a.html", root=tmp_path).read_bytes()
    assert write_report(run, tmp_path / "b.html", root=tmp_path).read_bytes() == first


def test_each_metric_is_drawn_once():
    row = {"reward/mean": 1.0, "reward/sentiment_mean": 0.5, "policy/loss": 0.1, "rollout/sampler_trainer_kl_nats": 0.0}
    metrics = [{"step": 1, "kl/once": 1.0, **row}, {"step": 2, **row}]
    charts = stage_charts("policy", metrics)
    names = [name for chart in charts for name in chart["names"]]
    assert sorted(names) == ["policy/loss", "reward/mean", "reward/sentiment_mean"]


@pytest.mark.parametrize(
    ("row", "titles"),
    [
        (
            {"policy/loss": 0.1, "critic/loss": 0.5, "critic/value_mean": 0.1, "critic/return_mean": 0.2},
            {
                "Critic loss": ["critic/loss"],
                "Critic: values and returns": ["critic/value_mean", "critic/return_mean"],
                "Policy loss": ["policy/loss"],
            },
        ),
        (
            {"reward/mean": 0.1, "rollout/greedy_reward_mean": 0.2, "kl/policy_ref_nats": 0.1, "kl/coefficient": 0.1},
            {
                "Reward": ["reward/mean"],
                "Reward of the most probable answers": ["rollout/greedy_reward_mean"],
                "KL to the reference, a token": ["kl/policy_ref_nats"],
            },
        ),
        (
            {"train/loss": 0.7, "rewards/accuracy": 0.5, "rewards/margin_mean": 0.1, "kl/baseline_nats": 1.0},
            {
                "KL to the reference, an answer": ["kl/baseline_nats"],
                "Accuracy on preferences": ["rewards/accuracy"],
                "Implicit rewards": ["rewards/margin_mean"],
                "Policy loss": ["train/loss"],
            },
        ),
    ],
)
def test_each_kind_of_training_has_its_charts(row, titles):
    charts = stage_charts("policy", [{"step": step, **row} for step in (1, 2)])
    assert {chart["title"]: chart["names"] for chart in charts} == titles


def test_line_chart_places_points_on_its_axes():
    svg = str(line_chart([Series("a", [(1, 0.0), (2, 1.0)])], "label <x>"))
    points = re.search(r'points="([^"]+)"', svg).group(1)
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in points.split())
    assert x0 == 52
    assert x1 == 366
    assert y1 < y0
    assert "label &lt;x&gt;" in svg
    assert str(line_chart([Series("a", [])], "")) == ""
    assert "polyline" in str(line_chart([Series("a", [(1, 2.0)])], "one point"))


def test_rule_track_puts_the_estimate_on_the_right_side_of_the_threshold():
    def position(svg: str, pattern: str) -> float:
        return float(re.search(pattern, svg).group(1))

    svg = str(rule_track(rule("primary")))
    assert position(svg, r'estimate v-pass" cx="([\d.]+)"') > position(svg, r'threshold" x1="([\d.]+)"')
    assert "10 %" in svg
    svg = str(rule_track(rule("primary", value=0.01, interval=[-0.05, 0.07], bound=-0.05, verdict="fail")))
    assert position(svg, r'estimate v-fail" cx="([\d.]+)"') < position(svg, r'threshold" x1="([\d.]+)"')
    assert 'class="zero"' in svg


def test_a_page_shows_what_is_missing_as_a_dash(run, tmp_path):
    whole = parse(write_report(run, tmp_path / "a.html", root=tmp_path)).text.count("–")
    run["stages"][0]["seconds"] = None
    assert parse(write_report(run, tmp_path / "b.html", root=tmp_path)).text.count("–") == whole + 1


def test_ticks_and_text():
    assert nice_ticks(3.0, 3.0) == [3.0]
    assert nice_ticks(-0.013, 0.027) == [-0.01, 0.0, 0.01, 0.02]
    assert clean_text("ok\ttab\nline") == "ok\ttab\nline"
    assert clean_text("\ud800") == "\ufffd"
