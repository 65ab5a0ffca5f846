"""Every example of an algorithm goes through the whole chain on a tiny model, to a registered model."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from training_core.metrics import read_metrics

pytestmark = [pytest.mark.server, pytest.mark.slow]

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "examples" / "algorithms"
COMMON = FOLDER / "common.yaml"
EXAMPLES = sorted(path for path in FOLDER.glob("*.yaml") if path != COMMON)
TOPICS = ("rain", "sea", "dog", "cake", "bread", "tree", "book", "song", "train", "river", "cloud", "road")
SECONDS = 300.0

FROM_PREFERENCES = {"dpo", "kto"}
COMPARING_ANSWERS = {
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus_baseline",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "custom",
}
ONLY_OF: dict[str, set[str]] = {
    "advantage/centred_score_variance": COMPARING_ANSWERS,
    "critic/loss": {"ppo"},
    "critic/value_mean": {"ppo"},
    "rollout/greedy_reward_mean": {"remax"},
    "rollout/num_rounds": {"dapo"},
    "rewards/accuracy": FROM_PREFERENCES,
    "rewards/margin_mean": FROM_PREFERENCES,
    "validation/loss": FROM_PREFERENCES,
    "kl/baseline_nats": {"kto"},
}
"""Metric -> the algorithms that report it."""
OF_ALL_WITH_ANSWERS = {"reward/mean", "kl/policy_ref_nats", "policy/loss", "policy/entropy_nats"}
CHARTS = {"ppo": "Critic loss", **dict.fromkeys(FROM_PREFERENCES, "Accuracy on preferences")}


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

    def run(self, example: Path, *settings: str) -> tuple[int, dict[str, Any]]:
        """Return (exit code, what `--json` prints)."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"configs": [str(COMMON), str(example)], "settings": [*tiny_settings(example), *settings]}
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
        "data": "{preferences: [{path: pairs.jsonl}], eval_prompts: eval.jsonl, near_duplicates: null}",
        "rollout": "{engine: transformers, dtype: float32, max_new_tokens: 32}",
        "evaluation": "{metrics: [{kind: length, max_tokens: 16}]}",
        # Any policy that moved passes: what is tested here is the way, not the goal.
        "gate": "{primary: {metric: kl_to_reference, scale: absolute, min_gain: 0.0}, guards: [], min_prompts: 40,"
        " num_resamples: 1000}",
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
            "chosen": f"{rng.choice(('good', 'kind', 'glad', 'nice'))} {TOPICS[number % 12]}",
            "rejected": f"{rng.choice(('poor', 'grim', 'evil', 'dire'))} {TOPICS[number % 12]}",
        }
        for number in range(120)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "eval.jsonl").write_text("".join(json.dumps({"prompt": prompt(n)}) + "\n" for n in range(200, 240)))
    runs = Runs(folder)
    yield runs
    runs.close()


def policy_directory(view: dict[str, Any]) -> Path:
    return Path(next(stage["directory"] for stage in view["stages"] if stage["name"] == "policy"))


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_goes_the_whole_way(runs: Runs, example: Path) -> None:
    code, view = runs.run(example)
    assert "error" not in view, view["error"]
    assert (code, view["state"], view["gate"]["verdict"]) == (0, "Completed", "pass")
    # What an example before this one did already is not done again; the policy is its own.
    states = {stage["name"]: stage["state"] for stage in view["stages"]}
    assert {states.pop("policy"), states.pop("register")} == {"Completed"}
    assert set(states.values()) <= {"Completed", "Cached"}
    directory = policy_directory(view)
    result = json.loads((directory / "result.json").read_text())
    assert view["model"]["weights_sha256"] == result["summary"]["weights_sha256"]
    assert result["summary"]["weights_sha256"] != result["summary"]["reference_weights_sha256"]

    algorithm = json.loads((directory / "spec.json").read_text())["config"]["algorithm"]["name"]
    assert ("reward_model" in states) == (algorithm not in FROM_PREFERENCES)
    rows = read_metrics(directory / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert {name for name in ONLY_OF if name in rows[-1]} == {name for name in ONLY_OF if algorithm in ONLY_OF[name]}
    if algorithm not in FROM_PREFERENCES:
        assert set(rows[-1]) >= OF_ALL_WITH_ANSWERS
    report = runs.folder / "root" / "runs" / view["run_id"] / "report.html"
    assert CHARTS.get(algorithm, "KL to the reference, a token") in report.read_text(encoding="utf-8")


@pytest.mark.timeout(SECONDS)
def test_preferences_that_taught_nothing_are_rejected(runs: Runs) -> None:
    code, view = runs.run(FOLDER / "dpo.yaml", "algorithm.optimizer.learning_rate=0")
    assert (code, view["state"], view["model"]) == (1, "Rejected", None)
    summary = json.loads((policy_directory(view) / "result.json").read_text())["summary"]
    assert summary["weights_sha256"] == summary["reference_weights_sha256"]
    assert summary["accuracy"] == summary["accuracy_before"]
