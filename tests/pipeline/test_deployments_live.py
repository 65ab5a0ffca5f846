"""The deployments of prefect.yaml against a real Prefect server, with a worker on each pool and a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ruamel.yaml import YAML

from tasks.mlflow_store import connect, locate_store

REPOSITORY = Path(__file__).parents[2]
POOLS = ("cpu", "gpu")
NUM_STEPS = 400


def tiny_config(root: Path, checkpoint: Path, data: Path) -> dict[str, Any]:
    """RL that a tiny model learns in seconds (to answer briefly), slow enough to be cancelled in the middle."""
    brief = {"kind": "length", "max_tokens": 4, "slack_tokens": 8}
    return {
        "name": "tiny",
        "root": str(root),
        "seed": 1,
        "checkpoint": {"source": str(checkpoint)},
        "data": {
            "preferences": [{"path": str(data / "pairs.jsonl")}],
            "eval_prompts": str(data / "eval.jsonl"),
            "near_duplicates": None,  # Prompts made from one template.
            "min_pairs": 10,
            "max_prompt_tokens": 64,
            "max_total_tokens": 128,
        },
        "algorithm": {
            "name": "grpo",
            "num_steps": NUM_STEPS,
            "prompts_per_step": 4,
            "checkpoint_every_steps": 20,
            "autocast": "none",
            "optimizer": {"learning_rate": 0.01},
        },
        "rollout": {"engine": "transformers", "max_new_tokens": 12, "dtype": "float32"},
        "rewards": [brief],
        "evaluation": {"metrics": [brief | {"name": "brevity"}], "kl": False, "sampling": {"temperature": 1.0}},
        "gate": {
            "primary": {"metric": "brevity", "scale": "absolute", "min_gain": 0.05},
            "guards": [],
            "min_prompts": 40,
            "min_clusters": 2,
            "num_resamples": 1000,
        },
        "registry": {"model_name": "tiny"},
        "launch": {"num_threads": 1, "grace_seconds": 10.0},
        "orchestration": {"mode": "deployments", "poll_seconds": 0.5},
    }


def write_data(folder: Path) -> Path:
    folder.mkdir()
    nouns = ("house", "tree", "river", "road", "table", "cup", "song", "bird", "cloud", "shoe")
    things = [f"{kind} {noun}" for kind in ("red", "blue", "old", "new", "small", "big") for noun in nouns]
    # Neither side is the longer one: data that length alone tells apart are refused.
    pairs = [
        {
            "prompt": f"A word on the {thing}.",
            "chosen": f"A fine {thing}{' indeed' if index % 2 else ''}.",
            "rejected": f"A poor {thing}{'' if index % 2 else ' indeed'}.",
        }
        for index, thing in enumerate(things)
    ]
    prompts = [{"prompt": f"Tell me of item {number}."} for number in range(48)]
    for name, rows in (("pairs", pairs), ("eval", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def wait_for(what: str, look: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.2)
    raise AssertionError(f"waited {seconds:.0f} s for {what}")


class Site:
    """A Prefect server on loopback, a worker on each pool, a root that they share."""

    def __init__(self, path: Path) -> None:
        self.path, self.root = path, path / "root"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "MLFLOW"))},
            "PREFECT_HOME": str(path / "prefect"),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PREFECT_RUNNER_POLL_FREQUENCY": "1",
            "PREFECT_CLI_COLORS": "false",
            "DO_NOT_TRACK": "1",
            "TIDEGATE_HOME": str(REPOSITORY),
            "TIDEGATE_ROOT": str(self.root),
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> None:
        with (self.path / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "prefect", *arguments],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.path,
            )

    def command(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=180,
            cwd=self.path,
        )
        assert done.returncode == 0, f"prefect {' '.join(arguments)}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the API. 503 means that its SQLite file is locked for now; Prefect's client tries again, too."""
        deadline = time.monotonic() + 90
        while (answer := httpx.request(method, self.api + path, json=body, timeout=90)).status_code == 503:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.5)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def post(self, path: str, **body: Any) -> Any:
        return self.call("POST", path, body)

    def flow_runs(self, flow: str = "post-training") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.post(
            "/flow_runs/filter", flows={"name": {"any_": [flow]}}, sort="EXPECTED_START_TIME_ASC"
        )
        return [run for run in found if run["state_type"] != "SCHEDULED"]

    def state(self, run: dict[str, Any]) -> tuple[str, str]:
        state = self.call("GET", f"/flow_runs/{run['id']}")["state"]
        return state["type"], state["name"]

    def logs(self) -> str:
        tails = [f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in self.path.glob("*.log")]
        return "\n".join(tails)

    def close(self) -> None:
        for process in reversed(list(self.processes.values())):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    try:
        site.start("server", "server", "start", "--host", "127.0.0.1", "--port", str(site.port))

        def is_up() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{site.api}/health", timeout=2).status_code == 200
            return False

        wait_for("the Prefect server", is_up, 120)
        for pool in POOLS:  # What `prefect work-pool create` does, without seconds for each command.
            template = json.loads((REPOSITORY / "deployments" / "work_pools" / f"{pool}.json").read_text())
            site.post("/work_pools/", name=f"tidegate-{pool}", type="process", base_job_template=template)
        yield site
    finally:
        site.close()


