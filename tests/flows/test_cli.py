"""The `tidegate` command as a process, over scripted stages: exit codes, one JSON object, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.config import load_pipeline
from tasks.pipeline import PipelineRun
from tasks.prefect_home import API_URL_VARIABLE, prefect_server, use_home

DRIVER = [sys.executable, "-m", "scripted_stages.driver"]
OBJECT_KEYS = {"run_id", "state", "stages", "gate", "model"}


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One Prefect server for the tests that do not need one of their own: starting one takes seconds."""
    root = tmp_path_factory.mktemp("prefect-root")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PREFECT_HOME", API_URL_VARIABLE):
            patch.delenv(name, raising=False)
        before = dict(os.environ)
        use_home(root)
        with prefect_server(root) as server:
            assert server is not None
            server.wait_until_ready()
            url = os.environ[API_URL_VARIABLE]
            for name in set(os.environ) - set(before):
                os.environ.pop(name)
            yield url


@pytest.fixture
def tidegate(workspace: Any, server_url: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command with the shared server."""

    def _tidegate(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**workspace.environment, API_URL_VARIABLE: server_url, **variables}
        return subprocess.run(
            [*DRIVER, *arguments], env=environment, cwd=workspace.path, capture_output=True, text=True, timeout=120
        )

    return _tidegate


def listen_again() -> None:
    """A test runner in the background ignores these signals; the command must not inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start(workspace: Any, *arguments: str) -> subprocess.Popen[str]:
    """Start the command with a Prefect server of its own, as a person does."""
    return subprocess.Popen(
        [*DRIVER, *arguments],
        env=workspace.environment,
        cwd=workspace.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen_again,
    )


def processes_of(root: Path) -> list[int]:
    """Return the live processes that know of this root by their environment: the command, servers, stages."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(psutil.Error):
            known = process.environ().get("TIDEGATE_ROOT") == str(root)
            if known and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def has_checkpoint(workspace: Any, stage: str, step: int) -> Callable[[], bool]:
    return lambda: any((workspace.root / "stages" / stage).glob(f"*/checkpoints/step_{step:06d}/manifest.json"))


def flow_states(root: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(root / "prefect" / "prefect.db")) as database:
        return [name for (name,) in database.execute("select state_name from flow_run order by created")]


@pytest.mark.server
def test_run_plan_show_list(workspace, tidegate, here) -> None:  # type: ignore[no-untyped-def]
    planned = json.loads(here("plan", "pipeline.yaml", "--json")[1])
    assert not workspace.root.exists()  # A plan writes nothing.
    first = tidegate("run", "pipeline.yaml", "--json")
    assert first.returncode == 0, first.stderr
    view = json.loads(first.stdout)
    assert set(view) == OBJECT_KEYS
    assert view["run_id"] == planned["run_id"]
    assert view["state"] == "Completed"
    assert {stage["state"] for stage in view["stages"]} == {"Completed"}
    assert all(Path(stage["directory"]).is_dir() for stage in view["stages"])
    assert view["gate"]["verdict"] == "pass"
    assert set(view["model"]) == {"name", "version", "weights_sha256", "aliases"}
    assert "policy: Completed" in first.stderr

    second = tidegate("run", "pipeline.yaml")
    assert second.returncode == 0
    assert "policy: Cached" in second.stdout
    assert "gate: PASS" in second.stdout
    assert "model: registered as scripted version 1 (then champion)" in second.stdout

    shown = json.loads(here("show", "latest", "--json")[1])
    assert shown["run_id"] == view["run_id"]
    assert {stage["state"] for stage in shown["stages"]} == {"Cached"}
    assert view["run_id"] in here("list")[1]
    assert json.loads(here("list", "--json")[1])["runs"][0]["verdict"] == "pass"
    lines = here("plan", "pipeline.yaml", "--set", "algorithm.loss.clip_low=0.3")[1]
    assert "algorithm.loss.clip_low: 0.2 -> 0.3" in lines


@pytest.mark.server
def test_preempted_and_tried_again_then_rejected_then_failed(workspace, tidegate) -> None:  # type: ignore[no-untyped-def]
    preempted = {"steps": 3, "raise": ["PreemptedError", "the machine is needed"]}
    workspace.script({"policy": {**preempted, "bad_attempts": 2}, "gate": {"verdict": "fail"}})
    done = tidegate("run", "pipeline.yaml", "--json")
    assert done.returncode == 1, done.stderr
    assert "policy: continues (from step_000003" in done.stderr
    result = json.loads(next((workspace.root / "stages" / "policy").glob("*/result.json")).read_text())
    assert result["attempts"] == 3
    view = json.loads(done.stdout)
    assert view["state"] == "Rejected"
    assert view["model"] is None
    assert view["stages"][-1]["state"] == "Skipped"

    workspace.script({"policy": preempted})
    again = tidegate("run", "pipeline.yaml", "--set", "launch.retries=0", "--set", "algorithm.loss.clip_low=0.3")
    assert again.returncode == 75
    assert "the machine is needed" in again.stderr

    workspace.script({"check_data": {"raise": ["DataError", "row 3 is bad"]}})
    done = tidegate("run", "pipeline.yaml", "--json", "--set", "data.min_pairs=2")
    assert done.returncode == 3
    assert "exit code 3): row 3 is bad" in done.stderr
    assert "Traceback" not in done.stderr
    view = json.loads(done.stdout)
    assert view["state"] == "Failed"
    assert view["error"] == {"type": "DataError", "message": "row 3 is bad", "exit_code": 3}
    assert [stage["state"] for stage in view["stages"][:3]] == ["Cached", "Failed", "Pending"]


@pytest.mark.server
def test_two_commands_at_once_then_ctrl_c_saves_and_leaves_no_process(workspace, tidegate) -> None:  # type: ignore[no-untyped-def]
    workspace.script({"policy": {"steps": 4000, "seconds": 0.1}})
    command = start(workspace, "run", "pipeline.yaml", "--json")
    try:
        wait_for(has_checkpoint(workspace, "policy", 3))
        same = tidegate("run", "pipeline.yaml")
        assert same.returncode == 75
        assert "is already going on" in same.stderr
        # Another run that shares the stage: its gate differs.
        other = tidegate("run", "pipeline.yaml", "--set", "gate.alpha=0.1")
        assert other.returncode == 75
        assert "works in" in other.stderr
        assert str(workspace.root / "stages" / "policy") in other.stderr
    finally:
        command.send_signal(signal.SIGINT)
        stdout, stderr = command.communicate(timeout=60)
    assert command.returncode == 130, stderr
    wait_for(lambda: not processes_of(workspace.root), 5)
    assert "Traceback" not in stderr
    view = json.loads(stdout)
    assert view["state"] == "Interrupted"
    assert view["stages"][3]["state"] == "Interrupted"
    assert "stopped by Ctrl-C" in view["stages"][3]["error"]
    assert flow_states(workspace.root) == ["Interrupted"]


@pytest.mark.server
def test_killed_then_stopped_by_sigterm_it_continues_to_the_same_bits(workspace, tidegate, here) -> None:  # type: ignore[no-untyped-def]
    steps = 200
    workspace.script({"policy": {"steps": steps, "seconds": 0.1}})
    command = start(workspace, "run", "pipeline.yaml")
    wait_for(has_checkpoint(workspace, "policy", 3))
    command.kill()
    command.communicate(timeout=60)
    wait_for(lambda: not processes_of(workspace.root), 30)
    killed = json.loads(here("show", "--json")[1])
    assert (killed["state"], killed["stages"][3]["state"]) == ("Interrupted", "Interrupted")

    (stage,) = workspace.stage_directories("policy")
    reached = max(int(path.name.removeprefix("step_")) for path in (stage / "checkpoints").glob("step_*"))
    command = start(workspace, "run", "pipeline.yaml", "--json")
    wait_for(has_checkpoint(workspace, "policy", reached + 3))
    command.terminate()
    stdout, stderr = command.communicate(timeout=60)
    assert command.returncode == 75, stderr
    wait_for(lambda: not processes_of(workspace.root), 5)
    assert json.loads(stdout)["state"] == "Pre-empted"
    assert "Run the same command again" in json.loads(stdout)["error"]["message"]
    assert "stopped by SIGTERM" in stderr
    assert flow_states(workspace.root)[-1] == "Pre-empted"
    assert "stopped after step" in json.loads((stage / "error.json").read_text())["message"]

    workspace.script({"policy": {"steps": steps}})
    done = tidegate("run", "pipeline.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert Path(json.loads(done.stdout)["stages"][3]["directory"]) == stage
    result = json.loads((stage / "result.json").read_text())
    assert result["attempts"] == 3
    # A run that nobody stopped.
    with PipelineRun(load_pipeline([workspace.config], root=workspace.path / "other"), whole=False) as whole:
        for name in ("sft_intake", "check_data", "reward_model", "policy"):
            whole.run_stage(name)
    other = whole.state.finished["policy"]
    assert other.directory.metrics_path.read_bytes() == (stage / "metrics.jsonl").read_bytes()
    assert other.result.summary == result["summary"]


@pytest.mark.server
def test_a_closed_terminal_is_a_sigterm_and_a_proxy_is_not_asked_for_loopback(workspace) -> None:  # type: ignore[no-untyped-def]
    workspace.script({"policy": {"steps": 4000, "seconds": 0.1}})
    with pytest.MonkeyPatch.context() as patch:
        for name in ("no_proxy", "NO_PROXY"):
            patch.delenv(name, raising=False)
        for name in ("http_proxy", "HTTPS_PROXY", "all_proxy"):
            patch.setenv(name, "http://127.0.0.1:9")
        command = start(workspace, "run", "pipeline.yaml", "--json")
    try:
        wait_for(has_checkpoint(workspace, "policy", 3))
    finally:
        for _ in range(2):  # The shell's and the kernel's.
            command.send_signal(signal.SIGHUP)
        stdout, stderr = command.communicate(timeout=60)
    assert command.returncode == 75, stderr
    wait_for(lambda: not processes_of(workspace.root), 5)
    view = json.loads(stdout)
    assert (view["state"], view["stages"][3]["state"]) == ("Pre-empted", "Pre-empted")
    (stage,) = workspace.stage_directories("policy")
    assert "stopped after step" in json.loads((stage / "error.json").read_text())["message"]


def test_refusals_come_before_any_server_starts(workspace, here) -> None:  # type: ignore[no-untyped-def]
    def refused(*arguments: str) -> str:
        code, _, errors = here(*arguments)
        assert code == 2, errors
        return errors

    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", "pipeline.yaml", "--set", "sead=1"],
        env=workspace.environment,
        cwd=workspace.path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "Did you mean 'seed'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert "write 1e-6 without quotes" in refused(
        "run", "pipeline.yaml", "--set", "algorithm.optimizer.learning_rate='1e-6'"
    )
    assert "does not exist" in refused("plan", "pipeline.yaml", "--set", "checkpoint.source=nowhere")
    assert "no such command" in refused("rnu", "pipeline.yaml").lower()
    for command in ("plan", "run"):
        message = refused(command, "pipeline.yaml", "--set", "tracking.uri=http://user:hush-hush@127.0.0.1:9")
        assert "MLFLOW_TRACKING_PASSWORD" in message
        assert "hush-hush" not in message
        assert "tracking.uri is ftp://x" in refused(command, "pipeline.yaml", "--set", "tracking.uri=ftp://x")
        assert "pipeline.yaml is a file" in refused(command, "pipeline.yaml", "--root", "pipeline.yaml")
    assert not (workspace.root / "prefect").exists()


def test_an_unreachable_server_is_temporary(workspace) -> None:  # type: ignore[no-untyped-def]
    done = subprocess.run(
        [*DRIVER, "run", "pipeline.yaml"],
        env={**workspace.environment, API_URL_VARIABLE: "http://127.0.0.1:9/api"},
        cwd=workspace.path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 75
    assert "no Prefect server answers at PREFECT_API_URL" in done.stderr


def test_help_and_schema_are_quick_and_light(workspace, here) -> None:  # type: ignore[no-untyped-def]
    heavy = "{'torch', 'transformers', 'vllm', 'mlflow', 'prefect', 'pandas', 'great_expectations'}"
    code = f"import sys, flows.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "[]"
    # Prefect itself imports pandas where it is installed.
    heavy = heavy.replace("'prefect', 'pandas', ", "")
    code = f"import sys, flows.post_training, flows.stages; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=workspace.path)
    assert done.stdout.strip().splitlines()[-1] == "[]"
    schema = json.loads(here("schema")[1])
    assert schema["properties"]["seed"]["description"] == "Seed of every stage."
    assert {"name", "checkpoint", "data", "algorithm", "gate"} <= set(schema["required"])
