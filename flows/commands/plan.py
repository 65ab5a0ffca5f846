"""`tidegate plan`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from flows.commands.output import Answer
from flows.commands.summary import make_console
from flows.config import load_pipeline
from tasks.planning import ChainState
from tasks.plans import LOST_VERSION, PlanState, StagePlan, make_plan
from tasks.rivals import adopt_champion, is_registered, look_at_champion
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

    A complete run keeps the champion that it was compared with, as long as that evaluation is there. Whether what it
    registered is still there is asked, too.

    Raises:
        ServerUnreachableError: the registry does not answer.
    """
    record = load_run(state.root, state.run_id)
    if record is not None and record.state.is_complete:
        adopt_champion(state, record)
    plans = make_plan(state)
    if "policy" in state.finished and not (state.champion_known and "evaluate" in state.finished):
        plans = _plan_against_champion(state, plans)
    return [_if_registered(line, state) for line in plans]


def _if_registered(line: StagePlan, state: ChainState) -> StagePlan:
    if line.name != "register" or line.state is not PlanState.CACHED or is_registered(state, read_only=True):
        return line
    return replace(line, state=PlanState.RUNS, why=LOST_VERSION)


def _plan_against_champion(state: ChainState, plans: list[StagePlan]) -> list[StagePlan]:
    """Return `plans` (made with the champion in `state`, or none) as they are with the champion of now."""
    found = look_at_champion(state)
    if found is None and state.champion is None:
        return plans
    version, state.champion = found or ("", None)
    for name in AFTER_CHAMPION:
        state.finished.pop(name, None)
    if found is not None and state.champion is None:
        # Its files would be an input; what follows from them is known once a run has them.
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
