"""Nothing that stands in rows leaves the data: not in Prefect, not in MLflow, not in any log, page or message.

The data stage runs in its flow with a real Prefect server and a real MLflow store: refused, and again with limits that
let it pass. Then every byte that both left behind is searched for what was planted in the rows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from clean_rows import Writer
from planted import STEMS, content_of, found_in, leaks, planted, write_rows
from planted_files import feedback, in_words, keys, pair_rows, prompts, texts

from tasks.prefect_home import prefect_server

pytestmark = [pytest.mark.server]

HOLD_ROWS = {
    "stages/check_data/*/outputs/train_pairs.parquet": "rows to train on",
    "stages/check_data/*/outputs/validation_pairs.parquet": "rows that are held out",
    "stages/check_data/*/outputs/train_feedback.parquet": "judged answers to train on",
    "stages/check_data/*/outputs/validation_feedback.parquet": "judged answers that are held out",
    "stages/check_data/*/outputs/rl_prompts.parquet": "prompts to answer in training, with their ground truths",
    "stages/check_data/*/outputs/eval_prompts.parquet": "prompts of the evaluation",
    "stages/check_data/*/outputs/quarantine.parquet": "the refused rows as they stand, to look at",
    "stages/check_data/*/outputs/dropped.parquet": "the rows that a policy left out, to look at",
}
"""Below the root: files whose purpose is to hold rows, and what for. Everything else must hold nothing of a row."""
CONFIG = {
    "name": "private",
    "seed": 3,
    "checkpoint": {"source": "checkpoint", "dtype": "float32"},
    "data": {
        "preferences": [{"path": "pairs.jsonl", "ties": "drop"}, {"path": "more.parquet"}],
        "feedback": [{"path": "feedback.jsonl"}],
        "rl_prompts": "prompts.jsonl",
        "eval_prompts": "eval.jsonl",
        "max_prompt_tokens": 400,
        "max_total_tokens": 500,
    },
    "reward_model": {"optimizer": {"learning_rate": 1e-3}},
    "algorithm": {"name": "grpo", "num_steps": 2, "optimizer": {"learning_rate": 1e-3}},
    "rollout": {"engine": "transformers", "max_new_tokens": 12},
    "rewards": [{"kind": "reward_model"}],
    "evaluation": {"metrics": [{"kind": "length", "name": "short", "max_tokens": 4}]},
    "gate": {"primary": {"metric": "short"}},
    "registry": {"model_name": "private"},
    "launch": {"num_threads": 1},
}
PASSING = (
    "data.max_quarantined_fraction=1",
    *(
        f"data.thresholds.{name}.fail=1"
        for name in (
            *("pii_fraction", "eval_prompts_pii_fraction", "feedback_duplicate_fraction"),
            *(
                "feedback_schema_drift_fraction",
                "rl_prompts_schema_drift_fraction",
                "rl_prompts_gold_rejected_fraction",
            ),
        )
    ),
)
STAGE_ALONE = """
import sys
from pathlib import Path
from tasks.prefect_home import use_home
use_home(Path(sys.argv[1]))
from flows.config import load_pipeline
from flows.stages import check_data
check_data(load_pipeline([Path("private.yaml")], sys.argv[2:]))
"""


@dataclass
class Site:
    """What two runs left behind."""

    folder: Path
    root: Path
    refused: subprocess.CompletedProcess[bytes]
    passed: subprocess.CompletedProcess[bytes]
    answers: dict[str, Any]
    """What the Prefect server's API tells of everything, by the kind of thing."""


def write_data(folder: Path, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, folder / "checkpoint")
    (folder / "private.yaml").write_text(yaml.safe_dump(CONFIG))
    writer = Writer(11)
    write_rows(folder / "pairs.jsonl", pair_rows())
    write_rows(folder / "feedback.jsonl", feedback())
    write_rows(folder / "prompts.jsonl", prompts())
    private = [
        {"prompt": in_words(text), "prompt_id": text, "note": text, "ground_truth": {text: text}}
        for _, text in texts(80)
    ]
    write_rows(folder / "eval.jsonl", [*({"prompt": writer.prompt()} for _ in range(30)), *private, b'{"prompt": "x'])
    rows = [*writer.pairs(30), *({**writer.pair(), "chosen": in_words(text)} for _, text in texts(81))]
    table = pa.Table.from_pylist(rows)
    for kind, text in keys(82):
        values = pa.array([planted(kind, 83)] * len(rows))
        table = table.append_column(text, pa.StructArray.from_arrays([values], [text]))
    pq.write_table(table, folder / "more.parquet")


