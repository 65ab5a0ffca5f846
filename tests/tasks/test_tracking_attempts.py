"""Several attempts at one run in MLflow: each one's rows arrive, and the store tells of the last one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from scripted_stages.chain import config_of
from tracked import Store, finish, make_config, make_stage, make_tracker, write_rows

import tasks.tracking
from tasks.mlflow_store import locate_store
from tasks.pipeline import PipelineRun
from tasks.planning import ChainState
from tasks.tracking import run_params, run_tags
from tasks.tracking_journal import FAILED, FINISHED, KILLED, JournalFile, StageNote, stage_of, with_stage
from tasks.tracking_sync import RunSync, param_text
from training_core.metrics import MetricsWriter
from training_core.sentinels import ALARMS_FILE, Alarm, append_alarms


@pytest.fixture(autouse=True)
def _no_store_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


class World:
    """A root, its store, and one run's journal, sent without a thread."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.location = locate_store(make_config().tracking, root)
        self.file = JournalFile(root, "r")
        self.journal = self.file.create("r", "r", "test", self.location.store_id)
        from mlflow import MlflowClient

        self.client = MlflowClient(tracking_uri=self.location.uri)
        self.sync = RunSync(self.client, self.location)

    def note(
        self, stage: str, directory: Path, status: str | None = None, ended: float | None = None, error: str = ""
    ) -> None:
        note = StageNote(directory=str(directory), started=1.0, ended=ended, status=status, error=error)
        self.journal = with_stage(self.journal, stage, note)

    def send(self) -> Store:
        self.sync.sync(self.journal)
        return Store(make_config(), self.root)


@pytest.fixture
def world(tmp_path: Path, empty_store: Path) -> World:
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(empty_store, root / "mlflow.db")
    return World(root)


@pytest.mark.parametrize("seen_running", [True, False])
def test_a_second_attempt_that_ends_like_the_first_is_sent_too(world: World, seen_running: bool) -> None:
    stage = make_stage(world.root, "policy")
    write_rows(stage.metrics_path, range(1, 3))
    world.note("policy", stage.path, KILLED, 10.0, "pre-empted")
    store = world.send()
    assert store.run("policy").info.end_time == 10_000
    if seen_running:
        world.note("policy", stage.path)
        store = world.send()
        assert store.run("policy").info.status == "RUNNING"
    write_rows(stage.metrics_path, range(3, 5))
    world.note("policy", stage.path, KILLED, 20.0, "pre-empted again")
    store = world.send()
    assert store.steps("policy") == [1, 2, 3, 4]
    assert (store.run("policy").info.status, store.run("policy").info.end_time) == ("KILLED", 20_000)
    assert store.run("policy").data.tags["tidegate.error"] == "pre-empted again"


def test_a_stage_that_succeeds_at_last_has_no_error(world: World) -> None:
    stage = make_stage(world.root, "policy")
    world.note("policy", stage.path, FAILED, 10.0, "DataError: bad row")
    assert world.send().run("policy").data.tags["tidegate.error"] == "DataError: bad row"
    finish(stage)
    world.note("policy", stage.path, FINISHED, 20.0)
    run = world.send().run("policy")
    assert (run.info.status, run.data.tags["tidegate.error"]) == ("FINISHED", "")


def test_a_stage_that_goes_on_in_another_directory_leaves_no_run_open(world: World) -> None:
    """A killed evaluation; the next attempt meets another champion, so its evaluation has another spec."""
    before, now = make_stage(world.root, "evaluate", champion=1), make_stage(world.root, "evaluate", champion=2)
    write_rows(before.metrics_path, range(1, 3))
    world.note("evaluate", before.path)
    world.file.write(world.journal)
    assert world.send().run("evaluate").info.status == "RUNNING"
    write_rows(before.metrics_path, range(3, 4))
    tracker = make_tracker("r", make_config(), world.root, poll_seconds=0.05)
    opened = world.file.read()
    assert opened is not None
    assert opened.stages["evaluate"].status == KILLED  # Also while nothing has started it again.
    tracker.stage_started("evaluate", now.path)
    tracker.stage_finished("evaluate", finish(now, margin=0.5))
    tracker.close("Completed")
    store = Store(make_config(), world.root)
    runs = {run.data.tags["tidegate.spec_hash"]: run for run in store.runs("evaluate")}
    old, new = runs.pop(before.path.name), runs.pop(now.path.name)
    assert (old.info.status, new.info.status, runs) == ("KILLED", "FINISHED", {})
    assert [metric.step for metric in store.client.get_metric_history(old.info.run_id, "reward/mean")] == [1, 2, 3]
    assert "was killed" in old.data.tags["tidegate.error"]
    assert tracker.mlflow_ids()["stages"] == {"evaluate": new.info.run_id}
    assert world.file.read().settled  # type: ignore[union-attr]


