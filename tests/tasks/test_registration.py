"""The stage `register` with a real SQLite registry and a tiny model, as the process that the pipeline starts."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.champion import current_champion, verify_registration
from tasks.mlflow_store import connect, experiment_id, locate_store
from tasks.promotion import CHAMPION, find_alias
from training_core.errors import NotPromotableError
from training_core.protocol.atomic import read_json, write_json
from training_core.protocol.digests import path_digest, weights_digest
from training_core.protocol.directory import StageDirectory
from training_core.records import Artifact, StageSpec

NAME = "tiny-policy"


@pytest.fixture(autouse=True)
def _no_store_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="session")
def policies(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two policies with other weights than each other."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("policies")
    found = {}
    for number, name in enumerate(("first", "second")):
        path = Path(shutil.copytree(tiny_checkpoint, folder / name))
        (weights,) = path.glob("*.safetensors")
        tensors = {key: value + 0.001 * (number + 1) for key, value in load_file(weights).items()}
        save_file(tensors, weights, metadata={"format": "pt"})
        found[name] = path
    return found


class World:
    """A root with policies, gates and a registry."""

    def __init__(self, root: Path, zygote: Any) -> None:
        self.root = root
        self.zygote = zygote
        root.mkdir(exist_ok=True)
        tracking = SimpleNamespace(uri=None, experiment="test")
        self.config = SimpleNamespace(registry=SimpleNamespace(model_name=NAME), tracking=tracking)

    def gate(self, policy: Path, champion: str | None = None, verdict: str = "pass", **changes: Any) -> Path:
        digests = {"candidate": weights_digest(policy), "reference": "ee" * 32}
        if champion:
            digests["champion"] = champion
        gate = {"verdict": verdict, "reasons": [], "weights_sha256": digests, "evaluation_digest": "e" * 64, **changes}
        path = self.root / f"gate-{len(list(self.root.glob('gate-*')))}.json"
        write_json(path, gate)
        return path

    def spec(self, policy: Path, gate: Path, uri: str | None = None, **lineage: Any) -> StageDirectory:
        spec = StageSpec(
            stage="register",
            stage_version=1,
            config={
                "registry": {"model_name": NAME},
                "tracking": {"uri": uri, "experiment": "test"},
                "lineage": {
                    "run_id": "run-1",
                    "dataset_sha256": "da" * 32,
                    "spec_hashes": {"policy": "ab12"},
                    **lineage,
                },
            },
            inputs={
                "policy": Artifact(path=str(policy), sha256=path_digest(policy)),
                "gate": Artifact(path=str(gate), sha256=path_digest(gate)),
            },
        )
        directory = StageDirectory.of_spec(self.root, spec)
        directory.prepare(spec)
        return directory

    def run(self, directory: StageDirectory, mark: str = "") -> tuple[int, str]:
        """Run the stage as a process; return its code and what it wrote to standard error."""
        code, errors = self.zygote.start_stage(directory.spec_path, mark).wait()
        return code, errors

    @property
    def client(self) -> Any:
        return connect(locate_store(self.config.tracking, self.root))

    def versions(self) -> list[Any]:
        return sorted(self.client.search_model_versions(f"name = '{NAME}'"), key=lambda v: int(v.version))

    def aliases(self) -> dict[str, str]:
        return {key: str(value) for key, value in self.client.get_registered_model(NAME).aliases.items()}


@pytest.fixture
def world(tmp_path: Path, zygote: Any) -> World:
    return World(tmp_path / "root", zygote)


@pytest.fixture
def prepared(world: World, empty_store: Path) -> World:
    """A world whose store has its tables."""
    shutil.copy(empty_store, world.root / "mlflow.db")
    return world


def registration_of(directory: StageDirectory) -> dict[str, Any]:
    content: dict[str, Any] = read_json(directory.outputs_path / "registration.json")
    return content


@pytest.mark.slow
def test_two_generations_of_champions(prepared: World, policies: dict[str, Path], tmp_path: Path) -> None:
    """Register, load back, ask for the champion, replace it, and refuse what was judged against an old one."""
    world = prepared
    first, second = policies["first"], policies["second"]
    directory = world.spec(first, world.gate(first))
    code, errors = world.run(directory)
    assert code == 0, errors
    registration = registration_of(directory)
    assert registration["aliases"] == ["challenger", "champion"]
    assert registration["weights_sha256"] == weights_digest(first)
    (version,) = world.versions()
    tags = version.tags
    assert tags["tidegate.weights_sha256"] == weights_digest(first)
    assert tags["tidegate.gate_verdict"] == "pass"
    assert tags["tidegate.run_id"] == "run-1"
    assert tags["tidegate.dataset_sha256"] == "da" * 32
    assert tags["tidegate.spec.policy"] == "ab12"
    assert tags["tidegate.promoted_from"] == ""
    assert world.client.get_run(version.run_id).data.tags["tidegate.stage"] == "register"
    assert not (directory.path / "scratch").exists()

    import mlflow

    location = locate_store(world.config.tracking, world.root)
    mlflow.set_tracking_uri(location.uri)
    try:
        pipeline = mlflow.transformers.load_model(f"models:/{NAME}@champion")
        info = mlflow.models.get_model_info(f"models:/{NAME}@champion")
    finally:
        mlflow.set_tracking_uri(None)
        os.environ.pop("MLFLOW_TRACKING_URI", None)
    assert type(pipeline.model).__name__ == "LlamaForCausalLM"
    assert info.signature is not None
    assert info.saved_input_example_info is not None

    downloads = tmp_path / "champions"
    looked_at = current_champion(world.config, world.root, downloads, download=False)
    assert looked_at is not None
    assert (looked_at["version"], looked_at["path"]) == ("1", None)
    assert not downloads.exists()
    champion = current_champion(world.config, world.root, downloads)
    assert champion is not None
    assert (champion["version"], champion["weights_sha256"]) == ("1", weights_digest(first))
    assert weights_digest(Path(champion["path"])) == weights_digest(first)
    assert current_champion(world.config, world.root, downloads, download=False) == champion
    # What a killed process left of a download is removed with the next one.
    shutil.rmtree(champion["path"])
    (downloads / ".champion-left").mkdir()
    assert current_champion(world.config, world.root, downloads) == champion
    assert not (downloads / ".champion-left").exists()
    before = Path(champion["path"]).stat().st_mtime_ns
    assert current_champion(world.config, world.root, downloads)["path"] == champion["path"]  # type: ignore[index]
    assert Path(champion["path"]).stat().st_mtime_ns == before
    assert current_champion(world.config, world.root, downloads, candidate_sha256=weights_digest(first)) is None

    # Judged without a champion, but there is one now: refused, nothing registered.
    late = world.spec(second, world.gate(second))
    code, errors = world.run(late)
    assert code == 4
    assert "NotPromotableError" in errors
    assert "run the same command again" in errors.lower()
    assert len(world.versions()) == 1

    next_one = world.spec(second, world.gate(second, champion=weights_digest(first)))
    code, errors = world.run(next_one)
    assert code == 0, errors
    assert world.aliases() == {"challenger": "2", "champion": "2", "previous": "1"}
    assert world.versions()[1].tags["tidegate.promoted_from"] == "1"
    assert world.versions()[0].tags["tidegate.demoted_by"] == "2"
    judged = current_champion(world.config, world.root, downloads, candidate_sha256=weights_digest(second))
    assert judged is not None
    assert judged["weights_sha256"] == weights_digest(first)

    # The same policy on another verdict (a changed field of the gate): its own earlier success is no rival.
    again = world.spec(second, world.gate(second, champion=weights_digest(first), evaluation_digest="f" * 64))
    code, errors = world.run(again)
    assert code == 0, errors
    assert world.aliases() == {"challenger": "3", "champion": "3", "previous": "1"}
    assert world.versions()[2].tags["tidegate.promoted_from"] == "2"
    judged = current_champion(world.config, world.root, downloads, candidate_sha256=weights_digest(second))
    assert judged is not None
    assert judged["weights_sha256"] == weights_digest(first)

    # A cached result counts as long as the registry has the version.
    lock = world.root / "mlflow.lock"
    lock.unlink(missing_ok=True)
    assert verify_registration(world.config, world.root, registration_of(next_one), read_only=True)
    assert not lock.exists()
    assert not verify_registration(world.config, tmp_path / "untouched", registration_of(next_one), read_only=True)
    assert not (tmp_path / "untouched").exists()
    assert verify_registration(world.config, world.root, registration_of(next_one))
    assert not verify_registration(world.config, world.root, registration_of(next_one) | {"version": "9"})
    assert not verify_registration(world.config, world.root, registration_of(next_one) | {"weights_sha256": "00"})
    world.client.delete_model_version(NAME, "1")
    assert not verify_registration(world.config, world.root, registration)
    # The one that the champion was judged against is gone: nobody to beat, instead of an error for ever.
    assert current_champion(world.config, world.root, downloads, candidate_sha256=weights_digest(second)) is None


@pytest.mark.slow
def test_killed_anywhere_it_finishes_with_one_version(prepared: World, policies: dict[str, Path]) -> None:
    """SIGKILL at points all over the stage; then one more run: one version, both aliases, no upload left open."""
    policy = policies["first"]
    directory = prepared.spec(policy, prepared.gate(policy))
    marks = (
        "import mlflow; real = mlflow.transformers.save_model\n"
        "def hook(*a, **k):\n    real(*a, **k)\n    os.kill(os.getpid(), 9)\n"
        "mlflow.transformers.save_model = hook",  # After the files were written, before they were uploaded.
        "import tasks.registration as r\nr._create_version = lambda *a: os.kill(os.getpid(), 9)",
        "import tasks.registration as r\nr.promote = lambda *a, **k: os.kill(os.getpid(), 9)",
        "import tasks.promotion as p; real = p._point\n"
        "def hook(c, n, alias, v):\n    real(c, n, alias, v)\n    os.kill(os.getpid(), 9)\n"
        "p._point = hook",
        "import tasks.registration as r\nr.write_json = lambda *a: os.kill(os.getpid(), 9)",
    )
    for mark in marks:
        code, errors = prepared.run(directory, f"import os\n{mark}")
        assert code == -9, (mark, errors)
    code, errors = prepared.run(directory)
    assert code == 0, errors
    assert [str(v.version) for v in prepared.versions()] == ["1"]
    assert prepared.aliases() == {"challenger": "1", "champion": "1"}
    location = locate_store(prepared.config.tracking, prepared.root)
    models = prepared.client.search_logged_models([experiment_id(prepared.client, location, "test")])
    assert sorted(str(model.status) for model in models) == ["FAILED", "READY"]
    assert not (directory.path / "scratch").exists()

    # Then someone damages what is stored: neither a second run nor the next candidate takes it.
    directory.result_path.unlink()
    (stored,) = (prepared.root / "mlflow-artifacts").rglob("model/model.safetensors")
    stored.write_bytes(stored.read_bytes()[:-1] + b"\x01")
    code, errors = prepared.run(directory)
    assert code == 4
    assert "damaged or was replaced" in errors
    with pytest.raises(NotPromotableError, match="hands out"):
        current_champion(prepared.config, prepared.root, prepared.root / "champions")


@pytest.mark.slow
def test_two_registers_at_once(prepared: World, policies: dict[str, Path]) -> None:
    """Two candidates, both judged against no champion: one becomes champion, the other is told to be judged again."""
    candidates = [prepared.spec(policies[name], prepared.gate(policies[name])) for name in ("first", "second")]
    processes = [prepared.zygote.start_stage(directory.spec_path) for directory in candidates]
    codes, errors = zip(*(process.wait() for process in processes), strict=True)
    assert sorted(codes) == [0, 4], errors
    winner = candidates[codes.index(0)]
    assert prepared.aliases()[CHAMPION] == registration_of(winner)["version"]
    assert "moved" in errors[codes.index(4)]


def test_what_the_gate_did_not_let_through_is_refused(world: World, policies: dict[str, Path]) -> None:
    """Each refusal with exit code 4, before MLflow is even asked."""
    policy = policies["first"]
    for verdict in ("fail", "inconclusive", "error"):
        code, errors = world.run(world.spec(policy, world.gate(policy, verdict=verdict)))
        assert code == 4
        assert verdict in errors
    code, errors = world.run(world.spec(policies["second"], world.gate(policy)))
    assert code == 4
    assert "judged weights" in errors
    assert not (world.root / "mlflow.db").exists()


def test_a_file_changed_after_planning_is_refused(world: World, policies: dict[str, Path], tmp_path: Path) -> None:
    policy = Path(shutil.copytree(policies["first"], tmp_path / "policy"))
    directory = world.spec(policy, world.gate(policy))
    (policy / "config.json").write_text((policy / "config.json").read_text() + " ")
    code, errors = world.run(directory)
    assert code == 3
    assert "DigestMismatchError" in errors


def test_an_unreachable_registry_is_temporary(world: World, policies: dict[str, Path]) -> None:
    started = time.monotonic()
    directory = world.spec(policies["first"], world.gate(policies["first"]), uri="http://127.0.0.1:9")
    code, errors = world.run(directory)
    assert code == 75
    assert "ServerUnreachableError" in errors
    assert json.loads(directory.error_path.read_text())["exit_code"] == 75
    assert time.monotonic() - started < 60


def test_no_registry_means_no_champion(prepared: World, tmp_path: Path) -> None:
    untouched = tmp_path / "untouched"
    assert current_champion(prepared.config, untouched, untouched / "champions", download=False) is None
    assert not untouched.exists()
    assert current_champion(prepared.config, prepared.root, prepared.root / "champions") is None
    assert find_alias(prepared.client, NAME, CHAMPION) is None


def test_first_use_of_a_store_by_many_at_once(world: World) -> None:
    """Tables and experiment are made once, whoever comes first."""
    location = locate_store(world.config.tracking, world.root)
    code = (
        "import sys; from pathlib import Path; from types import SimpleNamespace as N\n"
        "from tasks.mlflow_store import *\n"
        "l = locate_store(N(uri=None), Path(sys.argv[1])); c = connect(l)\n"
        "Path(sys.argv[2]).write_text(experiment_id(c, l, 'test'))"
    )
    files = [world.root / f"id-{number}" for number in range(2)]
    processes = [world.zygote.start(code, world.root, file) for file in files]
    assert [process.wait()[0] for process in processes] == [0, 0]
    ids = {file.read_text() for file in files}
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(experiment_id(connect(location), location, "test")))
        for _ in range(3)
    ]
    [thread.start() for thread in threads]  # type: ignore[func-returns-value]
    [thread.join() for thread in threads]  # type: ignore[func-returns-value]
    assert set(found) == ids
    assert len(ids) == 1
