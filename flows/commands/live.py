"""What a person sees while a run goes on: a live block on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tasks.alarms import StageAlarm
from tasks.progress import Pace, Progress, RunObserver
from tasks.showing import show_duration

LINE_EVERY_SECONDS = 5.0
REFRESHES_PER_SECOND = 4
SHOWN = (
    ("reward", ("reward/mean",)),
    ("KL", ("kl/policy_ref_nats",)),
    ("length", ("rollout/length_mean_tokens",)),
    ("loss", ("train/loss",)),
    ("critic loss", ("critic/loss",)),
    ("accuracy", ("train/accuracy", "rewards/accuracy", "validation/accuracy")),
    ("margin", ("rewards/margin_mean",)),
    ("tokens/s", ("rollout/tokens_per_second", "time/tokens_per_second")),
)
"""Label -> the metrics that it may stand for; the first one that is there is shown."""


def shown_values(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (label, text) of the few metrics that are worth a glance."""
    found = []
    for label, names in SHOWN:
        numbers = [values[name] for name in names if isinstance(values.get(name), int | float)]
        if numbers:
            found.append((label, f"{numbers[0]:.4g}"))
    return found


class LineObserver(RunObserver):
    """One line an event; progress when there is some, every few seconds at most."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self._pace = Pace(LINE_EVERY_SECONDS)

    def say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def run_started(self, run_id: str, stages: list[str]) -> None:
        self.say(f"run {run_id}: {', '.join(stages)}")

    def stage_started(self, stage: str, state: str, why: str) -> None:
        self.say(f"{stage}: {state} ({why})")

    def stage_progress(self, progress: Progress) -> None:
        if not self._pace.is_due(progress):
            return
        parts = [f"{progress.stage}: {progress.phase or 'step'} {progress.step}/{progress.total}"]
        parts += [f"{label} {text}" for label, text in shown_values(progress.values)]
        if progress.seconds_left is not None:
            parts.append(f"{show_duration(progress.seconds_left)} left")
        self.say(", ".join(parts))

    def stage_alarm(self, stage: str, alarm: StageAlarm) -> None:
        self.say(f"warning: {stage}: {alarm.text}")

    def stage_finished(self, stage: str, state: str, seconds: float) -> None:
        self.say(f"{stage}: {state}" + ("" if state == "Cached" else f" after {show_duration(seconds)}"))

    def stage_stopping(self, stage: str, grace_seconds: float) -> None:
        self.say(f"{stage}: asked to save and stop, at most {show_duration(grace_seconds)} (Ctrl-C again: at once)")

    def note(self, text: str) -> None:
        self.say(text)


class TerminalObserver(LineObserver):
    """Finished stages as lines above one live block for the stage that runs."""

    def __init__(self, console: Console, live: Live) -> None:
        super().__init__(sys.stderr)
        self.console = console
        self.live = live

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def stage_started(self, stage: str, state: str, why: str) -> None:
        super().stage_started(stage, state, why)
        self.live.update(Text(f"{stage}: starting"))

    def stage_progress(self, progress: Progress) -> None:
        self.live.update(_block(progress))

    def stage_finished(self, stage: str, state: str, seconds: float) -> None:
        self.live.update(Text(""))
        super().stage_finished(stage, state, seconds)

    def stage_stopping(self, stage: str, grace_seconds: float) -> None:
        self.live.update(Text(""))
        super().stage_stopping(stage, grace_seconds)


def _block(progress: Progress) -> Group:
    total = max(progress.total, 1)
    head = Table.grid(padding=(0, 1))
    head.add_row(
        Text(progress.stage, style="bold"),
        ProgressBar(total=total, completed=min(progress.step, total), width=30),
        f"{progress.phase or 'step'} {progress.step}/{progress.total}",
        "" if progress.seconds_left is None else f"{show_duration(progress.seconds_left)} left",
    )
    values = "   ".join(f"{label} {text}" for label, text in shown_values(progress.values))
    return Group(head, Text(f"  {values}", style="dim"))


@contextlib.contextmanager
def make_observer(quiet_stdout: bool) -> Iterator[RunObserver]:
    """Yield an observer for where output goes: with `quiet_stdout` everything goes to standard error."""
    stream = sys.stderr if quiet_stdout else sys.stdout
    console = Console(file=stream)
    if not console.is_terminal or console.is_dumb_terminal:
        yield LineObserver(stream)
        return
    with Live(
        Text(""), console=console, refresh_per_second=REFRESHES_PER_SECOND, transient=True, redirect_stderr=False
    ) as live:
        yield TerminalObserver(console, live)
