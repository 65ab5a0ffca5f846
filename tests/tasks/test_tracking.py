"""A pipeline run in MLflow: a real SQLite store, and a real server that is killed in the middle."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tracked import Store, finish, make_config, make_stage, make_tracker, write_rows

import tasks.tracking
from tasks.champion import current_champion, verify_registration
from tasks.mlflow_store import locate_store
from tasks.runs import RunState
from tasks.tracking import STATUS_OF_STATE, status_of_error
from tasks.tracking_journal import JournalFile
from training_core.errors import (
    ConfigurationError,
    PreemptedError,
    ServerUnreachableError,
    StageTimeoutError,
    TrainingDivergedError,
)
from training_core.protocol.atomic import write_json
from training_core.protocol.digests import path_digest, weights_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageSpec


@pytest.fixture(autouse=True)
def _no_store_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def root(tmp_path: Path, empty_store: Path) -> Path:
    """A root whose store has its tables."""
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(empty_store, root / "mlflow.db")
    return root


def test_a_run_and_its_stages(tmp_path: Path, root: Path) -> None:
    """Runs, parent, params, tags, datasets, rows while training goes on, summary, artifacts, statuses."""
    config = make_config()
    data = tmp_path / "rl_prompts.parquet"
    data.write_bytes(b"x")
    tracker = make_tracker("demo-1", config, root, poll_seconds=0.1)
    directory = make_stage(root, "policy", data, algorithm={"name": "grpo", "learning_rate": 1e-6})
    tracker.stage_started("policy", directory.path)
    write_rows(directory.metrics_path, range(1, 4))
    write_rows(directory.timings_path, range(1, 4), "time/step_seconds")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not tracker.mlflow_ids()["stages"]:
        tracker.poll()
        time.sleep(0.1)
    store = Store(config, root)
    while time.monotonic() < deadline and store.steps("policy") != [1, 2, 3]:
        time.sleep(0.2)
    assert store.steps("policy") == [1, 2, 3]
    assert store.runs("policy")[0].info.status == "RUNNING"
    write_rows(directory.metrics_path, range(4, 6))
    tracker.stage_finished("policy", finish(directory, reward_mean_last=0.5, policy={"kl": 0.1}, text="yes"))
    gate = make_stage(root, "gate")
    tracker.stage_started("gate", gate.path)
    guards = [{"name": "length.ratio_range", "value": 1.1}, {"name": "unmeasured", "value": None}]
    tracker.stage_finished("gate", finish(gate, verdict="pass", primary={"value": 0.2}, guards=guards))
    failing = make_stage(root, "register")
    tracker.stage_started("register", failing.path)
    tracker.stage_finished("register", ConfigurationError("bad http://user:secret@host/"))
    (root / "runs" / "demo-1" / "report.html").write_text("<html></html>")
    tracker.close("Failed")

    assert store.steps("policy") == [1, 2, 3, 4, 5]
    assert store.steps("policy", "time/step_seconds") == [1, 2, 3]
    (pipeline,), (stage,), (register,) = store.runs("pipeline"), store.runs("policy"), store.runs("register")
    assert stage.data.tags["mlflow.parentRunId"] == pipeline.info.run_id
    assert (pipeline.info.status, stage.info.status, register.info.status) == ("FAILED", "FINISHED", "FAILED")
    assert pipeline.data.params == {
        "name": "demo",
        "seed": "3",
        "algorithm.name": "grpo",
        "algorithm.kl.coefficient": "0.5",
        "rewards": '[{"kind": "truncation"}]',
    }
    assert pipeline.data.metrics == {
        "policy/reward_mean_last": 0.5,
        "policy/policy/kl": 0.1,
        "gate/primary/value": 0.2,
        "gate/guards/length.ratio_range": 1.1,
    }
    assert pipeline.data.tags["tidegate.gate_verdict"] == "pass"
    assert pipeline.data.tags["tidegate.run_id"] == "demo-1"
    assert stage.data.params["algorithm.learning_rate"] == "1e-06"
    assert stage.data.params["seed"] == "7"
    assert stage.data.metrics["summary/reward_mean_last"] == 0.5
    assert stage.data.metrics["summary/policy/kl"] == 0.1
    assert stage.data.metrics["summary/seconds"] == 2.5
    assert stage.data.tags["tidegate.resumed"] == "true"
    assert stage.data.tags["tidegate.git_commit"] == "def"
    assert stage.data.tags["tidegate.text"] == "yes"
    assert "secret" not in register.data.tags["tidegate.error"]
    (dataset,) = stage.inputs.dataset_inputs
    assert dataset.dataset.digest == ("ab" * 32)[:36]
    assert {tag.key: tag.value for tag in dataset.tags}["tidegate.sha256"] == "ab" * 32
    assert [f.path for f in store.client.list_artifacts(stage.info.run_id)] == ["gate.json"]
    assert [f.path for f in store.client.list_artifacts(pipeline.info.run_id)] == ["report.html"]
    assert (root / "mlflow-artifacts").is_dir()

    # The same run again: the same MLflow runs, nothing twice. Another run reuses the stage: a run of its own.
    again = make_tracker("demo-1", config, root, poll_seconds=0.1)
    again.stage_started("policy", directory.path, cached=True)
    again.stage_finished("policy", StageDirectory(directory.path).result())  # type: ignore[arg-type]
    again.close("Completed")
    assert store.steps("policy") == [1, 2, 3, 4, 5]
    assert store.runs("pipeline")[0].info.status == "FINISHED"
    other = make_tracker("demo-2", config, root, poll_seconds=0.1)
    other.stage_started("policy", directory.path, cached=True)
    other.stage_finished("policy", StageDirectory(directory.path).result())  # type: ignore[arg-type]
    other.close("Completed")
    cached = [run for run in store.runs("policy") if run.info.run_id != stage.info.run_id]
    assert [run.data.tags["tidegate.cached_from"] for run in cached] == [stage.info.run_id]
    assert cached[0].data.metrics["summary/reward_mean_last"] == 0.5


def test_what_a_killed_process_left_is_finished_by_the_next_one(root: Path) -> None:
    config = make_config()
    done, stopped = make_stage(root, "reward_model"), make_stage(root, "policy")
    write_rows(stopped.metrics_path, range(1, 3))
    code = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[3])\n"
        "from tracked import make_config, make_tracker\n"
        "t = make_tracker('killed', make_config(), Path(sys.argv[1]), poll_seconds=0.1)\n"
        "[t.stage_started(p.split('/')[-2], Path(p)) for p in sys.argv[2].split(',')]\n"
        "print('up', flush=True)\n"
        "while not (len(t.mlflow_ids()['stages']) == 2): time.sleep(0.1)\n"
        "print('known', flush=True); time.sleep(600)"
    )
    paths = f"{done.path},{stopped.path}"
    command = [sys.executable, "-c", code, str(root), paths, str(Path(__file__).parents[1] / "scripted")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().strip() for _ in range(2)] == ["up", "known"]
        live = make_tracker("killed", config, root, poll_seconds=0.1)  # Its owner lives: this one keeps away.
        assert live._journal is None
        process.kill()
    write_rows(stopped.metrics_path, range(3, 5))
    finish(done, accuracy=0.9)
    store = Store(config, root)
    assert store.runs("policy")[0].info.status == "RUNNING"
    tracker = make_tracker("next", config, root, poll_seconds=0.1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not JournalFile(root, "killed").read().settled:  # type: ignore[union-attr]
        time.sleep(0.1)
    tracker.close("Completed")
    assert store.runs("policy")[0].info.status == "KILLED"
    assert store.runs("reward_model")[0].info.status == "FINISHED"
    assert store.runs("reward_model")[0].data.metrics["summary/accuracy"] == 0.9
    assert {run.data.tags["tidegate.run_id"]: run.info.status for run in store.runs("pipeline")} == {
        "killed": "KILLED",
        "next": "FINISHED",
    }
    assert {run.data.tags["tidegate.state"] for run in store.runs("pipeline")} == {"Interrupted", "Completed"}
    assert store.steps("policy") == [1, 2, 3, 4]


def test_states_and_errors_have_their_status() -> None:
    assert STATUS_OF_STATE.keys() == set(RunState)
    kinds = {status: {s.value for s in RunState if STATUS_OF_STATE[s] == status} for status in STATUS_OF_STATE.values()}
    assert kinds == {
        "FINISHED": {"Completed", "Rejected", "Incomplete"},
        "FAILED": {"Failed", "GateError"},
        "KILLED": {"Running", "Pre-empted", "Cancelled", "Interrupted"},
    }
    stops = (PreemptedError("x"), StageTimeoutError("x"), KeyboardInterrupt(), GeneratorExit())
    assert {status_of_error(error) for error in stops} == {"KILLED"}
    assert {status_of_error(error) for error in (TrainingDivergedError("x"), ValueError())} == {"FAILED"}


def test_nothing_raises_and_nothing_waits_when_nothing_answers(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An unreachable server: one warning, quick calls, all of it sent by a later run that reaches one."""
    port = free_port()
    directory = make_stage(root, "policy")
    write_rows(directory.metrics_path, range(1, 4))
    started = time.monotonic()
    with caplog.at_level(logging.INFO, logger="tasks.tracking"):
        tracker = make_tracker("r1", make_config(f"http://127.0.0.1:{port}"), root, poll_seconds=0.05)
        tracker.stage_started("policy", directory.path)
        for _ in range(20):
            tracker.poll()
        assert time.monotonic() - started < 2.0
        time.sleep(1.0)
        tracker.stage_finished("policy", finish(directory))
        tracker.close("Completed")
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, [record.getMessage() for record in warnings]
    assert "Training goes on" in warnings[0].getMessage()
    assert not JournalFile(root, "r1").read().settled  # type: ignore[union-attr]

    # Another store is none of its business: a run there is told nothing of this one, and the rest stays to be sent.
    waiting = JournalFile(root, "r3")  # In the default store: looked at after r1.
    waiting.create("r3", "r3", "test", locate_store(make_config().tracking, root).store_id)
    elsewhere = make_tracker("r2", make_config(), root, poll_seconds=0.05)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not waiting.read().settled:  # type: ignore[union-attr]
        time.sleep(0.1)
    elsewhere.close("Completed")
    assert waiting.read().settled  # type: ignore[union-attr]
    assert not JournalFile(root, "r1").read().settled  # type: ignore[union-attr]
    assert Store(make_config(), root).runs("policy") == []


