"""What a person sees without a terminal."""

from __future__ import annotations

import io

import pytest

from flows.commands.live import LineObserver, shown_values
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


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (
            {"policy/loss": 0.1, "critic/loss": 0.5, "kl/policy_ref_nats": 0.25},
            [("KL", "0.25"), ("critic loss", "0.5")],
        ),
        (
            {"train/loss": 0.7, "rewards/accuracy": 0.75, "rewards/margin_mean": 0.125, "validation/accuracy": 0.5},
            [("loss", "0.7"), ("accuracy", "0.75"), ("margin", "0.125")],
        ),
    ],
)
def test_each_kind_of_training_has_numbers_to_show(values: dict[str, float], shown: list[tuple[str, str]]) -> None:
    assert shown_values(values) == shown
