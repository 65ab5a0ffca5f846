"""One HTML file about a run: verdict, curves, the gate's intervals, answers before and after, data, lineage.

Everything comes from the stages' files (docs/stages.md), so a report can be made of a run that failed or is still
going, on another machine, years later. The file needs no network and no JavaScript. What models and data files say is
escaped: it is text, whatever it looks like.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from jinja2 import Environment, StrictUndefined, select_autoescape

from tasks.alarms import ALARMS_FILE, alarm_counts, read_alarms
from tasks.report_svg import Series, line_chart, rule_track
from tasks.showing import flatten, gate_rules, show_duration, show_number
from training_core.errors import ArtifactError
from training_core.metrics import read_metrics
from training_core.protocol.atomic import read_json, write_text

TEMPLATE = Path(__file__).with_name("report_template.html")
MISSING = "–"
"""Stands in the page where there is no number."""
MAX_ANSWER_CHARACTERS = 1500
MAX_SAMPLES = 12
MAX_QUARANTINE_ROWS = 30
MAX_ROWS_A_REASON = 6
MAX_ALARMS = 100
"""Of a stage, the newest; roll-backs and what stopped a training are shown in any case."""

NO_GATE: dict[str, Any] = {"verdict": None, "reasons": [], "primary": None, "guards": [], "preconditions": []}
NO_MODEL: dict[str, Any] = {"name": None, "version": None, "aliases": [], "weights_sha256": None}

CHARTS: tuple[tuple[str, str, str], ...] = (
    # Title, stage pattern, metric pattern: one chart for each row that finds a metric not yet shown.
    ("Reward model: loss", r"reward_model", r"/loss$"),
    ("Reward model: accuracy", r"reward_model", r"/accuracy$"),
    ("Reward model: scores", r"reward_model", r"(chosen|rejected)_score"),
    ("Reward", r".*", r"^reward/(?!missing).*mean"),
    ("Reward of the most probable answers", r"policy", r"^rollout/greedy_reward_mean$"),
    ("KL to the reference, an answer", r".*", r"^kl/(.*answer|baseline)"),
    ("KL to the reference, a token", r".*", r"^kl/policy_ref"),
    ("Answer length", r".*", r"length_mean_tokens|^length/"),
    ("Entropy", r".*", r"entropy"),
    ("Truncated answers", r".*", r"truncated"),
    ("Accuracy on preferences", r"policy", r"^(rewards|validation)/accuracy$"),
    ("Implicit rewards", r"policy", r"^rewards/(chosen|rejected|margin)_mean$"),
    ("Log-probability of an answer", r"policy", r"^logprobs/"),
    ("Critic loss", r"policy", r"^critic/loss$"),
    ("Critic: values and returns", r"policy", r"^critic/(value|return)_mean$"),
    ("Policy loss", r"policy", r"^(policy|train|validation)/loss$"),
)

# Characters that XML and HTML cannot hold, lone surrogates among them. Tab and newline stay.
FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
# They change the order in which the page's own text is shown.
BIDIRECTIONAL = re.compile("[\u202a-\u202e\u2066-\u2069]")


def write_report(run: Mapping[str, Any], output: Path, *, root: Path | None = None) -> Path:
    """Write the report of `run` and return its path.

    Args:
        run: `{run_id, name?, state, stages: [{name, state, spec_hash, seconds, directory}], gate, model}`, as
            `tidegate show RUN --json` prints it. Stages may be unfinished, `gate` and `model` empty or None.
        output: the HTML file to write; its folder is made.
        root: where relative stage directories are looked for that are not below the current folder.

    Raises:
        ArtifactError: a stage's table is damaged.
    """
    stages = [_read_stage(stage, root or Path()) for stage in run.get("stages") or []]
    by_name = {stage["name"]: stage for stage in stages}
    gate = {**NO_GATE, **(_read_output(by_name.get("gate"), "gate.json") or run.get("gate") or {})}
    evaluation = _read_output(by_name.get("evaluate"), "evaluation", "evaluation.json") or {}
    page = {
        "run": {"run_id": run.get("run_id"), "state": run.get("state"), "name": run.get("name") or run.get("run_id")},
        "model": {**NO_MODEL, **(run.get("model") or {})},
        "gate": gate,
        "rules": _rules(gate),
        "stages": stages,
        "charts": [chart for stage in stages for chart in stage_charts(stage["name"], stage["metrics"])],
        "more_charts": [chart for stage in stages for chart in _other_charts(stage["name"], stage["metrics"])],
        "single_values": [value for stage in stages for value in single_values(stage["name"], stage["metrics"])],
        "alarms": [section for stage in stages if (section := _alarms(stage))],
        "evaluation": evaluation,
        "metric_names": _metric_names(evaluation),
        "samples": _samples(by_name.get("evaluate"), gate),
        "data": _data_section(by_name.get("check_data")),
        "environment": _environment(stages),
    }
    write_text(output, render(page))
    return output


def render(page: Mapping[str, Any]) -> str:
    """Fill the template; every value is escaped unless it is a picture made here."""
    environment = Environment(
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean_text(value) if type(value) is str else value,
    )
    environment.filters.update(
        number=partial(show_number, missing=MISSING),
        duration=partial(show_duration, missing=MISSING),
        digest=lambda value: str(value)[:16],
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(page)


def clean_text(text: str) -> str:
    """Return `text` with what a page cannot hold, or what would reorder it, replaced by visible marks.

    >>> clean_text("a\\x00b")
    'a\\ufffdb'
    """
    return BIDIRECTIONAL.sub("\ufffd", FORBIDDEN.sub("\ufffd", text))


def stage_charts(stage: str, metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the headline charts of a stage: `{title, stage, svg, names}`; each metric with a course is shown once."""
    found, used = [], set[str]()
    for title, stage_pattern, metric_pattern in CHARTS:
        if not re.fullmatch(stage_pattern, stage):
            continue
        names = [n for n in _curves(metrics) if n not in used and re.search(metric_pattern, n)][:3]
        if names:
            used.update(names)
            found.append(_chart(title, stage, names, metrics))
    return found