def test_a_later_run_with_the_same_store_sends_the_rest(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_stage(root, "policy")
    write_rows(directory.metrics_path, range(1, 4))
    with monkeypatch.context() as down:
        down.setattr(tasks.tracking, "connect", unreachable)
        tracker = make_tracker("r1", make_config(), root, poll_seconds=0.05)
        tracker.stage_started("policy", directory.path)
        tracker.stage_finished("policy", finish(directory))
        tracker.close("Completed")
    assert tracker.mlflow_ids() == {"run_id": None, "stages": {}}
    later = make_tracker("r2", make_config(), root, poll_seconds=0.05)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not JournalFile(root, "r1").read().settled:  # type: ignore[union-attr]
        time.sleep(0.1)
    later.close("Completed")
    store = Store(make_config(), root)
    assert store.steps("policy") == [1, 2, 3]
    assert {run.info.status for run in store.runs("pipeline")} == {"FINISHED"}


def unreachable(*_args: object) -> None:
    raise ServerUnreachableError("nobody answers")


def test_a_store_that_is_silent_takes_no_known_id_away(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_stage(root, "policy")
    tracker = make_tracker("r", make_config(), root, poll_seconds=0.05)
    tracker.stage_started("policy", directory.path)
    tracker.stage_finished("policy", finish(directory))
    tracker.close("Completed")
    known = tracker.mlflow_ids()
    assert known == {"run_id": known["run_id"], "stages": {"policy": known["stages"]["policy"]}}
    monkeypatch.setattr(tasks.tracking, "connect", unreachable)
    again = make_tracker("r", make_config(), root, poll_seconds=0.05)
    again.stage_started("policy", directory.path, cached=True)
    assert again.mlflow_ids() == known
    again.close("Failed")
    assert again.mlflow_ids() == known
    moved = make_tracker("r", make_config("http://127.0.0.1:9"), root, poll_seconds=0.05)
    assert moved.mlflow_ids() == {"run_id": None, "stages": {}}  # Ids are of one store.
    moved.close("Failed")


def test_a_full_disk_or_a_file_in_the_way_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "runs").write_text("a file where a folder should be")
    tracker = make_tracker("r", make_config(), tmp_path)
    tracker.stage_started("policy", tmp_path / "x")
    tracker.stage_finished("policy", ValueError("boom"))
    tracker.poll()
    tracker.close("Failed")
    assert "tracking could not start" in caplog.text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A real MLflow server on loopback that can be killed and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--backend-store-uri", f"sqlite:///{self.folder}/server.db", "--workers", "1"),
            *("--artifacts-destination", str(self.folder / "artifacts"), "--serve-artifacts"),
        ]
        environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=environment, cwd=self.folder
            )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(self.uri + "/health", timeout=2)
                return
            except OSError:
                time.sleep(0.3)
        raise AssertionError((self.folder / "server.log").read_text()[-2000:])

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Server]:
    """A server that runs; starting one takes many seconds, so two tests share it."""
    server = Server(tmp_path_factory.mktemp("server"))
    shutil.copy(empty_store, server.folder / "server.db")
    server.start()
    yield server
    server.kill()


