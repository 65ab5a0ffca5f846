"""The shape of the project, held by tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("flows", "tasks", "training_core", "data_checks")
SOURCES = sorted(p for package in (*PACKAGES, "tests", "examples") for p in (ROOT / package).rglob("*.py"))
MAX_LINES = 400


def test_no_file_is_too_long() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in SOURCES}
    assert SOURCES, "no sources found"
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


@pytest.mark.parametrize("module", ["flows.post_training", "flows.cli", "tasks.planning", "training_core.stages"])
def test_orchestration_imports_nothing_heavy(module: str) -> None:
    heavy = "{'torch', 'transformers', 'vllm', 'deepspeed', 'great_expectations'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_imports_point_one_way() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_tests_are_not_a_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
    code = "import importlib.util as u; print([n for n in ('tests', 'deployments', 'examples') if u.find_spec(n)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "[]"


def test_flow_bodies_are_short() -> None:
    """A flow is a list of calls: no function of a flow module is longer than 40 lines."""
    long = {}
    for path in (ROOT / "flows" / "post_training.py", ROOT / "flows" / "stages.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.end_lineno and node.end_lineno - node.lineno >= 40:
                long[f"{path.name}:{node.name}"] = node.end_lineno - node.lineno + 1
    assert long == {}


def test_no_unfinished_code() -> None:
    marks = ("raise NotImplementedError", "TODO", "FIXME")
    found = [
        f"{p.relative_to(ROOT)}:{number}"
        for p in SOURCES
        if p != Path(__file__)
        for number, line in enumerate(p.read_text(encoding="utf-8").splitlines(), 1)
        if any(mark in line for mark in marks)
    ]
    assert found == []


def test_locks_agree() -> None:
    """One set of versions: what the CPU and GPU locks share is the same, but for what CUDA brings."""
    locks = {}
    for name in ("cpu", "gpu"):
        lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        locks[name] = dict(line.split("==", 1) for line in lines if "==" in line)
    shared = set(locks["cpu"]) & set(locks["gpu"]) - {"triton", "setuptools", "apache-tvm-ffi"}
    different = {p: (locks["cpu"][p], locks["gpu"][p]) for p in shared if locks["cpu"][p] != locks["gpu"][p]}
    assert len(shared) > 150
    assert different == {}
    assert {"torchvision", "torchaudio", "torchcodec"}.isdisjoint(locks["cpu"])
