"""`tidegate show`, `list` and `report`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from flows.commands.output import print_json
from flows.commands.summary import make_console, print_summary
from flows.config import resolve_root
from tasks.runs import RunRecord, find_run, list_run_ids, load_run, report_path
from tasks.views import live_state, run_view


def print_run(run_name: str, root: Path | None, *, as_json: bool) -> None:
    """Print one run."""
    where = resolve_root(root)
    record = find_run(where, run_name)
    view = run_view(record, where)
    if as_json:
        print_json(view)
    else:
        print_summary(record, view, where, sys.stdout)
        for name, entry in record.stages.items():
            if entry.error:
                print(f"{name}: {entry.error}")


def print_runs(root: Path | None, *, as_json: bool) -> None:
    """Print all runs, the one that changed last first."""
    where = resolve_root(root)
    records = [record for run_id in list_run_ids(where) if (record := load_run(where, run_id)) is not None]
    rows = [_row(record, where) for record in records]
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(f"no runs under {where}. Start one with `tidegate run CONFIG`")
        return
    table = Table(box=None, pad_edge=False)
    for title in rows[0]:
        table.add_column(title.replace("_", " "), no_wrap=True)
    for row in rows:
        table.add_row(*("-" if value is None else str(value) for value in row.values()))
    make_console(sys.stdout).print(table)


def _row(record: RunRecord, root: Path) -> dict[str, Any]:
    model = record.model or {}
    return {
        "run_id": record.run_id,
        "state": live_state(record, root).value,
        "verdict": (record.gate or {}).get("verdict"),
        "model": f"{model['model_name']} {model['version']}" if model else None,
        "changed": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.updated)),
    }


def write_run_report(run_name: str, root: Path | None, output: Path | None) -> None:
    """Write the HTML report of a run and print its path."""
    from tasks.report import write_report

    where = resolve_root(root)
    record = find_run(where, run_name)
    target = output or report_path(where, record.run_id)
    print(write_report(run_view(record, where), target, root=where))
