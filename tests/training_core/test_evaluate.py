"""Stage `evaluate` on tiny models with the transformers engine, and stage `gate` on what it writes."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from training_core.checkpoint import CheckpointStore
from training_core.errors import ArtifactError, ConfigurationError, EvaluationError, PreemptedError
from training_core.evaluation.generation import EnginePool, ModelSource
from training_core.evaluation.samples import read_scores
from training_core.evaluation.scoring import RewardScorer
from training_core.models.heads import load_reward_model, new_reward_model, save_reward_model
from training_core.models.loading import load_causal_lm, save_causal_lm
from training_core.models.tiny import build_tiny_checkpoint
from training_core.protocol.child import run_stage_here
from training_core.protocol.digests import path_digest, weights_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageSpec
from training_core.stages import STAGES

NUM_PROMPTS = 8
ROLLOUT = {"engine": "transformers", "dtype": "float32", "max_new_tokens": 8, "max_num_sequences": 8}
EVALUATION = {
    "metrics": [{"kind": "sentiment"}, {"kind": "contains", "name": "vowel", "phrases": ["a", "e"]}],
    "reward_model": True,
    "samples_per_prompt": 2,
    "prompts_per_batch": 3,
    "sampling": {"temperature": 1.0},
}


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny matrices gain nothing from threads, and lose much where other tests run beside this one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, tiny_checkpoint: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("evaluate")
    candidate = build_tiny_checkpoint(folder / "candidate", seed=5)
    reward = new_reward_model(tiny_checkpoint, seed=1)
    reward.score_mean, reward.score_std = 0.1, 0.5
    save_reward_model(reward, tiny_checkpoint, folder / "reward_model", {})
    prompts = [
        {
            "prompt_id": f"p{i}",
            "group_id": f"g{i // 2}",
            "prompt_messages": [{"role": "user", "content": f"Say something about number {i}."}],
            "extra": "{}",
        }
        for i in range(NUM_PROMPTS)
    ]
    pq.write_table(pa.Table.from_pylist(prompts), folder / "eval_prompts.parquet")
    return {
        "reference": tiny_checkpoint,
        "candidate": candidate,
        "reward_model": folder / "reward_model",
        "eval_prompts": folder / "eval_prompts.parquet",
    }


def spec_of(stage: str, config: dict, paths: dict[str, Path], seed: int = 3) -> StageSpec:
    artifacts = {name: Artifact(path=str(path), sha256=path_digest(path)) for name, path in paths.items()}
    version = STAGES[stage].version
    return StageSpec(stage=stage, stage_version=version, config=config, inputs=artifacts, seed=seed)


def run_stage(root: Path, spec: StageSpec) -> StageDirectory:
    directory = StageDirectory.of_spec(root, spec)
    directory.prepare(spec)
    run_stage_here(spec, directory, STAGES)
    return directory


def run_evaluation(root: Path, paths: dict[str, Path], **changes) -> StageDirectory:
    config = {"evaluation": EVALUATION | changes, "rollout": ROLLOUT}
    return run_stage(root, spec_of("evaluate", config, paths))


def rows_of(directory: StageDirectory) -> list[dict]:
    return pq.read_table(directory.outputs_path / "evaluation/samples.parquet").to_pylist()


def report_of(directory: StageDirectory) -> dict:
    return json.loads((directory.outputs_path / "evaluation/evaluation.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, inputs) -> StageDirectory:
    return run_evaluation(tmp_path_factory.mktemp("root"), inputs)


def test_the_table_has_a_row_an_answer_and_the_documented_columns(finished):
    table = pq.read_table(finished.outputs_path / "evaluation/samples.parquet")
    assert table.column_names == [
        "prompt_id", "group_id", "prompt_text", "model", "sample_index", "answer", "num_tokens", "stop_reason",
        "sentiment", "vowel", "reward_model_score", "kl_to_reference", "length_tokens", "truncated", "repetition",
        "same_opening",
    ]  # fmt: skip
    rows = table.to_pylist()
    assert [(r["model"], r["prompt_id"], r["sample_index"]) for r in rows] == [
        (model, f"p{i}", s) for model in ("candidate", "reference") for i in range(NUM_PROMPTS) for s in range(2)
    ]
    for row in rows:
        assert row["prompt_text"] == f"Say something about number {row['prompt_id'][1:]}."
        assert row["length_tokens"] == row["num_tokens"] <= 8
        assert row["truncated"] == float(row["stop_reason"] == "length")
        assert "<|im_end|>" not in row["answer"]
    assert all(r["kl_to_reference"] == 0.0 for r in rows if r["model"] == "reference")
    assert len({r["answer"] for r in rows if r["model"] == "candidate"}) > NUM_PROMPTS


def test_the_report_holds_means_digests_and_settings(finished, inputs):
    report, rows = report_of(finished), rows_of(finished)
    assert list(report["models"]) == ["candidate", "reference"]
    for name, entry in report["models"].items():
        assert entry["weights_sha256"] == weights_digest(inputs[name])
        for metric, mean in entry["means"].items():
            values = [row[metric] for row in rows if row["model"] == name]
            assert mean == pytest.approx(sum(values) / len(values))
        assert entry["standard_errors"]["sentiment"] >= 0
        assert set(entry["num_missing"].values()) == {0}
    settings = report["settings"]
    assert settings["evaluation"]["sampling"] == {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8}
    assert settings["engine"]["engine"] == "transformers"
    assert settings["num_prompts"] == NUM_PROMPTS
    summary = finished.result().summary
    assert summary["evaluation_digest"] == report["evaluation_digest"]
    assert summary["models"]["candidate"]["sentiment"] == report["models"]["candidate"]["means"]["sentiment"]


def test_reward_model_scores_reach_the_rows_of_their_answers(finished, inputs, tmp_path, monkeypatch):
    found, score = {}, RewardScorer.score
    monkeypatch.setattr(
        RewardScorer, "score", lambda self, source, *a: found.setdefault(source.name, score(self, source, *a))
    )
    rows = rows_of(run_evaluation(tmp_path, inputs))
    assert rows == rows_of(finished)
    assert [r["reward_model_score"] for r in rows] == [*found["candidate"], *found["reference"]]


class Killed(BaseException):
    """Ends the process at once, as far as the stage can tell."""


@pytest.mark.parametrize("units_done", [1, 4])
def test_killed_and_continued_gives_the_same_bytes(units_done, finished, inputs, tmp_path, monkeypatch):
    saved: list[int] = []
    sampled: list[str] = []
    save, sample = CheckpointStore.save, EnginePool.sample

    def save_then_die(self, step, write):
        checkpoint = save(self, step, write)
        saved.append(step)
        if step == units_done and len(saved) == units_done:
            raise Killed
        return checkpoint

    def counted(self, source, *arguments):
        sampled.append(source.name)
        return sample(self, source, *arguments)

    monkeypatch.setattr(CheckpointStore, "save", save_then_die)
    monkeypatch.setattr(EnginePool, "sample", counted)
    with pytest.raises(Killed):
        run_evaluation(tmp_path, inputs)
    directory = run_evaluation(tmp_path, inputs)
    assert saved == [1, 2, 3, 4, 5, 6]
    assert sampled == ["reference", "candidate"]
    for name in ("samples.parquet", "evaluation.json"):
        path = Path("outputs/evaluation") / name
        assert (directory.path / path).read_bytes() == (finished.path / path).read_bytes()
    timings = [json.loads(line) for line in directory.timings_path.read_text().splitlines()]
    assert [row["step"] for row in timings] == [n for n in range(1, 7) if n != units_done]


def test_sigterm_in_the_middle_keeps_the_finished_units(inputs, tmp_path, monkeypatch):
    sample = EnginePool.sample

    def stopped(self, source, *arguments):
        if source.name == "candidate":
            raise PreemptedError("stopped by SIGTERM")
        return sample(self, source, *arguments)

    monkeypatch.setattr(EnginePool, "sample", stopped)
    with pytest.raises(PreemptedError):
        run_evaluation(tmp_path, inputs)
    [directory] = (tmp_path / "stages/evaluate").iterdir()
    [checkpoint] = (directory / "checkpoints").glob("step_*")
    assert checkpoint.name == "step_000001"
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match="none of them is whole"):
        run_evaluation(tmp_path, inputs)


def test_answers_and_scores_depend_on_no_batch(finished, inputs, tmp_path):
    ours, others = rows_of(finished), rows_of(run_evaluation(tmp_path, inputs, prompts_per_batch=8))
    assert ours == others


def test_identical_weights_reuse_the_references_answers_and_fail_the_gate(inputs, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(inputs["reference"], copy)
    sampled: list[str] = []
    sample = EnginePool.sample
    monkeypatch.setattr(
        EnginePool, "sample", lambda self, source, *a: (sampled.append(source.name), sample(self, source, *a))[1]
    )
    directory = run_evaluation(tmp_path, inputs | {"candidate": copy})
    assert sampled == ["reference"]
    rows = rows_of(directory)
    half = len(rows) // 2
    assert [r["answer"] for r in rows[:half]] == [r["answer"] for r in rows[half:]]
    assert all(r["kl_to_reference"] == 0.0 for r in rows)
    spec = spec_of("gate", {"primary": {"metric": "sentiment"}}, {"evaluation": directory.outputs_path / "evaluation"})
    summary = run_stage(tmp_path, spec).result().summary
    assert summary["verdict"] == "fail"
    assert summary["reasons"][0].startswith("identical_weights: training changed nothing")
    assert summary["primary"] is None


def test_a_champion_of_another_architecture_gets_its_own_engine(inputs, tmp_path):
    champion = build_tiny_checkpoint(tmp_path / "champion", seed=2, num_layers=1)
    assert not ModelSource.of("champion", champion).shares_engine_with(ModelSource.of("r", inputs["reference"]))
    directory = run_evaluation(tmp_path, inputs | {"champion": champion}, samples_per_prompt=1, num_prompts=3)
    rows = rows_of(directory)
    assert [r["model"] for r in rows] == ["candidate"] * 3 + ["reference"] * 3 + ["champion"] * 3
    assert all(math.isfinite(r["kl_to_reference"]) for r in rows)
    assert report_of(directory)["settings"]["num_prompts"] == 3


def test_a_champion_with_another_tokenizer_has_no_divergence(inputs, tmp_path):
    champion = build_tiny_checkpoint(tmp_path / "champion", seed=2, vocab_size=400)
    directory = run_evaluation(tmp_path, inputs | {"champion": champion}, samples_per_prompt=1, num_prompts=3)
    values = [r["kl_to_reference"] for r in rows_of(directory) if r["model"] == "champion"]
    assert values == [None] * 3
    entry = report_of(directory)["models"]["champion"]
    assert entry["means"]["kl_to_reference"] is None
    assert entry["num_missing"]["kl_to_reference"] == 3


def scored_nan(prompts, answers, context, value):
    return [float(value) if i == 3 else None if i == 1 else 1.0 for i in range(len(answers))]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_score_that_is_not_finite_names_prompt_and_metric(value, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("training_core.rewards.rules.import_function", lambda path, what: scored_nan)
    rule = {"kind": "custom", "name": "mine", "import_path": "some.module:scored", "parameters": {"value": value}}
    with pytest.raises(EvaluationError, match=rf"'mine' of the reference's answer 1 to prompt 'p1' is {value}"):
        run_evaluation(tmp_path, inputs, metrics=[rule])


def test_a_missing_score_stays_null(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("training_core.rewards.rules.import_function", lambda path, what: scored_nan)
    rule = {"kind": "custom", "name": "mine", "import_path": "some.module:scored", "parameters": {"value": 0.5}}
    directory = run_evaluation(tmp_path, inputs, metrics=[rule], num_prompts=3)
    assert [r["mine"] for r in rows_of(directory)][:4] == [1.0, None, 1.0, 0.5]
    assert report_of(directory)["models"]["candidate"]["num_missing"]["mine"] == 1


def test_a_reward_model_that_diverged_names_the_prompt(inputs, tmp_path):
    broken = tmp_path / "reward_model"
    model = load_reward_model(inputs["reward_model"])
    with torch.no_grad():
        model.head.weight.fill_(math.nan)
    save_reward_model(model, inputs["reference"], broken, {})
    with pytest.raises(EvaluationError, match=r"'reward_model_score' of the reference's answer to prompt 'p0'"):
        run_evaluation(tmp_path, inputs | {"reward_model": broken})


def test_asking_for_a_reward_model_that_is_not_there_is_refused(inputs, tmp_path):
    paths = {name: path for name, path in inputs.items() if name != "reward_model"}
    with pytest.raises(ConfigurationError, match=r"evaluation\.reward_model is true"):
        run_evaluation(tmp_path, paths)
    directory = run_evaluation(tmp_path, paths, reward_model=False, kl=False, num_prompts=2)
    assert "kl_to_reference" not in rows_of(directory)[0]


def test_the_gate_reads_what_the_evaluation_wrote(finished, inputs, tmp_path):
    folder = finished.outputs_path / "evaluation"
    scores = read_scores(folder / "samples.parquet", {"candidate": "a", "reference": "b"}, "digest")
    candidate = scores.models["candidate"]
    assert candidate.prompt_ids == tuple(f"p{i}" for i in range(NUM_PROMPTS))
    assert candidate.group_ids == tuple(f"g{i // 2}" for i in range(NUM_PROMPTS))
    assert candidate.metrics["sentiment"].values.shape == (NUM_PROMPTS, 2)
    config = {
        "primary": {"metric": "reward_model_score", "scale": "absolute", "min_gain": 0.0},
        "min_prompts": 8,
        "min_clusters": 4,
        "num_resamples": 1000,
    }
    directory = run_stage(tmp_path, spec_of("gate", config, {"evaluation": folder}))
    summary, report = directory.result().summary, json.loads((directory.outputs_path / "gate.json").read_text())
    assert summary["verdict"] == report["verdict"] in ("pass", "fail", "inconclusive")
    assert report["weights_sha256"] == {n: weights_digest(inputs[n]) for n in ("candidate", "reference")}
    assert report["num_clusters"] == NUM_PROMPTS // 2
    assert [g["name"] for g in summary["guards"]] == [
        "length_tokens.ratio_range",
        "truncated.maximum_increase",
        "repetition.maximum",
    ]
    again = run_stage(tmp_path / "again", spec_of("gate", config, {"evaluation": folder}))
    assert (again.outputs_path / "gate.json").read_bytes() == (directory.outputs_path / "gate.json").read_bytes()


def test_an_error_verdict_is_a_value_too(finished, tmp_path):
    spec = spec_of("gate", {"primary": {"metric": "sentiment"}}, {"evaluation": finished.outputs_path / "evaluation"})
    result = run_stage(tmp_path, spec).result()
    assert result.summary["verdict"] == "error"
    assert result.summary["reasons"][0].startswith("enough_prompts: 8 prompts")


def edit(folder: Path, target: Path, change) -> Path:
    shutil.copytree(folder, target)
    report = json.loads((target / "evaluation.json").read_text())
    rows = pq.read_table(target / "samples.parquet").to_pylist()
    rows = change(report, rows) or rows
    (target / "evaluation.json").write_text(json.dumps(report))
    pq.write_table(pa.Table.from_pylist(rows), target / "samples.parquet")
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda report, rows: report.pop("models"), "no readable evaluation.json"),
        (lambda report, rows: report.update(schema_version=99), "schema version 99"),
        (lambda report, rows: report["models"].pop("candidate") and None, "weights evaluation.json does not name"),
        (lambda report, rows: rows.pop(3) and None, "does not have the samples 0 to 1"),
        (lambda report, rows: [row for row in rows if row.pop("group_id")], "lacks the columns group_id"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(change, message, finished, tmp_path):
    def apply(report, rows):
        changed = change(report, rows)
        return changed if isinstance(changed, list) else None

    folder = edit(finished.outputs_path / "evaluation", tmp_path / "evaluation", apply)
    with pytest.raises(EvaluationError, match=message):
        run_stage(tmp_path, spec_of("gate", {"primary": {"metric": "sentiment"}}, {"evaluation": folder}))


def test_nan_in_the_table_reaches_the_gate_as_an_error(finished, tmp_path):
    def damage(report, rows):
        rows[0]["sentiment"] = math.nan

    folder = edit(finished.outputs_path / "evaluation", tmp_path / "evaluation", damage)
    config = {"primary": {"metric": "sentiment"}, "min_prompts": 8, "min_clusters": 4}
    summary = run_stage(tmp_path, spec_of("gate", config, {"evaluation": folder})).result().summary
    assert summary["verdict"] == "error"
    assert "candidate's sentiment" in summary["reasons"][0]


def with_negative_norm(source: Path, target: Path) -> Path:
    """Write a model whose greedy answers wander; a random model with tied embeddings repeats its last token."""
    model = load_causal_lm(source)
    with torch.no_grad():
        model.model.norm.weight.fill_(-1.0)
    save_causal_lm(model, source, target, torch.float32)
    return target


@pytest.mark.vllm
def test_vllm_swaps_weights_and_agrees_with_transformers(inputs, tmp_path):
    """Greedy answers of two models from one vLLM engine, as a stage process: the right weights answered each time.

    A packed copy of the output head that survives the swap (tied embeddings on CPU) would show here.
    """
    paths = inputs | {"candidate": with_negative_norm(inputs["candidate"], tmp_path / "candidate")}
    greedy = {"sampling": {"temperature": 0.0}, "samples_per_prompt": 1, "reward_model": False}
    expected = [row["answer"] for row in rows_of(run_evaluation(tmp_path, paths, **greedy))]
    assert len(set(expected[:NUM_PROMPTS])) > 1
    engine = {"engine": "vllm", "dtype": "float32", "max_new_tokens": 8, "kv_cache_gib": 0.25, "max_num_sequences": 8}
    spec = spec_of("evaluate", {"evaluation": EVALUATION | greedy, "rollout": engine}, paths)
    directory = StageDirectory.of_spec(tmp_path, spec)
    directory.prepare(spec)
    command = [sys.executable, "-m", "training_core", str(directory.spec_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [row["answer"] for row in rows_of(directory)]
    same = [ours == theirs for ours, theirs in zip(answers, expected, strict=True)]
    # A near tie between two tokens may fall differently in one answer; other weights would agree nowhere.
    assert sum(same[:NUM_PROMPTS]) >= NUM_PROMPTS - 1
    assert sum(same[NUM_PROMPTS:]) >= NUM_PROMPTS - 1