@pytest.mark.server
@pytest.mark.slow
def test_a_server_killed_and_started_again_loses_and_doubles_nothing(tmp_path: Path, server: Server) -> None:
    root, config = tmp_path / "root", make_config(server.uri)
    directory = make_stage(root, "policy")
    tracker = make_tracker("r", config, root, poll_seconds=0.05)
    tracker.stage_started("policy", directory.path)
    for step in range(1, 400):
        write_rows(directory.metrics_path, range(step, step + 1))
        tracker.poll()
        if step == 150:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not tracker.mlflow_ids()["stages"]:
                time.sleep(0.05)
            time.sleep(1.0)
            server.kill()
        if step == 250:
            server.start()
        time.sleep(0.005)
    tracker.stage_finished("policy", finish(directory))
    tracker.close("Completed")
    store = Store(config, root)
    assert store.steps("policy") == list(range(1, 400))
    (run,) = store.runs("policy")
    assert run.info.status == "FINISHED"
    assert [f.path for f in store.client.list_artifacts(run.info.run_id)] == ["gate.json"]


@pytest.mark.server
@pytest.mark.slow
def test_register_through_a_server(tmp_path: Path, server: Server, tiny_checkpoint: Path) -> None:
    """Weights go to a server and come back; its refusal of sources that it does not know is heeded."""
    root, config = tmp_path / "root", make_config(server.uri)
    config.registry = SimpleNamespace(model_name="served")
    root.mkdir()
    weights = weights_digest(tiny_checkpoint)
    write_json(root / "gate.json", {"verdict": "pass", "reasons": [], "weights_sha256": {"candidate": weights}})
    inputs = {"policy": tiny_checkpoint, "gate": root / "gate.json"}
    spec = StageSpec(
        stage="register",
        stage_version=1,
        config={"registry": {"model_name": "served"}, "tracking": {"uri": server.uri, "experiment": "test"}},
        inputs={name: Artifact(path=str(path), sha256=path_digest(path)) for name, path in inputs.items()},
    )
    directory = StageDirectory.of_spec(root, spec)
    directory.prepare(spec)
    command = [sys.executable, "-m", "tasks", str(directory.spec_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    champion = current_champion(config, root, tmp_path / "champions")
    assert champion is not None
    assert weights_digest(Path(champion["path"])) == weights == champion["weights_sha256"]
    registration = json.loads((directory.outputs_path / "registration.json").read_text())
    assert verify_registration(config, root, registration)
    server.kill()
    with pytest.raises(ServerUnreachableError):
        current_champion(config, root, tmp_path / "champions")