def environment(folder: Path) -> dict[str, str]:
    hidden = ("PREFECT", "MLFLOW", "TIDEGATE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    root = folder / "root"
    return {**kept, "TIDEGATE_ROOT": str(root), "PREFECT_HOME": str(root / "prefect"), "TMPDIR": str(folder / "tmp")}


def run(folder: Path, api: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environment(folder), "PREFECT_API_URL": api},
        cwd=folder,
        capture_output=True,
        timeout=300,
    )


def told_by(api: str) -> dict[str, Any]:
    """Return all that the Prefect server tells of runs, their states, logs, artifacts and events."""
    kinds = ("flows", "flow_runs", "task_runs", "logs", "artifacts", "artifacts/latest", "events", "variables")
    answers: dict[str, Any] = {}
    for kind in kinds:
        answer = httpx.post(f"{api}/{kind}/filter", json={}, timeout=60)
        answer.raise_for_status()
        answers[kind] = answer.json()
    for name, states in (("flow_runs", "flow_run_states"), ("task_runs", "task_run_states")):
        ids = [run["id"] for run in answers[name]]
        key = f"{name.removesuffix('s')}_id"
        answers[states] = [httpx.get(f"{api}/{states}/", params={key: one}, timeout=60).json() for one in ids]
    return answers


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Site:
    """The flow of the whole chain, refused by the data stage; then that stage's own flow, which passes."""
    folder = tmp_path_factory.mktemp("privacy")
    (folder / "tmp").mkdir()
    write_data(folder, tiny_checkpoint)
    root = folder / "root"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.setenv("PREFECT_HOME", str(root / "prefect"))
        with prefect_server(root) as server:
            assert server is not None
            server.wait_until_ready()
            api = os.environ["PREFECT_API_URL"]
            refused = run(folder, api, "-m", "flows.cli", "run", "private.yaml", "--json")
            passed = run(folder, api, "-c", STAGE_ALONE, str(root), *PASSING)
            answers = told_by(api)
    return Site(folder, root, refused, passed, answers)


@pytest.mark.timeout(300)
def test_one_run_is_refused_and_one_passes(site: Site) -> None:
    """What is searched below is what two runs of the data stage leave behind."""
    assert site.refused.returncode == 3, site.refused.stderr.decode()
    assert b"quarantined_fraction" in site.refused.stderr
    assert site.passed.returncode == 0, site.passed.stderr.decode()
    folders = sorted((site.root / "stages" / "check_data").iterdir())
    assert len(folders) == 2
    assert sum((folder / "result.json").exists() for folder in folders) == 1


def test_the_search_finds_what_is_there(site: Site) -> None:
    """Every kind is found in tables that hold rows by design, and the stores tell of both runs."""
    found = leaks(site.root)
    tables = {name.rpartition("/")[2] for name in found}
    assert tables <= {pattern.rpartition("/")[2] for pattern in HOLD_ROWS}
    assert {"quarantine.parquet", "train_pairs.parquet", "train_feedback.parquet", "eval_prompts.parquet"} <= tables
    told = {line.partition(":")[0] for lines in found.values() for line in lines}
    assert told == set(STEMS)
    prefect, mlflow = site.root / "prefect" / "prefect.db", site.root / "mlflow.db"
    assert b"quarantined_fraction is" in content_of(prefect)
    assert b"quarantined_fraction is" in content_of(mlflow)
    assert b"# Data card" in content_of(mlflow)
    assert list((site.root / "mlflow-artifacts").rglob("DATASET_CARD.md"))
    assert all(site.answers[kind] for kind in ("flow_runs", "task_runs", "logs", "artifacts", "flow_run_states"))


def test_no_file_below_the_root_holds_anything_of_a_row(site: Site) -> None:
    """Both databases, artifacts of MLflow, logs, messages, metrics, reports, pages, cards."""
    assert leaks(site.root, HOLD_ROWS) == {}
    assert leaks(site.folder / "tmp") == {}
    names = {path.name for path in site.root.rglob("*") if path.is_file()}
    assert names >= {
        *("prefect.db", "mlflow.db", "report.html", "report.json", "DATASET_CARD.md", "great_expectations.json"),
        *("log.jsonl", "output.log", "metrics.jsonl", "error.json", "result.json", "baselines.json", "run.json"),
    }


def test_the_server_and_the_command_tell_nothing_of_a_row(site: Site) -> None:
    for kind, answer in site.answers.items():
        assert found_in(json.dumps(answer, ensure_ascii=False).encode()) == [], kind
    for done in (site.refused, site.passed):
        assert found_in(done.stdout + done.stderr) == []
