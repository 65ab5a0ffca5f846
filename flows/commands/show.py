"""`tidegate show`, `list` and `report`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from flows.commands.errors import known_error
from flows.commands.output import Answer
from flows.commands.summary import make_console, print_summary
from flows.config import resolve_root
from tasks.roots import write_problem
from tasks.runs import find_run, load_runs, missing_root, report_path
from tasks.views import run_row, run_view
from training_core.errors import ConfigurationError

REPORT_SUFFIXES = (".html", ".htm")
COLUMNS = ("run_id", "state", "verdict", "model", "changed")


def print_run(run_name: str, root: str | Path | None, *, as_json: bool) -> Answer:
    """Print one run."""
    where = resolve_root(root)
    record = find_run(where, run_name)
    view = run_view(record, where)
    if not as_json:
        print_summary(record, view, where, sys.stdout)
        for name, entry in record.stages.items():
            if entry.error:
                print(f"{name}: {entry.error}")
    return Answer(view)


def print_runs(root: str | Path | None, *, as_json: bool) -> Answer:
    """Print all runs, the one that changed last first; what is wrong with a damaged one comes after them."""
    where = resolve_root(root)
    rows = [run_row(run, where) for run in load_runs(where)]
    if not as_json:
        _print_rows(rows, where)
    return Answer({"runs": rows})


def _print_rows(rows: list[dict[str, Any]], root: Path) -> None:
    if not rows:
        print(
            f"no runs under {root}. Start one with `tidegate run CONFIG`"
            if root.exists()
            else f"no runs: {missing_root(root)}"
        )
        return
    table = Table(box=None, pad_edge=False)
    for title in COLUMNS:
        table.add_column(title.replace("_", " "), no_wrap=True)
    for row in rows:
        table.add_row(*("-" if row[name] is None else str(row[name]) for name in COLUMNS))
    console = make_console(sys.stdout)
    console.print(table)
    for row in rows:
        if row["error"]:
            console.print(f"{row['run_id']}: {row['error']}")


def write_run_report(run_name: str, root: str | Path | None, output: Path | None) -> None:
    """Write the HTML report of a run and print its path.

    Raises:
        ConfigurationError: no such run, or `output` cannot be written.
    """
    from tasks.report import write_report

    where = resolve_root(root)
    record = find_run(where, run_name)
    if output is not None:
        _check_output(output)
    target = output or report_path(where, record.run_id)
    try:
        print(write_report(run_view(record, where), target, root=where))
    except OSError as error:
        if (known := known_error(error, target.parent)) is not None:
            raise known from None
        raise


def _check_output(output: Path) -> None:
    """Refuse what a finished file could not be renamed to."""
    folder = output.parent
    if os.path.isdir(output):
        problem = f"is a folder. Name a file, for example {output / 'report.html'}"
    elif os.path.lexists(output) and not os.path.isfile(output):
        problem = "is no plain file. Name a file"
    elif not os.path.isdir(folder):
        problem = f"is to lie in {folder}, which is no folder. Make it first, or name another file"
    elif output.suffix.lower() not in REPORT_SUFFIXES:
        problem = f"must end in {' or '.join(REPORT_SUFFIXES)}: a report is HTML, and what lies there is overwritten"
    elif (error := write_problem(folder)) is not None:
        problem = f"cannot be written in {folder}: {error.strerror}. Name a file in a folder that you may write"
    else:
        return
    raise ConfigurationError(f"--output {output} {problem}")
