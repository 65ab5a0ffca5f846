"""A GRPO step of Tidegate beside one of TRL's GRPOTrainer: seconds and peak memory, as ratios.

    make bench-trl        or        python tests/benchmarks/bench_step.py --trl-python .venv-trl/bin/python

Both sides train the same checkpoint on the same prompts with the same reward, learning rate and batch, in turns, each
time in a new process. Compare within one run only: a shared machine is not the same machine an hour later. Where others
use the processors too, seconds say little; processor seconds with `--threads 1` (threads that wait for each other burn
them) still compare.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from processes import Measured, measure
from shape import Shape, read_events

from training_core.config.intake import INPUT, IntakeConfig
from training_core.protocol.atomic import write_json
from training_core.protocol.digests import path_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageSpec
from training_core.stages import STAGES

HERE = Path(__file__).parent
GIB = 2**30
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default="trl,tidegate", help="what to run in turns, of: trl, tidegate")
    parser.add_argument("--trl-python", default=".venv-trl/bin/python", help="interpreter that has TRL")
    parser.add_argument("--checkpoint", default=".models/SmolLM2-135M-Instruct.Q4_1.gguf", help="GGUF file or folder")
    parser.add_argument("--prompts", default="examples/demo_data/train_prompts.jsonl", help="JSON lines with `prompt`")
    parser.add_argument("--work", default=".bench", help="folder for the taken-in checkpoint, logs and results")
    parser.add_argument("--steps", type=int, default=4, help="of each process; the first is left out of the times")
    parser.add_argument("--repetitions", type=int, default=2, help="processes of each side")
    parser.add_argument("--prompts-per-step", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--engine", default="vllm", help="Tidegate's rollout engine: vllm or transformers")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing on both sides")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="OMP_NUM_THREADS of both sides")
    return parser.parse_args(arguments)


def take_in(checkpoint: str, work: Path) -> Path:
    """Return a folder with the checkpoint as Tidegate's intake stores it, made once."""
    source = Artifact(path=checkpoint, sha256=path_digest(Path(checkpoint)))
    spec = StageSpec(
        stage="sft_intake",
        stage_version=STAGES["sft_intake"].version,
        config=IntakeConfig(source=INPUT).model_dump(mode="json"),
        inputs={"source": source},
    )
    directory = StageDirectory(work / "intake" / source.sha256[:16])
    if not directory.result_path.exists():
        directory.prepare(spec)
        # In a process of its own: pages of libraries that this one maps too would count by half for Tidegate's side.
        subprocess.run(
            [sys.executable, "-m", "training_core", str(directory.spec_path)], check=True, env={**os.environ, **QUIET}
        )
    return directory.outputs_path / "model"


