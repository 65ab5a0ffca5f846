"""`tidegate show` says what the sentinels of a run's stages said."""

from __future__ import annotations

import json

from scripted_stages.chain import run

from training_core.sentinels import ALARMS_FILE, Alarm, append_alarms


def test_show_names_the_alarms_of_each_stage(scripted, here) -> None:  # type: ignore[no-untyped-def]
    whole = run(scripted)
    path = whole.state.finished["policy"].directory.path / ALARMS_FILE
    assert "sentinel" not in here("show")[1]
    for step in (2, 3):
        append_alarms(path, [Alarm("kl_budget", "warn", step, "too far", 0.2, 0.1)], 0)
    append_alarms(path, [Alarm("grad_norm", "roll_back", 4, "large", 20.0, 10.0)], 0, rolled_back_to=3)
    lines = here("show")[1].splitlines()
    assert "policy: sentinel kl_budget (warn) 2 times, at steps 2 to 3: too far" in lines
    assert "policy: sentinel grad_norm (roll_back) at step 4: large. Rolled back to step 3" in lines
    stages = {stage["name"]: stage["alarms"] for stage in json.loads(here("show", "--json")[1])["stages"]}
    assert [(entry["sentinel"], entry["count"]) for entry in stages["policy"]] == [("kl_budget", 2), ("grad_norm", 1)]
    assert stages["gate"] == []
