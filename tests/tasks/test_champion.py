"""The champion's files: downloaded once, whoever asks at the same time."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tasks.champion
from tasks.mlflow_store import StoreLocation
from training_core.protocol.digests import weights_digest


def test_two_runs_that_need_one_champion_download_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, downloads = tmp_path / "stored", []
    stored.mkdir()
    (stored / "model.safetensors").write_text("weights")
    digest = weights_digest(stored)

    def download(_client: Any, _location: Any, _source: str, destination: Path) -> Path:
        downloads.append(destination)
        time.sleep(0.3)
        return Path(shutil.copytree(stored, destination / "model"))

    monkeypatch.setattr(tasks.champion, "download_model", download)
    monkeypatch.setattr(tasks.champion, "version_source", lambda *_arguments: "models:/m-1")
    location = StoreLocation("http://127.0.0.1:9", None, tmp_path / "mlflow.lock")
    folder, version = tmp_path / "champions" / digest[:16], SimpleNamespace(name="policy", version="1")
    found: list[Path | None] = []

    def ask() -> None:
        client: Any = None
        found.append(tasks.champion._files(client, location, version, folder, digest, True))  # type: ignore[arg-type]

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(30)
    assert found == [folder, folder]
    assert len(downloads) == 1
    assert [path.name for path in (tmp_path / "champions").glob(".champion-*")] == []
