"""The whole chain with the real stages on a tiny model, vLLM included: through the command, and killed on the way."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.slow]

CONFIG = """
name: tiny
seed: 3
checkpoint: {source: checkpoint, dtype: float32}
data:
  preferences: [{path: pairs.jsonl}]
  eval_prompts: eval.jsonl
  near_duplicates: null
  max_prompt_tokens: 96
  max_total_tokens: 160
reward_model:
  optimizer: {learning_rate: 1e-3}
  batch_size: 16
  checkpoint_every_steps: 2
algorithm:
  name: grpo
  num_steps: 16
  optimizer: {learning_rate: 1e-3}
  prompts_per_step: 4
  group_size: 8
  checkpoint_every_steps: 1
rollout: {engine: vllm, max_new_tokens: 12, kv_cache_gib: 0.25, max_num_sequences: 32}
rewards: [{kind: reward_model}]
evaluation:
  metrics: [{kind: length, name: short, max_tokens: 4}]
  reward_model: true
gate:
  primary: {metric: reward_model_score, scale: absolute, min_gain: 0.1}
  guards: []
  min_prompts: 60
  min_clusters: 30
  num_resamples: 1000
registry: {model_name: tiny}
launch: {num_threads: 2}
"""
TRAINING = ("sft_intake", "check_data", "reward_model", "policy")
TRAIN = f"""
from pathlib import Path
from flows.config import load_pipeline
from tasks.pipeline import PipelineRun
with PipelineRun(load_pipeline([Path("tiny.yaml")]), whole=False) as run:
    for name in {TRAINING!r}:
        run.run_stage(name)
