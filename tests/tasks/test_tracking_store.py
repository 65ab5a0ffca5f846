"""Where the MLflow store is, what is refused, and that no secret is shown."""

from __future__ import annotations

import shutil
import socket
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tasks.mlflow_store import (
    OWN_LIMITS_VARIABLE,
    StoreLocation,
    connect,
    experiment_id,
    limit_requests,
    locate_store,
    mlflow_errors,
    redact,
    store_exists,
    translate_error,
)
from training_core.errors import ArtifactError, ConfigurationError, DiskFullError, ServerUnreachableError

if TYPE_CHECKING:
    from mlflow import MlflowClient


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "MLFLOW_TRACKING_URI",
        "MLFLOW_HTTP_REQUEST_TIMEOUT",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR",
        OWN_LIMITS_VARIABLE,
    ):
        monkeypatch.setenv(name, "x")  # So that what the code under test sets is taken back, too.
        monkeypatch.delenv(name)


def test_the_default_lies_below_the_root(tmp_path: Path) -> None:
    location = locate_store(None, tmp_path)
    assert location.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert location.artifact_location == f"file://{tmp_path}/mlflow-artifacts"


def test_config_comes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from-environment:5000")
    assert locate_store(SimpleNamespace(uri=None), tmp_path).uri == "http://from-environment:5000"
    located = locate_store(SimpleNamespace(uri="https://from-config"), tmp_path)
    assert (located.uri, located.artifact_location) == ("https://from-config", None)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("./mlruns", "Plain folders"),
        ("file:///tmp/mlruns", "Plain folders"),
        ("sqlite:///relative.db", "four slashes"),
        ("http://me:hunter2@host:5000", "MLFLOW_TRACKING_USERNAME"),
        ("postgresql://me:hunter2@host/db", "MLFLOW_TRACKING_URI"),
    ],
)
def test_stores_that_are_refused(tmp_path: Path, uri: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        locate_store(SimpleNamespace(uri=uri), tmp_path)
    assert "hunter2" not in str(caught.value)


def test_no_secret_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql+psycopg2://me:hunter2@host/db?password=hunter3")
    location = locate_store(None, tmp_path)
    assert "hunter" in location.uri
    assert "hunter" not in f"{location!r} {location} {location.label}"
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hunter4")
    assert redact("a http://u:p@h/x?token=abc&y=1 hunter4") == "a http://***@h/x?token=***&y=1 ***"


def test_a_user_s_own_limits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    limit_requests(10, 1)
    limit_requests(300, 2)
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"


@pytest.mark.parametrize("silent", [False, True])
def test_a_server_that_is_not_there_is_noticed_in_seconds(tmp_path: Path, silent: bool) -> None:
    """Nobody listens, or somebody who never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if silent:
            listener.listen()
        location = locate_store(SimpleNamespace(uri=f"http://127.0.0.1:{listener.getsockname()[1]}"), tmp_path)
        started = time.monotonic()
        with pytest.raises(ServerUnreachableError, match="does not answer"):
            connect(location)
        assert time.monotonic() - started < 10


def test_errors_of_mlflow_get_their_exit_codes(tmp_path: Path) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import PERMISSION_DENIED, RESOURCE_DOES_NOT_EXIST, TEMPORARILY_UNAVAILABLE

    location = locate_store(None, tmp_path)

    def kind(error: Exception) -> type | None:
        translated = translate_error(error, location, "try")
        return type(translated) if translated else None

    assert kind(MlflowException("x", error_code=PERMISSION_DENIED)) is ConfigurationError
    assert kind(MlflowException("x", error_code=TEMPORARILY_UNAVAILABLE)) is ServerUnreachableError
    assert kind(MlflowException("API request to http://h failed with exception boom")) is ServerUnreachableError
    assert kind(MlflowException("gone", error_code=RESOURCE_DOES_NOT_EXIST)) is ArtifactError
    assert kind(ValueError("a bug")) is None


def fill(client: MlflowClient, location: StoreLocation) -> None:
    with mlflow_errors(location, "fill it"):
        for index in range(1000):
            client.create_experiment(f"{index:03}" * 80)


def test_a_full_disk_below_sqlite_is_a_full_disk(tmp_path: Path, empty_store: Path) -> None:
    """SQLite itself says so when a database may not grow."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    shutil.copy(empty_store, tmp_path / "mlflow.db")
    location = locate_store(None, tmp_path)

    def limit(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute("PRAGMA max_page_count = 1")  # As many as there are.

    event.listen(Engine, "connect", limit)
    try:
        client = connect(location)
        with pytest.raises(DiskFullError, match="no space left") as caught:
            fill(client, location)
    finally:
        event.remove(Engine, "connect", limit)
    assert f"free at {tmp_path}" in str(caught.value)


def test_a_full_disk_of_a_server_is_named_as_the_server_s(tmp_path: Path) -> None:
    from mlflow.exceptions import MlflowException

    location = locate_store(SimpleNamespace(uri="http://host:5000"), tmp_path)
    for text in ("(sqlite3.OperationalError) database or disk is full", "could not extend: No space left on device"):
        error = translate_error(MlflowException(text), location, "log")
        assert type(error) is DiskFullError
        assert "http://host:5000 could not log: its disk is full" in str(error)


def test_a_file_that_is_no_database_is_not_a_server_that_is_down(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("no database" * 1000)
    with pytest.raises(ArtifactError, match=r"mlflow\.db is damaged or no database"):
        connect(locate_store(None, tmp_path))


def test_a_store_is_found_where_mlflow_made_it(tmp_path: Path, empty_store: Path) -> None:
    root = tmp_path / "run #1 100%"
    root.mkdir()
    location = locate_store(None, root)
    assert not store_exists(location)
    shutil.copy(empty_store, root / "mlflow.db")
    assert store_exists(location)
    experiment_id(connect(location), location, "x")
    assert [path.name for path in tmp_path.iterdir()] == [root.name]


def test_a_store_is_known_without_its_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def store_id(uri: str) -> str:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        return locate_store(None, tmp_path).store_id

    assert store_id("postgresql://me:one@host/db") == store_id("postgresql://me:two@host/db")
    assert store_id("postgresql://host/db") != store_id("postgresql://host/other")
