"""Every example of an algorithm goes through the whole chain on a tiny model, to a registered model."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from training_core.config.algorithms import OnlineAlgorithm
from training_core.config.preference import DpoConfig, KtoConfig
from training_core.metrics import read_metrics

pytestmark = [pytest.mark.server, pytest.mark.slow]

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "examples" / "algorithms"
COMMON = FOLDER / "common.yaml"
EXAMPLES = sorted(path for path in FOLDER.glob("*.yaml") if path != COMMON)
TOPICS = ("rain", "sea", "dog", "cake", "bread", "tree", "book", "song", "train", "river", "cloud", "road")
SECONDS = 300.0

ONLINE = {"reward/mean", "rollout/length_mean_tokens", "policy/loss", "policy/entropy_nats", "policy/ratio_mean"}
PREFERENCE = {"train/loss", "rewards/accuracy", "rewards/margin_mean", "validation/accuracy", "validation/loss"}
PROMISED: dict[str, set[str]] = {
    "ppo": {"critic/loss", "critic/value_mean", "critic/clip_fraction", "kl/coefficient", "kl/policy_ref_nats"},
    "dpo": PREFERENCE,
    "kto": {*PREFERENCE, "kl/baseline_nats"},
}
"""Name of an algorithm -> metrics that it alone has."""


class Runs:
    """The command in a process of its own; see tests/scripted/many_runs.py."""

    def __init__(self, folder: Path) -> None:
        hidden = ("PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI", "TIDEGATE_ROOT")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment["PYTHONPATH"] = str(REPOSITORY)
        self.folder = folder
        with (folder / "log.txt").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(REPOSITORY / "tests/scripted/many_runs.py"), str(folder / "root")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=folder,
                text=True,
            )

    def run(self, example: Path) -> tuple[int, dict[str, Any]]:
        """Return (exit code, what `--json` prints)."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"configs": [str(COMMON), str(example)], "settings": tiny_settings(example)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, (self.folder / "log.txt").read_text()[-3000:]
        answer = json.loads(line)
        return answer["code"], answer["view"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()


def tiny_settings(example: Path) -> list[str]:
    """Return what makes an example one of two steps on the tiny model; its algorithm and rewards stay as they are."""
    settings = {
        "checkpoint": "{source: checkpoint, dtype: float32}",
        "data": "{preferences: [{path: pairs.jsonl}], eval_prompts: eval.jsonl}",
        "rollout": "{engine: transformers, dtype: float32, max_new_tokens: 32}",
        "evaluation": "{metrics: [{kind: length, max_tokens: 16}]}",
        # Any policy that moved passes: what is tested here is the way, not the goal.
        "gate": "{primary: {metric: kl_to_reference, scale: absolute, min_gain: 0.0}, guards: [], min_prompts: 40,"
        " num_resamples: 1000}",
        "registry.model_name": example.stem,
        "algorithm.num_steps": "2",
        "algorithm.optimizer.learning_rate": "1e-2",
    }
    if "reward_model: null" not in example.read_text():
        settings["reward_model"] = "{optimizer: {learning_rate: 1e-3}, batch_size: 16}"
    return [f"{name}={value}" for name, value in settings.items()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Iterator[Runs]:
    """A folder with a checkpoint, 120 pairs that prefer kind words and 40 held-out prompts; one root for all runs."""
    folder, rng = tmp_path_factory.mktemp("examples"), random.Random(0)
    (folder / "checkpoint").symlink_to(tiny_checkpoint, target_is_directory=True)

    def prompt(number: int) -> str:
        return f"Say one word about {TOPICS[number % 12]} number {number}."

    pairs = [
        {
            "prompt": prompt(number),
            "chosen": f"{rng.choice(('good', 'great', 'lovely', 'happy'))} {TOPICS[number % 12]}",
            "rejected": f"{rng.choice(('bad', 'sad', 'awful', 'poor'))} {TOPICS[number % 12]}",
        }
        for number in range(120)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "eval.jsonl").write_text("".join(json.dumps({"prompt": prompt(n)}) + "\n" for n in range(200, 240)))
    runs = Runs(folder)
    yield runs
    runs.close()


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_goes_the_whole_way(runs: Runs, example: Path) -> None:
    code, view = runs.run(example)
    assert "error" not in view, view["error"]
    print(code, json.dumps(view)[:3000])
    assert (code, view["state"], view["gate"]["verdict"]) == (0, "Completed", "pass")
