"""docs/metrics.md has every key that a stage writes, and none besides."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import preference_data
import pytest
import reward_rows

from training_core.config.sentinels import SentinelsConfig
from training_core.errors import DataError
from training_core.metrics import read_metrics
from training_core.models.tiny import build_tiny_checkpoint
from training_core.protocol.digests import path_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageSpec
from training_core.rewards.base import Cause, MeasuredScores, Scores
from training_core.rewards.combine import CombinedScores
from training_core.sentinels.watch import CHECKS, metrics_read

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
ONLINE, PREFERENCES = "Stage policy: algorithms that sample", "Stage policy: preferences"
CRITIC = {"initialise_from": "policy", "optimizer": {"learning_rate": 1e-3}}
KL = {"placement": "reward", "coefficient": 0.1}
RUNS: dict[str, dict[str, Any]] = {
    "kl in the loss": {"kl": {"placement": "loss", "coefficient": 0.1}},
    "off policy": {
        "num_steps": 2,
        "replay": {"capacity_groups": 4, "groups_per_step": 1},
        "importance_correction": {"mode": "truncate"},
        "dynamic_sampling": {"max_rounds": 2},
    },
    "critic": {"name": "ppo", "group_size": 2, "critic": CRITIC, "kl": KL},
    "greedy": {"name": "remax", "group_size": 2},
    "experts": {"experts": {"replay": True}, "num_epochs": 2},
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip()[1:-1].split("|")]


def tables() -> dict[str, list[list[str]]]:
    """Return section -> the rows of its table."""
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)[1:]
    found = {}
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert cells(lines[0]) == ["key", "unit", "what", "sentinel"], title
        found[title] = [cells(line) for line in lines[2:]]
        assert all(len(row) == 4 and row[2] for row in found[title]), title
    return found


TABLES = tables()


def keys_of(section: str) -> list[str]:
    return [key for row in TABLES[section] for key in re.findall(r"`([^`]+)`", row[0])]


def undocumented(section: str, written: set[str]) -> set[str]:
    patterns = [re.sub(r"<\w+>", r"[^/]+", key) for key in keys_of(section)]
    return {key for key in written if not any(re.fullmatch(pattern, key) for pattern in patterns)}


def written_in(directory: Path) -> set[str]:
    rows = [row for name in ("metrics", "timings") for row in read_metrics(directory / f"{name}.jsonl")]
    assert rows
    return {key for row in rows for key in row} - {"step"}


def check(section: str, written: set[str], expected: set[str]) -> None:
    """Check that all keys are documented; `expected` are some that this run must have written."""
    assert expected <= written
    assert undocumented(section, written) == set()


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("kl in the loss", {"reward/mean", "kl/policy_ref_answer_nats", "kl/coefficient", "time/train_seconds"}),
        ("off policy", {"replay/staleness_mean_steps", "importance/effective_sample_fraction", "rollout/num_rounds"}),
        ("critic", {"critic/square_error_mean", "critic/grad_norm"}),
        ("greedy", {"rollout/greedy_reward_mean", "advantage/variance"}),
        ("experts", {"moe/replay_changed_fraction", "moe/idle_expert_fraction", "moe/auxiliary_loss"}),
    ],
)
def test_algorithms_that_sample(
    tiny_checkpoint: Path, rl_stage: Any, tmp_path: Path, run: str, expected: set[str]
) -> None:
    model = tiny_checkpoint
    if run == "experts":
        model = build_tiny_checkpoint(tmp_path / "model", architecture="qwen3_moe")
    config = rl_stage.config(**{"num_steps": 1, "group_size": 4, "checkpoint_every_steps": 2, **RUNS[run]})
    config["rewards"][1]["scale"] = {"kind": "running"}
    rl_stage.run(tmp_path / "stage", model, config)
    check(ONLINE, written_in(tmp_path / "stage"), expected | {"reward/length_scaled_mean", "time/step_seconds"})


def test_no_key_stands_twice_in_a_table() -> None:
    for section in TABLES:
        keys = keys_of(section)
        assert sorted(set(keys)) == sorted(keys), section


def test_rewards_that_say_why_scores_are_missing() -> None:
    scores = Scores([1.0, None, None], [None, Cause.TIMEOUT, Cause.ERROR])
    measured = MeasuredScores([1.0, 2.0, None], {"disagreement": [0.1, 0.2, None]})
    combined = CombinedScores(
        totals=[1.0, None, None],
        parts={"math": scores, "model": Scores(measured)},
        causal=frozenset({"math"}),
        measures={f"model_{name}": list(values) for name, values in measured.measures.items()},
    )
    check(
        ONLINE,
        set(combined.metrics()),
        {"reward/math_timeout_fraction", "reward/math_unreadable_reference_fraction", "reward/model_disagreement_mean"},
    )


def test_preferences(tiny_checkpoint: Path, tmp_path: Path) -> None:
    inputs = preference_data.make_inputs(tmp_path, tiny_checkpoint)
    options: dict[str, dict[str, Any]] = {"dpo": {"sft_weight": 0.1}, "kto": {}}
    for name, knobs in options.items():
        preference_data.run_stage(tmp_path / name, inputs, name, num_steps=1, **knobs)
    common = {"validation/margin_mean", "policy/grad_norm", "time/tokens_per_second"}
    check(PREFERENCES, written_in(tmp_path / "dpo"), common | {"train/sft_loss_nats"})
    check(PREFERENCES, written_in(tmp_path / "kto"), common | {"kl/baseline_nats"})


def test_reward_models(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from training_core.stages import reward_model

    margins: list[float | None] = [1.0, None] * 4
    paths = {
        "train_pairs": reward_rows.pair_rows(8, 1, margin=margins),
        "validation_pairs": reward_rows.pair_rows(8, 2),
        "train_feedback": reward_rows.feedback_rows(8, 3),
        "validation_feedback": reward_rows.feedback_rows(8, 4),
    }
    files = {name: reward_rows.write_rows(tmp_path / f"{name}.parquet", rows) for name, rows in paths.items()}
    losses: dict[str, dict[str, Any]] = {
        "pairs": {"loss": {"kind": "bradley_terry", "margin": "data", "centring_coefficient": 0.1}, "num_members": 2},
        "regression": {"loss": {"kind": "regression"}},
        "ordinal": {"loss": {"kind": "ordinal", "levels": [1, 2, 3, 4]}},
    }
    expected = {
        "pairs": {"train/member", "train/data_margin_mean", "train/centring_mean", "train/accuracy"},
        "regression": {"train/target_mean"},
        "ordinal": {"train/level_accuracy"},
    }
    for name, options in losses.items():
        kind = "pairs" if name == "pairs" else "feedback"
        inputs = {"model": tiny_checkpoint, **{key: path for key, path in files.items() if key.endswith(kind)}}
        options = {"num_epochs": 1, "checkpoint_every_steps": 9, "dtype": "float32", **options}
        reward_model.run(reward_rows.make_context(tmp_path / name, inputs, **options))
        check("Stage reward_model", written_in(tmp_path / name), expected[name] | {"train/learning_rate"})


def test_data_checks(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The stage writes numbers that docs/data-checks.md names."""
    from data_checks import stage
    from data_checks.config import CheckDataConfig
    from training_core.protocol.context import StageContext

    pair = {"chosen": "It is fine.", "rejected": "No idea.", "chosen_score": 1.0, "rejected_score": 2.0}
    words = (
        "stone",
        "cloud",
        "river",
        "grass",
        "paper",
        "cheese",
        "window",
        "ladder",
        "butter",
        "garden",
        "engine",
        "violin",
    )
    rows = {
        "preferences": [{"prompt": f"What is a {word}?", **pair} for word in words],
        "feedback": [
            {"prompt": f"Who made the {word}?", "completion": "It is.", "label": True, "rating": i}
            for i, word in enumerate(words)
        ],
        "rl_prompts": [{"prompt": f"When does {word} break?"} for word in words[:3]],
        "eval_prompts": [{"prompt": f"Where do I put my {word}?"} for word in words[:3]],
    }
    files = {name: tmp_path / f"{name}.jsonl" for name in rows}
    for name, path in files.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    values = {name: [{"path": str(files[name])}] for name in ("preferences", "feedback")}
    prompts = {name: str(files[name]) for name in ("rl_prompts", "eval_prompts")}
    config = CheckDataConfig.model_validate({**values, **prompts, "min_pairs": 2, "min_feedback": 2})
    artifact = Artifact(path=str(tiny_checkpoint), sha256=path_digest(tiny_checkpoint))
    inputs = {f"{name}_0": Artifact(path=str(files[name]), sha256="0" * 64) for name in ("preferences", "feedback")}
    inputs |= {name: Artifact(path=path, sha256="0" * 64) for name, path in prompts.items()} | {"tokenizer": artifact}
    dumped = config.model_dump(mode="json")
    spec = StageSpec(stage="check_data", stage_version=1, config=dumped, inputs=inputs, seed=1)
    directory = StageDirectory(tmp_path / "stage")
    directory.prepare(spec)
    with contextlib.suppress(DataError):  # Scores that contradict labels are no data to train on.
        stage.run(StageContext(spec, directory))
    written = set(read_metrics(directory.metrics_path)[0]) - {"step"}
    check(
        "Stage check_data", written, {"length/feedback_answer_tokens_mean", "data/rows", "data/feedback_examples_kept"}
    )
    named = set(re.findall(r"`([a-z0-9_]+)`", (ROOT / "docs" / "data-checks.md").read_text(encoding="utf-8")))
    begins = re.compile("^(feedback_|rl_prompts_|eval_prompts_|stepwise_)")
    numbers = {key.removeprefix("data/") for key in written if key.startswith("data/")}
    assert {name for name in numbers if name not in named and begins.sub("", name) not in named} == set()


