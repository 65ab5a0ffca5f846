"""What a run says at its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from flows.commands.words import size
from tasks.runs import RunRecord, report_path
from tasks.showing import gate_rules, show_duration, show_number

RULE_TITLES = {"primary": "primary metric", "champion": "against the champion", "guard": "guard"}
FILE_WIDTH = 200
"""Columns of a table that goes to a file or a pipe."""


def print_summary(record: RunRecord, view: Mapping[str, Any], root: Path, stream: IO[str]) -> None:
    """Print verdict, primary metric, guards, model version, report, time and memory of each stage."""
    console = make_console(stream)
    console.print()
    console.print(stage_table(view))
    console.print(f"run {record.run_id}: {view['state']}")
    for line in alarm_lines(view):
        console.print(line)
    for line in gate_lines(record.gate):
        console.print(line)
    console.print(model_line(view.get("model")))
    report = report_path(root, record.run_id)
    if report.exists():
        console.print(f"report: {report}")


def make_console(stream: IO[str]) -> Console:
    """Return a plain console; where there is no terminal, lines are as long as they need to be."""
    console = Console(file=stream, highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


def stage_table(view: Mapping[str, Any]) -> Table:
    """Return a table of the stages; times and memory of a cached stage are those of the run that did it."""
    table = Table(box=None, pad_edge=False)
    for title in ("stage", "state", "time", "peak memory", "directory"):
        table.add_column(title, justify="right" if title in ("time", "peak memory") else "left", no_wrap=True)
    for stage in view["stages"]:
        directory = Path(stage["directory"]) if stage["directory"] else None
        where = "-" if directory is None else "/".join(directory.parts[-3:])
        table.add_row(
            stage["name"], stage["state"], show_duration(stage["seconds"]), size(stage.get("peak_rss_bytes")), where
        )
    return table


def alarm_lines(view: Mapping[str, Any]) -> list[str]:
    """Return what the sentinels of each stage said: one line a sentinel and action, with its last message."""
    return [f"{stage['name']}: {alarm_line(alarm)}" for stage in view["stages"] for alarm in stage.get("alarms") or []]


def alarm_line(alarm: Mapping[str, Any]) -> str:
    first, last, count = alarm["first_step"], alarm["last_step"], alarm["count"]
    when = f"at step {last}" if count == 1 else f"{count} times, at steps {first} to {last}"
    targets = ", ".join(map(str, alarm["rolled_back_to"]))
    back = f". Rolled back to step {targets}" if targets else ""
    return f"sentinel {alarm['sentinel']} ({alarm['action']}) {when}: {alarm['message']}{back}"


def gate_lines(gate: Mapping[str, Any] | None) -> list[str]:
    """Return the verdict, its reasons, and one line a rule."""
    if not gate:
        return ["gate: no verdict"]
    lines = [f"gate: {str(gate.get('verdict')).upper()}"]
    lines += [f"  because {reason}" for reason in gate.get("reasons") or []]
    return lines + [f"  {RULE_TITLES[role]} {rule_text(rule)}" for role, rule in gate_rules(gate)]


def rule_text(rule: Mapping[str, Any]) -> str:
    """Return `verdict: before -> after, gain, what was needed, 90 % interval [low, high]`."""
    share = rule.get("scale") == "relative"
    bounds = [amount(bound, share) for bound in rule.get("interval") or []]
    level = rule.get("interval_level")
    name = "interval" if level is None else f"{100 * level:g} % interval"
    interval = f", {name} [{', '.join(bounds)}]" if bounds else ""
    return f"{str(rule.get('verdict', '-')).upper()}: {rule.get('detail')}{interval}"


def amount(value: Any, share: bool) -> str:
    """Return a number, as a percentage for a share."""
    return f"{value:+.1%}" if share and isinstance(value, int | float) else show_number(value)


def model_line(model: Mapping[str, Any] | None) -> str:
    """Return which version was registered, with the aliases that it had then: only the registry knows those of now."""
    if not model:
        return "model: none registered"
    aliases = ", ".join(model.get("aliases") or []) or "without an alias"
    weights = str(model["weights_sha256"])[:16]
    return f"model: registered as {model['name']} version {model['version']} (then {aliases}), weights {weights}…"
