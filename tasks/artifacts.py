"""Tables, reports and progress bars in Prefect's UI. None of them is worth a failed run: trouble is logged."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from tasks.showing import gate_rules

logger = logging.getLogger(__name__)

STAGE_TABLE_KEY = "stages"
GATE_REPORT_KEY = "gate-report"
TABLE_COLUMNS = ("stage", "state", "seconds", "attempts", "spec_hash", "why", "error")

_progress_ids: dict[tuple[str, str], UUID] = {}
"""(flow run, stage) -> its progress artifact."""


def flow_run_id() -> str | None:
    """Return the id of the Prefect flow run around this call, or None outside of one."""
    if "prefect" not in sys.modules:
        return None
    from prefect.runtime import flow_run

    return str(flow_run.id) if flow_run.id else None


def publish_stage_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Show the stages of a run: one row each, with state, seconds and why it ran or was cached."""
    with _quietly("the stage table") as wanted:
        if wanted:
            from prefect.artifacts import create_table_artifact

            create_table_artifact(stage_table(rows), key=STAGE_TABLE_KEY, description="Stages of this run")


def publish_gate_report(gate: Mapping[str, Any]) -> None:
    """Show the gate's verdict (the content of gate.json, or the gate's summary) as a report."""
    with _quietly("the gate's report") as wanted:
        if wanted:
            from prefect.artifacts import create_markdown_artifact

            create_markdown_artifact(gate_markdown(gate), key=GATE_REPORT_KEY, description="What the gate decided")


def publish_progress(stage: str, step: int, total: int) -> None:
    """Show how far a stage is. Call it at most every few seconds: each call is a request to the server."""
    with _quietly("progress") as wanted:
        if wanted and total > 0:
            from prefect.artifacts import create_progress_artifact, update_progress_artifact

            percent = round(100 * min(step, total) / total, 1)
            where = (str(flow_run_id()), stage)
            if where in _progress_ids:
                update_progress_artifact(_progress_ids[where], percent)
            else:
                key = "progress-" + re.sub(r"[^a-z0-9]+", "-", stage.lower()).strip("-")
                _progress_ids[where] = create_progress_artifact(  # type: ignore[assignment]
                    percent, key=key, description=f"{stage}: steps done, in percent"
                )


def stage_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the columns that people look for, numbers rounded."""
    table = []
    for row in rows:
        entry = {column: row.get(column) for column in TABLE_COLUMNS}
        seconds = entry["seconds"]
        entry["seconds"] = round(seconds, 1) if isinstance(seconds, int | float) else None
        table.append({column: "" if value is None else value for column, value in entry.items()})
    return table


def gate_markdown(gate: Mapping[str, Any]) -> str:
    """Return a report of gate.json: verdict, every rule with its numbers, and the reasons."""
    lines = [f"# Gate: {str(gate.get('verdict', 'unknown')).upper()}", ""]
    rules = [rule for _, rule in gate_rules(gate)]
    if rules:
        lines += ["| rule | verdict | detail |", "|---|---|---|"]
        lines += [f"| {_cell(r.get('name'))} | {_cell(r.get('verdict'))} | {_cell(r.get('detail'))} |" for r in rules]
        lines.append("")
    if reasons := gate.get("reasons"):
        lines += ["**Reasons**", "", *[f"- {_cell(reason)}" for reason in reasons], ""]
    for name, digest in (gate.get("weights_sha256") or {}).items():
        lines.append(f"- {name}: weights `{str(digest)[:16]}…`")
    return "\n".join(lines).rstrip() + "\n"


def _cell(value: Any) -> str:
    return str("" if value is None else value).replace("|", "\\|").replace("\n", " ")


@contextlib.contextmanager
def _quietly(what: str) -> Iterator[bool]:
    """Yield whether there is a flow run to attach to; swallow trouble: observability must not stop a run."""
    try:
        yield flow_run_id() is not None
    except Exception as error:
        logger.warning("%s could not be shown in Prefect: %s", what, error)
