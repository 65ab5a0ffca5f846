"""`tidegate plan`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from flows.commands.output import Answer
from flows.commands.summary import make_console
from flows.config import load_pipeline
from tasks.planning import ChainState
from tasks.plans import PlanState, StagePlan, make_plan
from tasks.rivals import adopt_champion, look_at_champion
from tasks.runs import load_run

AFTER_CHAMPION = ("evaluate", "gate", "register")
"""Stages that another champion means another result for."""


def print_plan(configs: Sequence[Path], settings: Sequence[str], root: str | Path | None, *, as_json: bool) -> Answer:
    """Print what a run would do. Nothing is written, and no process is started."""
    state = ChainState.begin(load_pipeline(configs, settings, root))
    plans = plan_of(state)
    if not as_json:
        _print_table(state, plans)
    return Answer({"run_id": state.run_id, "stages": [_row(plan) for plan in plans]})


def _print_table(state: ChainState, plans: Sequence[StagePlan]) -> None:
    console = make_console(sys.stdout)
    table = Table(box=None, pad_edge=False)
    for title in ("stage", "plan", "why"):
        table.add_column(title, no_wrap=title != "why", overflow="fold")
    for plan in plans:
        table.add_row(plan.name, plan.state.value, plan.why)
    console.print(f"run {state.run_id} under {state.root}")
    console.print(table)


def plan_of(state: ChainState) -> list[StagePlan]:
    """Return the plan of a run; asks the registry for the champion when a policy is there to be compared with it.

    Raises:
        ServerUnreachableError: the registry does not answer.
    """
    record = load_run(state.root, state.run_id)
    if record is not None and record.state.is_complete:
        adopt_champion(state, record)
    plans = make_plan(state)
    if "grpo" not in state.finished or state.champion_known:
        return plans
    found = look_at_champion(state)
    if found is None:
        return plans
    version, state.champion = found
    for name in AFTER_CHAMPION:
        state.finished.pop(name, None)
    if state.champion is None:  # Its files would be an input; what follows from them is known once a run has them.
        why = f"compares with the champion, version {version} of {state.config.registry.model_name}, not yet downloaded"
        known = [line for line in plans if line.name not in AFTER_CHAMPION]
        waits = [StagePlan(name, PlanState.WAITS, "for evaluate") for name in AFTER_CHAMPION[1:]]
        return [*known, StagePlan(AFTER_CHAMPION[0], PlanState.RUNS, why), *waits]
    return make_plan(state)


def _row(plan: StagePlan) -> dict[str, str | None]:
    return {
        "name": plan.name,
        "state": plan.state.value,
        "why": plan.why,
        "spec_hash": plan.spec.spec_hash if plan.spec else None,
        "directory": str(plan.directory) if plan.directory else None,
    }