def test_the_run_shows_the_numbers_of_the_directory_that_counts(world: World) -> None:
    before, now = make_stage(world.root, "evaluate", champion=1), make_stage(world.root, "evaluate", champion=2)
    finish(before, margin=0.1)
    finish(now, margin=0.5)
    world.note("evaluate", before.path, FINISHED, 10.0)
    world.note("evaluate", now.path, FINISHED, 20.0)
    assert world.send().run("pipeline").data.metrics["evaluate/margin"] == 0.5
    world.note("evaluate", before.path, FINISHED, 30.0)  # Back to the first one: it counts, and stands there once.
    assert sorted(map(stage_of, world.journal.stages)) == ["evaluate", "evaluate"]
    assert world.journal.stages["evaluate"].directory == str(before.path)


def test_every_param_arrives_in_requests_that_a_server_takes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    log_batch = world.client.log_batch

    def count(run_id: str, **entries: Any) -> None:
        sizes.append(len(entries.get("params", ())))
        log_batch(run_id, **entries)

    monkeypatch.setattr(world.client, "log_batch", count)
    stage = make_stage(world.root, "policy", **{f"knob_{index}": index for index in range(230)})
    world.note("policy", stage.path)
    params = world.send().run("policy").data.params
    assert {f"knob_{index}" for index in range(230)} | {"seed", "stage_version"} == params.keys()
    assert max(sizes) == 100


@pytest.mark.parametrize("suffix", [".ndjson", ".ndjson.gz", ".jsonl", ".parquet"])
def test_every_kind_of_data_file_is_a_dataset(world: World, tmp_path: Path, suffix: str) -> None:
    stage = make_stage(world.root, "check_data", tmp_path / f"rows{suffix}")
    world.note("check_data", stage.path)
    (dataset,) = world.send().run("check_data").inputs.dataset_inputs
    assert dataset.dataset.name == "rl_prompts"


def test_params_hold_no_secret_and_keep_patterns() -> None:
    assert param_text(r"token=\d+") == r"token=\d+"
    assert param_text({"pattern": "password=(.*)"}) == '{"pattern": "password=(.*)"}'
    assert param_text("https://me:pw@host/x?token=abc&y=1 or token=x") == "https://***@host/x?token=***&y=1 or token=x"


def test_one_digest_of_the_config_on_the_run_and_on_the_model_version(scripted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from scripted_stages.replace import SilentTracker

    given: list[Any] = []

    class Tracker(SilentTracker):
        def __init__(self, run_id: str, config: Any, root: Any, *, config_sha256: str, **limits: Any) -> None:
            super().__init__(run_id, config, root, **limits)
            given.append(run_tags(run_id, config, config_sha256)["tidegate.config_sha256"])

    monkeypatch.setattr(tasks.tracking, "PipelineTracker", Tracker)
    config = config_of(scripted)
    with PipelineRun(config) as pipeline:
        for name in pipeline.record.stages:
            pipeline.run_stage(name)
    spec = pipeline.state.finished["register"].directory.spec_path.read_text()
    assert f'"config_sha256": "{given[0]}"' in spec
    assert given == [ChainState.begin(config).config_sha256]
    assert run_params(config)["algorithm.name"] == "grpo"


def test_a_training_that_is_rolled_back_shows_the_redone_steps_and_its_alarms(world: World) -> None:
    """Against MLflow's own store; tests/tasks/test_tracking_rollbacks.py has the cases."""
    stage = make_stage(world.root, "policy")
    write_rows(stage.metrics_path, range(1, 4))
    world.note("policy", stage.path)
    store = world.send()
    MetricsWriter(stage.metrics_path).truncate_after(1)
    alarm = Alarm("grad_norm", "roll_back", 3, "large", 20.0, 10.0)
    append_alarms(stage.path / ALARMS_FILE, [alarm], 0, rolled_back_to=1)
    with stage.metrics_path.open("a") as stream:
        stream.write('{"step": 2, "reward/mean": 9.0}\n')
    store = world.send()
    run = store.run("policy")
    history = store.client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((m.step, m.value) for m in history) == [(1, 0.1), (2, 0.2), (2, 9.0), (3, 0.3)]
    assert max((m for m in history if m.step == 2), key=lambda m: m.timestamp).value == 9.0
    assert (run.data.metrics["roll_backs"], run.data.metrics["alarms/grad_norm"]) == (1.0, 1.0)
    (pipeline,) = [run for run in store.client.search_runs([run.info.experiment_id]) if run.info.run_name == "r"]
    assert pipeline.data.metrics["policy/alarms/grad_norm"] == 1.0
    RunSync(world.client, world.location).sync(world.journal)  # Another process finds nothing to add.
    assert len(store.steps("policy")) == 4