def build_shape(arguments: argparse.Namespace, model: Path) -> Shape:
    lines = Path(arguments.prompts).read_text().splitlines()
    needed = arguments.steps * arguments.prompts_per_step
    if len(lines) < needed:
        raise SystemExit(f"{arguments.prompts} has {len(lines)} prompts, {needed} are needed")
    # Spread over the file, whose neighbours are about the same thing.
    chosen = [json.loads(lines[number * len(lines) // needed])["prompt"] for number in range(needed)]
    return Shape(
        model=str(model.resolve()),
        prompts=chosen,
        num_steps=arguments.steps,
        prompts_per_step=arguments.prompts_per_step,
        group_size=arguments.group_size,
        micro_batch_size=arguments.micro_batch_size,
        max_new_tokens=arguments.max_new_tokens,
        learning_rate=arguments.learning_rate,
        seed=1,
        engine=arguments.engine,
        recompute=arguments.recompute,
    )


def run_side(side: str, python: str, shape: Shape, repetition: int, work: Path, threads: int) -> dict[str, Any]:
    """Run one side in a new process; return what came of it.

    Raises:
        SystemExit: it failed.
    """
    log = work / f"{side}-{repetition}.log"
    with tempfile.TemporaryDirectory() as folder:
        shape_path, events_path = Path(folder) / "shape.json", Path(folder) / "events.jsonl"
        replace(shape, seed=shape.seed + repetition).save(shape_path)
        command = [python, str(HERE / f"{side}_side.py"), str(shape_path), str(events_path)]
        measured = measure(command, log, {**QUIET, "OMP_NUM_THREADS": str(threads)})
        events = read_events(events_path)
    if measured.exit_code or not events or events[-1]["kind"] != "done":
        raise SystemExit(f"{side} ended with exit code {measured.exit_code}; its output is in {log}")
    return describe(side, repetition, events, measured)


def describe(side: str, repetition: int, events: list[dict[str, Any]], measured: Measured) -> dict[str, Any]:
    """Return one process' numbers. Peaks are of the time between the first step's begin and the last one's end."""
    steps = [event for event in events if event["kind"] == "step"]
    start = next(event["time"] for event in events if event["kind"] == "begin")
    built = next(event for event in events if event["kind"] == "built")
    end = steps[-1]["time"]
    return {
        "side": side,
        "repetition": repetition,
        "step_seconds": [step["seconds"] for step in steps],
        "step_cpu_seconds": [step["cpu_seconds"] for step in steps],
        "step_tokens": [sum(step["lengths"]) for step in steps],
        "mean_length_tokens": [statistics.mean(step["lengths"]) for step in steps],
        "phases": [step["phases"] for step in steps],
        "peak_pss_bytes": measured.peak_bytes("pss", start, end),
        "peak_rss_bytes": measured.peak_bytes("rss", start, end),
        "process_peak_rss_bytes": measured.peak_bytes("rss"),
        "process_seconds": measured.seconds,
        "rewards": events[-1]["rewards"],
        "threads": built["threads"],
        "weights": built["weights"],
    }


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return one side's numbers over its processes: medians of steps after the first, the largest peak."""
    columns = ("step_seconds", "step_cpu_seconds", "step_tokens")
    later = [row for run in runs for row in list(zip(*(run[name] for name in columns), strict=True))[1:]]
    phases = [phases for run in runs for phases in run["phases"][1:]]
    return {
        "step_seconds": statistics.median(seconds for seconds, _, _ in later),
        "step_cpu_seconds": statistics.median(cpu for _, cpu, _ in later),
        "tokens_per_step": statistics.mean(tokens for _, _, tokens in later),
        "milliseconds_per_token": statistics.median(1000 * seconds / tokens for seconds, _, tokens in later),
        "cpu_milliseconds_per_token": statistics.median(1000 * cpu / tokens for _, cpu, tokens in later),
        "mean_length_tokens": statistics.mean(length for run in runs for length in run["mean_length_tokens"][1:]),
        "peak_pss_gib": max(run["peak_pss_bytes"] for run in runs) / GIB,
        "peak_rss_gib": max(run["peak_rss_bytes"] for run in runs) / GIB,
        **{f"{name}_seconds": statistics.median(phase[name] for phase in phases) for name in phases[0]},
    }


def compare(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    """Return Tidegate's numbers divided by TRL's, where both have one."""
    return {name: ours[name] / theirs[name] for name in ours if name in theirs}


def show(summaries: dict[str, dict[str, float]], ratios: dict[str, float]) -> str:
    names = sorted({name for values in summaries.values() for name in values})
    lines = [f"{'':32}" + "".join(f"{side:>12}" for side in summaries) + (f"{'ratio':>12}" if ratios else "")]
    for name in names:
        cells = [f"{values[name]:12.3f}" if name in values else f"{'':12}" for values in summaries.values()]
        lines.append(f"{name:32}" + "".join(cells) + (f"{ratios[name]:12.3f}" if name in ratios else ""))
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> dict[str, Any]:
    options = parse(arguments)
    if options.steps < 2:
        raise SystemExit("--steps must be at least 2: the first is left out of the times")
    work = Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    shape = build_shape(options, take_in(options.checkpoint, work))
    pythons = {"trl": options.trl_python, "tidegate": sys.executable}
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides.split(",")}
    for repetition in range(options.repetitions):
        for side, done in runs.items():
            done.append(run_side(side, pythons[side], shape, repetition, work, options.threads))
            times = ", ".join(f"{seconds:.1f}" for seconds in done[-1]["step_seconds"])
            print(f"{side} {repetition + 1}/{options.repetitions}: steps of {times} s", flush=True)
    summaries = {side: summarise(done) for side, done in runs.items()}
    ratios = compare(summaries["tidegate"], summaries["trl"]) if len(summaries) == 2 else {}
    result = {"shape": vars(shape), "threads": options.threads, "runs": runs, "sides": summaries, "ratios": ratios}
    write_json(work / "step.json", result)
    print(show(summaries, ratios))
    print(f"All numbers: {work / 'step.json'}")
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