def deploy(site: Site, config: dict[str, Any]) -> None:
    """Deploy prefect.yaml as it is, except for the config and the time of the schedule; start the workers."""
    yaml = YAML(typ="safe")
    document = yaml.load(REPOSITORY / "prefect.yaml")
    for deployment in document["deployments"]:
        deployment["parameters"] = {"config": config}
    document["deployments"][0]["schedules"] = [{"interval": 20}]
    with (site.path / "prefect.yaml").open("w") as stream:
        yaml.dump(document, stream)
    site.command("deploy", "--all", "--prefect-file", str(site.path / "prefect.yaml"))
    # Workers come after: Prefect's SQLite database can be locked for a minute when they poll while others write.
    for pool in POOLS:
        site.start(f"worker-{pool}", "worker", "start", "--pool", f"tidegate-{pool}", "--type", "process")


def pause_schedules(site: Site, deployment_id: str) -> None:
    """One scheduled run is enough; those to come are removed with this."""
    path = f"/deployments/{deployment_id}/schedules"
    for schedule in site.call("GET", path):
        site.call("PATCH", f"{path}/{schedule['id']}", {"active": False})


def processes_of(pgid: int) -> list[int]:
    """Return the living processes of a process group."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            fields = re.sub(r"^.*\)", "", (entry / "stat").read_text()).split()
            if int(fields[2]) == pgid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_schedule_cancel_in_rl_then_event_to_the_end(site: Site, tiny_checkpoint: Path) -> None:
    """Scheduled, cancelled while RL trains (its processes are gone within 30 s), started by the event, completed."""
    config = tiny_config(site.root, tiny_checkpoint, write_data(site.path / "data"))
    deploy(site, config)
    try:
        first = wait_for("the scheduled run", site.flow_runs, 120)[0]
        pause_schedules(site, first["deployment_id"])

        def training() -> Path | None:
            assert any(run["state_type"] in ("PENDING", "RUNNING") for run in site.flow_runs()), "no run goes on"
            for progress in (site.root / "stages" / "policy").glob("*/progress.json"):
                if json.loads(progress.read_text())["step"] >= 25 and (progress.parent / "lock.json").exists():
                    return progress.parent
            return None

        stage = wait_for("RL to train", training, 300)
        # On a slow machine a second one may have started before the schedule was paused: it was refused.
        (scheduled,) = [run for run in site.flow_runs() if run["state_type"] == "RUNNING"]
        assert scheduled["auto_scheduled"]
        pid = json.loads((stage / "lock.json").read_text())["pid"]
        assert pid in processes_of(pid), "a stage leads its own process group"
        cancelled = time.monotonic()
        cancelling = {"type": "CANCELLING", "name": "Cancelling"}  # What `prefect flow-run cancel` does, in no time.
        site.post(f"/flow_runs/{scheduled['id']}/set_state", state=cancelling)
        wait_for("RL's process group to end", lambda: not processes_of(pid), 30 - (time.monotonic() - cancelled))
        wait_for("the run to be cancelled", lambda: site.state(scheduled)[0] == "CANCELLED", 60)
        assert not (stage / "result.json").exists()
        (checkpoint,) = sorted((stage / "checkpoints").glob("step_*"))[-1:]

        emit = ("events", "emit", "tidegate.dataset.updated", "--resource-id", "tidegate.dataset.tiny")
        before = {run["id"] for run in site.flow_runs()}
        site.command(*emit)

        def new_runs() -> list[dict[str, Any]]:
            return [run for run in site.flow_runs() if run["id"] not in before]

        by_event = wait_for("the run that the event starts", new_runs, 60)[0]
        wait_for("its end", lambda: site.state(by_event)[0] in ("COMPLETED", "FAILED", "CRASHED"), 400)
        assert site.state(by_event) == ("COMPLETED", "Completed"), site.logs()
        # It went on where RL was stopped: the same directory, a second attempt, no step twice.
        assert len(json.loads((stage / "environment.json").read_text())["attempts"]) == 2
        steps = [json.loads(line)["step"] for line in (stage / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, NUM_STEPS + 1))
        assert int(checkpoint.name.removeprefix("step_")) >= 20
        grpo = [run["work_pool_name"] for run in site.flow_runs("policy")]
        assert grpo == ["tidegate-gpu", "tidegate-gpu"]
        check_registry_and_tracking(site, stage)
    except BaseException:
        print(site.logs())
        raise


def check_registry_and_tracking(site: Site, stage: Path) -> None:
    client = connect(locate_store(SimpleNamespace(uri=None), site.root))
    version = client.get_model_version_by_alias("tiny", "champion")
    result = json.loads((stage / "result.json").read_text())
    assert version.tags["tidegate.weights_sha256"] == result["summary"]["weights_sha256"]
    experiment = client.get_experiment_by_name("tidegate")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    (grpo,) = [run for run in runs if run.data.tags["tidegate.stage"] == "policy"]
    assert grpo.data.tags["tidegate.resumed"] == "true"
    (pipeline,) = client.search_runs([experiment.experiment_id], "tags.`tidegate.stage` = 'pipeline'", max_results=1)
    assert [file.path for file in client.list_artifacts(pipeline.info.run_id)] == ["report.html"]
    logged = [metric.step for metric in client.get_metric_history(grpo.info.run_id, "reward/mean")]
    assert logged == list(range(1, NUM_STEPS + 1))
    keys = [artifact["key"] for artifact in site.post("/artifacts/filter")]
    assert {"stages", "gate-report"} <= set(keys)
