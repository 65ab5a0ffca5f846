"""What a person sees without a terminal."""

from __future__ import annotations

import io
import os

from flows.commands.live import LineObserver
from flows.commands.output import unbroken
from tasks.progress import Progress


def test_lines_say_something_new_each_time() -> None:
    shown = io.StringIO()
    told = LineObserver(shown)
    for stage, step in (("grpo", 1), ("grpo", 1), ("grpo", 2), ("evaluate", 1)):
        values = {"reward/mean": 0.25}
        told.stage_progress(Progress(stage, step, total=4, phase="step", seconds=2.0, first_step=0, values=values))
    assert shown.getvalue().splitlines() == [
        "grpo: step 1/4, reward 0.25, 6.0 s left",
        "evaluate: step 1/4, reward 0.25, 6.0 s left",
    ]


def test_a_reader_who_went_away_breaks_nothing() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stream:
        told = LineObserver(stream)
        told.note("to nobody")
        told.note("to nobody again")
        with unbroken(stream):
            print("the summary", file=stream)
    # Closing flushed what was left: with the pipe still behind it, that would have raised.
