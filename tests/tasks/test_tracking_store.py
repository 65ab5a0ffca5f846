"""Where the MLflow store is, what is refused, and that no secret is shown."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.mlflow_store import OWN_LIMITS_VARIABLE, connect, limit_requests, locate_store, redact, translate_error
from training_core.errors import ArtifactError, ConfigurationError, ServerUnreachableError


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
