"""The stage `reward_model` as a real process: killed or stopped, then run again to the same bits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from training_core.errors import EXIT_OK, EXIT_TEMPORARY
from training_core.protocol.digests import path_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageResult, StageSpec
from training_core.stages import STAGES

NUM_STEPS = 90


def write_pairs(path: Path, num_pairs: int, side: str) -> Path:
    def turns(role: str, texts: list[str]) -> list[list[dict[str, str]]]:
        return [[{"role": role, "content": text}] for text in texts]

    table = {
        "example_id": [f"e{i}" for i in range(num_pairs)],
        "group_id": [f"{side}{i}" for i in range(num_pairs)],
        "prompt_messages": turns("user", [f"Tell me about {i}." for i in range(num_pairs)]),
        "chosen_messages": turns("assistant", [f"A warm and happy day, {i}." for i in range(num_pairs)]),
        "rejected_messages": turns("assistant", [f"A cold and sad day, {i}." for i in range(num_pairs)]),
        "margin": pyarrow.nulls(num_pairs, pyarrow.float64()),
    }
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    return path


@pytest.fixture(scope="module")
def spec(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> StageSpec:
    folder = tmp_path_factory.mktemp("pairs")
    paths = {
        "model": tiny_checkpoint,
        "train_pairs": write_pairs(folder / "train.parquet", 12, "train"),
        "validation_pairs": write_pairs(folder / "validation.parquet", 3, "validation"),
    }
    config = {
        "optimizer": {"learning_rate": 1e-4, "schedule": {"kind": "cosine", "warmup_steps": 5}},
        "batch_size": 4,
        "micro_batch_size": 2,
        "num_epochs": NUM_STEPS * 4 // 12,
        "checkpoint_every_steps": 7,
    }
    inputs = {name: Artifact(path=str(path), sha256=path_digest(path)) for name, path in paths.items()}
    version = STAGES["reward_model"].version
    return StageSpec(stage="reward_model", stage_version=version, config=config, inputs=inputs, seed=4)


def start(spec: StageSpec, path: Path) -> subprocess.Popen[bytes]:
    directory = StageDirectory(path)
    directory.prepare(spec)
    command = [sys.executable, "-m", "training_core", str(directory.spec_path)]
    with (path / "output.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def finish(spec: StageSpec, path: Path) -> StageResult:
    code = start(spec, path).wait(timeout=300)
    assert code == EXIT_OK, (path / "output.log").read_text()[-2000:]
    result = StageDirectory(path).result()
    assert result is not None
    return result


@pytest.fixture(scope="module")
def whole(spec: StageSpec, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StageResult]:
    path = tmp_path_factory.mktemp("whole")
    return path, finish(spec, path)


def interrupt(process: subprocess.Popen[bytes], metrics: Path, num_lines: int, number: int) -> int:
    """Send signal `number` once `metrics` has `num_lines` lines; return the exit code."""
    deadline = time.monotonic() + 300
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < num_lines:
        assert process.poll() is None, "the stage ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    return process.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_stopped_and_run_again_ends_with_the_same_bits(
    spec: StageSpec, whole: tuple[Path, StageResult], tmp_path: Path, number: int
) -> None:
    process = start(spec, tmp_path)
    code = interrupt(process, tmp_path / "metrics.jsonl", 17, number)
    if number == signal.SIGTERM:
        assert code == EXIT_TEMPORARY
        assert json.loads((tmp_path / "error.json").read_text())["type"] == "PreemptedError"
    else:
        assert code == -signal.SIGKILL
    assert not (tmp_path / "result.json").exists()
    assert any((tmp_path / "checkpoints").glob("step_*/manifest.json"))
    result = finish(spec, tmp_path)
    assert result.attempts == 2
    assert result.summary == whole[1].summary
    assert result.outputs == whole[1].outputs
    assert (tmp_path / "metrics.jsonl").read_bytes() == (whole[0] / "metrics.jsonl").read_bytes()
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == NUM_STEPS + 1
