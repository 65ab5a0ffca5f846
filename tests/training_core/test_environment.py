"""What an attempt records of the machine, and what it says when the next one finds another."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from training_core.protocol.environment import gpu_names, num_threads, record_attempt


def fake_driver(folder: Path, output: str, status: int = 0) -> str:
    """Put a stand-in for the driver's tool into `folder`; return a PATH that finds it first."""
    folder.mkdir(exist_ok=True)
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{output}'\nexit {status}\n")
    tool.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_gpus_are_named_with_their_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_driver(tmp_path / "bin", "NVIDIA X, 550.1\\nNVIDIA Y, 550.1\\n"))
    assert gpu_names() == ["NVIDIA X, 550.1", "NVIDIA Y, 550.1"]
    monkeypatch.setenv("PATH", fake_driver(tmp_path / "bin", "no devices were found\\n", status=6))
    assert gpu_names() == []
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert gpu_names() == []


def test_threads_are_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert num_threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    assert num_threads() == 2
    monkeypatch.delenv("MKL_NUM_THREADS")
    assert 1 <= num_threads() <= (os.cpu_count() or 1)


def test_another_gpu_or_thread_count_is_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "environment.json"
    monkeypatch.setenv("PATH", fake_driver(tmp_path / "bin", "NVIDIA X, 550.1\\n"))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert record_attempt(path) == (1, [])
    assert record_attempt(path) == (2, [])
    monkeypatch.setenv("PATH", fake_driver(tmp_path / "bin", "NVIDIA Y, 550.1\\n"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    number, changes = record_attempt(path)
    assert number == 3
    assert changes == [
        "num_threads: 2 -> 1",
        "gpus: ['NVIDIA X, 550.1'] -> ['NVIDIA Y, 550.1']",
        "visible_gpus: None -> 0",
    ]


def test_what_an_earlier_attempt_did_not_record_has_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    record_attempt(path)
    (attempt,) = json.loads(path.read_text())["attempts"]
    for key in ("num_threads", "gpus", "visible_gpus"):
        del attempt[key]
    path.write_text(json.dumps({"attempts": [attempt]}))
    assert record_attempt(path) == (2, [])