def literals() -> Iterator[str]:
    """Yield every string of the packages that could be a key, as a pattern: what is filled in matches anything."""
    for package in ("training_core", "data_checks"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield re.escape(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = [re.escape(v.value) if isinstance(v, ast.Constant) else r"[^/]+" for v in node.values]
                    yield "".join(map(str, parts))


def test_nothing_is_documented_that_no_code_writes() -> None:
    patterns = [re.compile(pattern) for pattern in set(literals()) if re.match(r"[a-z]+/\S", pattern)]
    documented = {key for section in TABLES for key in keys_of(section)}
    assert len(documented) > 80
    unknown = {key for key in documented if not any(p.fullmatch(re.sub(r"<\w+>", "x", key)) for p in patterns)}
    assert unknown == set()


def test_each_sentinel_is_named_where_the_key_is_that_it_reads() -> None:
    everything_on = SentinelsConfig.model_validate(
        {
            "kl_budget": {"limit_nats_per_token": 1.0, "limit_nats_per_answer": 1.0},
            "proxy_up_gold_down": {"gold": "part"},
        }
    )
    in_code = {
        (key.replace("/part_", "/<part>_"), name) for name in CHECKS for key in metrics_read(everything_on, name)
    }
    documented = {
        (key, sentinel)
        for key_cell, _, _, sentinels in TABLES[ONLINE]
        for key in re.findall(r"`([^`]+)`", key_cell)
        for sentinel in filter(None, sentinels.split(", "))
    }
    assert documented == in_code
    # Preferences report of these keys only the gradient's norm.
    read = {key: sentinels for key, _, _, sentinels in TABLES[PREFERENCES] if sentinels}
    assert read == {"`policy/grad_norm`": "grad_norm"}
