"""The benchmarks run: Tidegate's side of the step, memory samples, ratios. TRL's side needs its own environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks are scripts that import each other by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.usefixtures("importable")
def test_tidegate_side_trains_on_the_prompts_in_their_order(tiny_checkpoint: Path, tmp_path: Path) -> None:
    import tidegate_side
    from shape import Events, Shape, load_shape, read_events

    prompts = [f"Write about number {number}." for number in range(4)]
    Shape(
        model=str(tiny_checkpoint),
        prompts=prompts,
        num_steps=2,
        prompts_per_step=2,
        group_size=2,
        micro_batch_size=2,
        max_new_tokens=4,
        learning_rate=1e-3,
        seed=5,
        engine="transformers",
    ).save(tmp_path / "shape.json")
    shape = load_shape(tmp_path / "shape.json")
    seen: list[str] = []
    do_step = tidegate_side.do_step

    def spy(trainer: Any, step: int, events: Events) -> float:
        (indices,) = trainer.sampler.rounds(step)
        seen.extend(trainer.sampler.prompts.rows[index].prompt[-1].content for index in indices)
        return do_step(trainer, step, events)

    tidegate_side.do_step = spy
    try:
        tidegate_side.train(shape, Events(tmp_path / "events.jsonl"))
    finally:
        tidegate_side.do_step = do_step
    events = read_events(tmp_path / "events.jsonl")
    assert [event["kind"] for event in events] == ["built", "begin", "step", "begin", "step", "done"]
    assert seen == prompts
    steps = [event for event in events if event["kind"] == "step"]
    assert all(len(step["lengths"]) == 4 and min(step["lengths"]) >= 1 for step in steps)
    assert all(step["phases"]["train"] > 0.0 and step["cpu_seconds"] > 0.0 for step in steps)
    assert all(sum(step["phases"].values()) <= step["seconds"] + 0.01 for step in steps)


@pytest.mark.usefixtures("importable")
def test_a_process_tree_is_measured_with_its_children(tmp_path: Path) -> None:
    from processes import measure

    child = "import time; held = bytearray(b'x' * 2**26); time.sleep(0.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    measured = measure([sys.executable, "-c", parent], tmp_path / "log", interval_seconds=0.02)
    assert measured.exit_code == 0
    assert measured.peak_bytes("rss") >= measured.peak_bytes("pss") > 2**26
    assert measured.peak_bytes("pss", end=measured.samples[0].time) < 2**26


@pytest.mark.usefixtures("importable")
def test_numbers_are_of_the_steps_after_the_first() -> None:
    from bench_step import compare, describe, summarise
    from processes import Measured, Sample

    def run(scale: float) -> dict[str, Any]:
        events: list[dict[str, Any]] = [{"kind": "built", "time": 0.0, "threads": 1, "weights": "torch.float32"}]
        for step, seconds in enumerate((9.0, 1.0 * scale, 3.0 * scale, 2.0 * scale), start=1):
            phases = {"train": seconds / 2}
            events.append({"kind": "begin", "time": float(step), "step": step})
            facts = {"seconds": seconds, "cpu_seconds": seconds, "lengths": [4, 6], "phases": phases}
            events.append({"kind": "step", "time": step + 0.5, "step": step, **facts})
        events.append({"kind": "done", "time": 6.0, "rewards": [0.0] * 4})
        samples = [Sample(0.5, 9 << 30, 9 << 30), Sample(2.0, int(scale * 2**30), int(scale * 2**30))]
        return describe("trl", 0, events, Measured(0, 6.0, samples))

    theirs, ours = summarise([run(2.0)]), summarise([run(1.0)])
    assert (ours["step_seconds"], theirs["step_seconds"]) == (2.0, 4.0)
    assert ours["milliseconds_per_token"] == 200.0
    ratios = compare(ours, theirs)
    assert ratios["step_seconds"] == ratios["peak_rss_gib"] == ratios["train_seconds"] == 0.5
    assert ratios["tokens_per_step"] == 1.0


def test_memory_benchmark_compares_both_ways(tmp_path: Path) -> None:
    output = tmp_path / "memory.json"
    sizes = ["--vocabulary=4096", "--width=32", "--rows=2", "--tokens=512", "--threads=1", "--formats=float32"]
    command = [sys.executable, str(BENCHMARKS / "bench_memory.py"), *sizes, f"--output={output}"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    found = json.loads(output.read_text())["float32"]
    assert found["chunked"]["peak_mib"] < found["plain"]["peak_mib"]
    assert max(found["relative_gradient_difference"].values()) < 1e-5