"""
TOPICS = ("rain", "sea", "dog", "cake", "bread", "tree", "book", "song", "train", "river", "cloud", "road")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """Config, checkpoint, 160 pairs that prefer kind words, 60 held-out prompts."""
    path, rng = tmp_path_factory.mktemp("pipeline"), random.Random(0)
    shutil.copytree(tiny_checkpoint, path / "checkpoint")
    (path / "tiny.yaml").write_text(CONFIG)

    def prompt(number: int) -> str:
        return f"Say one word about {TOPICS[number % 12]} number {number}."

    pairs = [
        {
            "prompt": prompt(number),
            "chosen": f"{rng.choice(('good', 'kind', 'glad', 'nice'))} {TOPICS[number % 12]}",
            "rejected": f"{rng.choice(('poor', 'grim', 'evil', 'dire'))} {TOPICS[number % 12]}",
        }
        for number in range(160)
    ]
    (path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (path / "eval.jsonl").write_text("".join(json.dumps({"prompt": prompt(n)}) + "\n" for n in range(200, 260)))
    return path


def environment(folder: Path, root: str) -> dict[str, str]:
    hidden = ("PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "TIDEGATE_ROOT": str(folder / root)}


def tidegate(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", "tiny.yaml", "--json", *arguments],
        env=environment(folder, "root"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def finished(folder: Path) -> dict[str, Any]:
    """The object of a first run that passed."""
    code, view, log = tidegate(folder)
    assert code == 0, log
    return view


@pytest.mark.timeout(900)
def test_the_command_brings_a_model_into_the_registry(folder: Path, finished: dict[str, Any]) -> None:
    assert finished["state"] == "Completed"
    assert finished["gate"]["verdict"] == "pass"
    assert finished["model"]["version"] == "1"
    assert set(finished["model"]["aliases"]) == {"challenger", "champion"}
    grpo = next(stage for stage in finished["stages"] if stage["name"] == "policy")
    result = json.loads((Path(grpo["directory"]) / "result.json").read_text())
    assert finished["model"]["weights_sha256"] == result["summary"]["weights_sha256"]
    report = folder / "root" / "runs" / finished["run_id"] / "report.html"
    assert "<svg" in report.read_text(encoding="utf-8")


@pytest.mark.timeout(900)
def test_the_same_again_is_cached_and_learning_rate_zero_is_rejected(folder: Path, finished: dict[str, Any]) -> None:
    code, again, log = tidegate(folder)
    assert code == 0, log
    assert {stage["state"] for stage in again["stages"]} == {"Cached"}
    assert again["model"] == finished["model"]
    # The other engine, so that both run the whole chain; it starts in no time.
    engine = ("--set", "rollout={engine: transformers, max_new_tokens: 12}")
    code, rejected, log = tidegate(folder, *engine, "--set", "algorithm.optimizer.learning_rate=0")
    assert code == 1, log
    states = {stage["name"]: stage["state"] for stage in rejected["stages"]}
    assert states == {
        **dict.fromkeys(TRAINING[:3], "Cached"),
        **dict.fromkeys(("policy", "evaluate", "gate"), "Completed"),
        "register": "Skipped",
    }
    assert rejected["state"] == "Rejected"
    assert rejected["model"] is None
    with contextlib.closing(sqlite3.connect(folder / "root" / "mlflow.db")) as database:
        assert database.execute("select alias, version from registered_model_aliases order by alias").fetchall() == [
            ("challenger", 1),
            ("champion", 1),
        ]


def kill_tree(parent: subprocess.Popen[bytes], own_children: list[psutil.Process]) -> None:
    """SIGKILL everything at once, as a machine that loses power does."""
    for process in [*own_children, psutil.Process(parent.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    parent.wait()


def train_until(folder: Path, moment: Callable[[Path], bool] | None) -> None:
    """Train below `killed`; kill the whole tree when `moment(stages)` comes. None: to the end."""
    with (folder / "train.log").open("ab") as log:
        parent = subprocess.Popen(
            [sys.executable, "-c", TRAIN], env=environment(folder, "killed"), cwd=folder, stdout=log, stderr=log
        )
        stages = folder / "killed" / "stages"
        while parent.poll() is None:
            if moment is not None and moment(stages):
                kill_tree(parent, psutil.Process(parent.pid).children(recursive=True))
                return
            time.sleep(0.002)
    assert moment is None, "the moment never came"
    assert parent.returncode == 0, (folder / "train.log").read_text()[-3000:]


def has_step(stage: str, step: int) -> Callable[[Path], bool]:
    return lambda stages: any(stages.glob(f"{stage}/*/checkpoints/step_{step:06d}"))


def is_writing(stage: str, from_step: int) -> Callable[[Path], bool]:
    """The moment at which a checkpoint of this step or a later one is half written."""

    def looks_so(stages: Path) -> bool:
        folders = stages.glob(f"{stage}/*/checkpoints/.tmp_step_*")
        return any(int(folder.name[-6:]) >= from_step and any(folder.iterdir()) for folder in folders)

    return looks_so


@pytest.mark.timeout(900)
def test_killed_again_and_again_gives_the_same_bits(folder: Path, finished: dict[str, Any]) -> None:
    for stage in TRAINING[:2]:
        shutil.copytree(folder / "root" / "stages" / stage, folder / "killed" / "stages" / stage)
    seed = int(time.time())
    print(f"random moments from seed {seed}")  # Shown when the test fails.
    rng = random.Random(seed)
    train_until(folder, has_step("reward_model", 2 * rng.randint(1, 3)))
    train_until(folder, is_writing("policy", rng.randint(1, 4)))
    train_until(folder, has_step("policy", rng.randint(6, 12)))
    train_until(folder, None)
    for stage in finished["stages"]:
        if stage["name"] in TRAINING[2:]:
            whole = Path(stage["directory"])
            (killed,) = (folder / "killed" / "stages" / stage["name"]).iterdir()
            assert killed.name == whole.name
            results = [json.loads((path / "result.json").read_text()) for path in (whole, killed)]
            assert results[0]["outputs"] == results[1]["outputs"]
            assert results[0]["summary"] == results[1]["summary"]
            assert results[1]["attempts"] == (2 if stage["name"] == "reward_model" else 3)
            assert (whole / "metrics.jsonl").read_bytes() == (killed / "metrics.jsonl").read_bytes()
