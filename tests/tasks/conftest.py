"""The fixtures of tests/scripted, and what tests with a real MLflow share: both take seconds to make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scripted_stages.workspace import SCRIPTED, scripted, workspace

__all__ = ["scripted", "workspace"]

STAGE = "import sys; from tasks import STAGES; from training_core.protocol.child import main\n"
STAGE_END = "sys.exit(main(sys.argv[1:], STAGES))"


@dataclass(frozen=True)
class Forked:
    """A real process, forked where MLflow and transformers are imported already."""

    zygote: Zygote
    pid: int
    errors: Path

    def wait(self) -> tuple[int, str]:
        """Return (return code, standard error)."""
        return self.zygote.ask({"wait": self.pid}), self.errors.read_text()


class Zygote:
    """See tests/scripted/zygote.py."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self.folder = folder
        self._count = 0
        hidden = ("MLFLOW_TRACKING_URI",)
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment |= {"MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPTED / "zygote.py"), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, code: str, *arguments: str | Path) -> Forked:
        self._count += 1
        errors = self.folder / f"{self._count}.txt"
        request = {"code": code, "arguments": list(map(str, arguments)), "errors": str(errors)}
        return Forked(self, self.ask(request), errors)

    def start_stage(self, spec_path: Path, mark: str = "") -> Forked:
        """Start what `python -m tasks SPEC_JSON` is, after the statements of `mark`."""
        return self.start(f"{STAGE}{mark}\n{STAGE_END}", spec_path)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Real processes for stages, without seconds of imports for each of them."""
    zygote = Zygote(tmp_path_factory.mktemp("zygote"), "mlflow.transformers", "transformers", "tasks.registration")
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite store with its tables."""
    from tasks.mlflow_store import connect, locate_store

    root = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        connect(locate_store(None, root))
    return root / "mlflow.db"
