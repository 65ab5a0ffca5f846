"""What a person sees without a terminal."""

from __future__ import annotations

import io

from flows.commands.live import LineObserver
from tasks.progress import Progress


def test_lines_say_something_new_each_time() -> None:
    shown = io.StringIO()
    told = LineObserver(shown)
    for stage, step in (("policy", 1), ("policy", 1), ("policy", 2), ("evaluate", 1)):
        values = {"reward/mean": 0.25}
        told.stage_progress(Progress(stage, step, total=4, phase="step", seconds=2.0, first_step=0, values=values))
    assert shown.getvalue().splitlines() == [
        "policy: step 1/4, reward 0.25, 6.0 s left",
        "evaluate: step 1/4, reward 0.25, 6.0 s left",
    ]