def _other_charts(stage: str, metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    shown = {name for chart in stage_charts(stage, metrics) for name in chart["names"]}
    return [_chart(name, stage, [name], metrics) for name in _curves(metrics) if name not in shown]


def single_values(stage: str, metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics that a stage wrote once, such as the lengths of its data: numbers, not curves."""
    curves = _curves(metrics)
    values = {name: value for row in metrics for name, value in row.items() if name != "step" and name not in curves}
    return [{"stage": stage, "name": name, "value": value} for name, value in values.items()]


def _chart(title: str, stage: str, names: list[str], metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    series = [Series(name, [(row["step"], row[name]) for row in metrics if name in row]) for name in names]
    last = {line.name: (line.points[0][1], line.points[-1][1]) for line in series}
    svg = line_chart(series, f"{title} of stage {stage} over optimizer steps")
    return {"title": title, "stage": stage, "names": names, "ends": last, "svg": svg}


def _curves(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the metrics with more than one step, in the order of the file."""
    steps: dict[str, set[int]] = {}
    for row in metrics:
        for name in row.keys() - {"step"}:
            steps.setdefault(name, set()).add(row["step"])
    return [name for name in dict.fromkeys(name for row in metrics for name in row) if len(steps.get(name, ())) > 1]


def _alarms(stage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the alarms of a stage in their order, how many are left out, and how many each sentinel raised."""
    found = read_alarms(stage["path"] / ALARMS_FILE) if stage["path"] else []
    num_left_out = max(len(found) - MAX_ALARMS, 0)
    rows = [alarm for index, alarm in enumerate(found) if index >= num_left_out or alarm.action != "warn"]
    counts = alarm_counts(found)
    return {"stage": stage["name"], "rows": rows, "num": len(found), "counts": counts} if found else {}


def _read_stage(stage: Mapping[str, Any], root: Path) -> dict[str, Any]:
    directory = Path(str(stage.get("directory") or ""))
    if not directory.is_dir():
        directory = root / directory
    known = bool(stage.get("directory")) and directory.is_dir()
    files = {name: _read_if_there(directory / f"{name}.json") if known else None for name in _STAGE_FILES}
    return {
        **{key: stage.get(key) for key in ("name", "state", "spec_hash", "seconds", "why")},
        "directory": str(stage.get("directory") or ""),
        "path": directory if known else None,
        "metrics": read_metrics(directory / "metrics.jsonl") if known else [],
        **files,
    }


_STAGE_FILES = ("spec", "result", "error", "environment")


def _read_if_there(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError):
        # A stage that is still running may have no such file yet; the report says what there is.
        return None


def _output_path(stage: Mapping[str, Any] | None, name: str) -> Path | None:
    if not stage or not stage["path"] or not stage["result"]:
        return None
    artifact = stage["result"]["outputs"].get(name)
    path = stage["path"] / artifact["path"] if artifact else None
    return path if path is not None and path.exists() else None


def _read_output(stage: Mapping[str, Any] | None, name: str, inside: str = "") -> dict[str, Any] | None:
    path = _output_path(stage, name)
    found = _read_if_there(path / inside if inside else path) if path else None
    return found if isinstance(found, dict) else None


def _rules(gate: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{**rule, "svg": rule_track(rule)} for _, rule in gate_rules(gate)]


def _metric_names(evaluation: Mapping[str, Any]) -> list[str]:
    models = (evaluation.get("models") or {}).values()
    return list(dict.fromkeys(name for model in models for name in model.get("means") or {}))


def _samples(stage: Mapping[str, Any] | None, gate: Mapping[str, Any]) -> dict[str, Any]:
    folder = _output_path(stage, "evaluation")
    if folder is None or not (folder / "samples.parquet").is_file():
        return {}
    rows = _read_rows(folder / "samples.parquet")
    metric = ((gate.get("config") or {}).get("primary") or {}).get("metric")
    prompts: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["sample_index"] == 0:
            entry = prompts.setdefault(row["prompt_id"], {"prompt": _cut(row["prompt_text"]), "answers": {}})
            entry["answers"][row["model"]] = {
                "text": _cut(row["answer"]),
                "score": row.get(metric) if metric else None,
                "num_tokens": row["num_tokens"],
                "truncated": row["stop_reason"] == "length",
            }
    models = [name for name in ("reference", "candidate", "champion") if any(r["model"] == name for r in rows)]
    chosen = _choose(list(prompts.values()))
    return {"models": models, "metric": metric, "rows": chosen, "num_prompts": len(prompts)}


def _read_rows(path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = pq.read_table(path, columns=None if columns is None else list(columns)).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(
            f"{path} is damaged: {error}. Delete that stage's directory; the same `tidegate run` command makes it again"
        ) from None
    return rows


def _choose(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pick the first prompts, the largest gains and the largest losses, so that neither is hidden."""

    def gain(entry: Mapping[str, Any]) -> float:
        ours, theirs = (entry["answers"].get(name, {}).get("score") for name in ("candidate", "reference"))
        return 0.0 if ours is None or theirs is None else ours - theirs

    third = MAX_SAMPLES // 3
    order = sorted(entries, key=gain)
    groups = [
        ("first in the file", entries[:third]),
        ("largest rise", [entry for entry in reversed(order[-third:]) if gain(entry) > 0]),
        ("largest fall", [entry for entry in order[:third] if gain(entry) < 0]),
    ]
    chosen, seen = [], set[int]()
    for why, group in groups:
        for entry in group:
            if id(entry) not in seen:
                seen.add(id(entry))
                chosen.append({**entry, "why": why})
    return chosen


def _cut(text: str) -> str:
    if len(text) <= MAX_ANSWER_CHARACTERS:
        return text
    return f"{text[:MAX_ANSWER_CHARACTERS]} … ({len(text) - MAX_ANSWER_CHARACTERS:,} more characters)"


def _data_section(stage: Mapping[str, Any] | None) -> dict[str, Any]:
    if not stage or not stage["result"]:
        return {}
    summary = stage["result"]["summary"]
    reasons = summary.get("quarantined")
    path = _output_path(stage, "quarantine.parquet")
    rows: list[dict[str, Any]] = []
    if path is not None:
        counts: dict[str, int] = {}
        # Without the row's text: secrets and personal data stand in it, and a page is passed around.
        for row in _read_rows(path, ("reason_code", "detail", "source_file", "source_row")):
            counts[row["reason_code"]] = counts.get(row["reason_code"], 0) + 1
            if counts[row["reason_code"]] <= MAX_ROWS_A_REASON and len(rows) < MAX_QUARANTINE_ROWS:
                rows.append(row)
        reasons = reasons if isinstance(reasons, dict) else counts
    numbers = {key: value for key, value in summary.items() if isinstance(value, int | float | str)}
    checks = [check for check in summary.get("checks") or [] if isinstance(check, dict)]
    return {
        "numbers": numbers,
        "reasons": reasons if isinstance(reasons, dict) else {},
        "rows": rows,
        "checks": checks,
        "check_columns": list(dict.fromkeys(key for check in checks for key in check)),
    }


def _environment(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last attempt's environment of the last stage that recorded one, flat."""
    for stage in reversed(stages):
        recorded = stage["environment"]
        latest = recorded[-1] if isinstance(recorded, list) and recorded else recorded
        if isinstance(latest, dict):
            latest = (latest.get("attempts") or [latest])[-1]
            return {key: value for key, value in flatten(latest).items() if value not in (None, "", {})}
    return {}
