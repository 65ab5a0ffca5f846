"""Where MLflow keeps runs and models, and how long a caller waits for it.

Without a server the store is `sqlite:///<root>/mlflow.db`, artifacts below `<root>/mlflow-artifacts`: both absolute,
so that processes in different folders write to one place. MLflow is imported inside functions: it takes seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from training_core.errors import (
    SQLITE_FULL,
    ArtifactError,
    ConfigurationError,
    DiskFullError,
    ServerUnreachableError,
    TidegateError,
    as_tidegate_error,
)
from training_core.protocol.digests import text_digest

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from tasks.config import TrackingConfig

URI_VARIABLE = "MLFLOW_TRACKING_URI"
DEFAULT_EXPERIMENT = "tidegate"
DATABASE_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql")
SERVER_SCHEMES = ("http", "https")
CONNECT_SECONDS = 5.0
LOCK_SECONDS = 120.0
SECRET_VARIABLES = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
OWN_LIMITS_VARIABLE = "TIDEGATE_MLFLOW_LIMITS"
"""Names of the MLFLOW_* variables that Tidegate set itself: a child process may set them anew, a user's stay."""

_CREDENTIALS = re.compile(r"(\b[A-Za-z][\w+.-]*://)[^\s/@]+@")
_SECRET_ARGUMENT = re.compile(r"((?:password|passwd|token|secret|sig|signature)=)[^&\s]+", re.IGNORECASE)
_URI = re.compile(r"\b[A-Za-z][\w+.-]*://\S+")
_NO_DATABASE_TEXT = re.compile(r"file is not a database|database disk image is malformed", re.IGNORECASE)
_DISK_FULL_TEXT = re.compile(f"{SQLITE_FULL}|No space left on device|Disk quota exceeded", re.IGNORECASE)
_UNREACHABLE_TEXT = re.compile(
    r"failed with (?:timeout )?exception|Max retries exceeded|Connection (?:refused|reset|aborted)|ConnectionError"
    r"|NewConnectionError|timed out|too many 5\d\d|error code 5\d\d|database is locked",
    re.IGNORECASE,
)
_NOT_ALLOWED_CODES = ("UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED")
_UNREACHABLE_CODES = ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")


def redact(text: str) -> str:
    """Return `text` without credentials: those inside URIs, `password=...` arguments and MLflow's secret variables."""
    return _without_secret_variables(_SECRET_ARGUMENT.sub(r"\1***", _CREDENTIALS.sub(r"\1***@", text)))


def redact_uris(text: str) -> str:
    """Return `text` without credentials, as `redact`, but only URIs are searched for arguments.

    For values of a config, which refuses secrets: a pattern such as `token=\\d+` is none.
    """
    return _without_secret_variables(_URI.sub(lambda uri: redact(uri[0]), text))


def _without_secret_variables(text: str) -> str:
    for name in SECRET_VARIABLES:
        if secret := os.environ.get(name):
            text = text.replace(secret, "***")
    return text


@dataclass(frozen=True)
class StoreLocation:
    """An MLflow store. `repr` and `label` hold no secret; `uri` may, and is only handed to MLflow."""

    uri: str
    artifact_location: str | None
    """Where a new experiment keeps artifacts; None = the server decides."""
    lock_path: Path
    """Lock for what must not happen twice at once: first migration, creating runs and versions, moving aliases."""

    @property
    def label(self) -> str:
        return redact(self.uri)

    @property
    def store_id(self) -> str:
        """What files below the root know the store by."""
        return text_digest(self.label)

    def __repr__(self) -> str:
        return f"StoreLocation({self.label})"


def locate_store(tracking: TrackingConfig | None, root: Path) -> StoreLocation:
    """Return the store of a config: its `uri`, else $MLFLOW_TRACKING_URI, else SQLite below `root`.

    Raises:
        ConfigurationError: a store that MLflow 3 or Tidegate does not take, or a secret in the config.
    """
    root = root.absolute()
    configured = tracking.uri if tracking is not None else None
    uri = configured or os.environ.get(URI_VARIABLE) or f"sqlite:///{root / 'mlflow.db'}"
    where = "tracking.uri" if configured else f"${URI_VARIABLE}"
    parts = urlsplit(uri)
    if configured and (parts.password or (parts.username and parts.scheme in SERVER_SCHEMES)):
        raise ConfigurationError(
            f"tracking.uri ({redact(uri)}) holds a user name or password, which would be written to files. Set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (server) or MLFLOW_TRACKING_URI (database) instead"
        )
    scheme = parts.scheme.split("+")[0]
    if scheme in SERVER_SCHEMES:
        return StoreLocation(uri, None, root / "mlflow.lock")
    if scheme not in DATABASE_SCHEMES:
        raise ConfigurationError(
            f"{where} is {redact(uri)}; MLflow stores here are http(s)://HOST:PORT, sqlite:////ABSOLUTE/PATH.db, "
            "postgresql://, mysql:// and mssql://. Plain folders are no longer written by MLflow 3"
        )
    if scheme == "sqlite" and not parts.path.startswith("//"):
        raise ConfigurationError(
            f"{where} is {redact(uri)}: a relative path means another file in each process. Write "
            f"sqlite:///{root / 'mlflow.db'} (an absolute path, four slashes)"
        )
    return StoreLocation(uri, (root / "mlflow-artifacts").as_uri(), root / "mlflow.lock")


def limit_requests(timeout_seconds: int, num_retries: int) -> None:
    """Bound how long this process waits for an MLflow server, unless the user's environment says otherwise.

    MLflow's own defaults are 120 s and 7 retries: minutes during which nobody learns that the server is down.
    """
    wanted = {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(timeout_seconds),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(num_retries),
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_RECORD_ENV_VARS_IN_MODEL_LOGGING": "false",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    }
    own = set(os.environ.get(OWN_LIMITS_VARIABLE, "").split(",")) - {""}
    for name, value in wanted.items():
        if name not in os.environ or name in own:
            os.environ[name] = value
            own.add(name)
    os.environ[OWN_LIMITS_VARIABLE] = ",".join(sorted(own))
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


@contextlib.contextmanager
def store_lock(location: StoreLocation) -> Iterator[None]:
    """Hold the store's lock. The OS drops it when its owner dies.

    Raises:
        ServerUnreachableError: another process held it for two minutes.
    """
    location.lock_path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(location.lock_path))
    try:
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        raise ServerUnreachableError(
            f"another process holds {location.lock_path} for more than {LOCK_SECONDS:.0f} s. Run the command again "
            "when it has ended"
        ) from None
    try:
        yield
    finally:
        lock.release()


def store_exists(location: StoreLocation) -> bool:
    """Return whether there is something to connect to: False only for an SQLite file that nobody has made yet."""
    path = _database_path(location)
    return path is None or path.exists()


def _database_path(location: StoreLocation) -> Path | None:
    """Return the file of an SQLite store. Not by `urlsplit`, which ends a path at `#`; SQLAlchemy does not."""
    scheme, _, rest = location.uri.partition(":///")
    return Path(rest.partition("?")[0]) if scheme.startswith("sqlite") else None


def connect(
    location: StoreLocation, *, timeout_seconds: int = 10, num_retries: int = 1, read_only: bool = False
) -> MlflowClient:
    """Return a client of a store that answers; a new SQLite file gets its tables, once, whoever comes first.

    Args:
        timeout_seconds: for one request.
        num_retries: after a request that failed.
        read_only: for a store that exists: no lock file is made below the root.

    Raises:
        ServerUnreachableError: the store does not answer.
        ConfigurationError: it refuses these credentials.
    """
    limit_requests(timeout_seconds, num_retries)
    with mlflow_errors(location, "connect"):
        _probe(location)
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        with contextlib.nullcontext() if read_only else store_lock(location):
            client = MlflowClient(tracking_uri=location.uri, registry_uri=location.uri)
            client.search_experiments(max_results=1)
    return client


def _probe(location: StoreLocation) -> None:
    """Ask a server whether it is there: seconds, where an API call with its retries would take longer."""
    if urlsplit(location.uri).scheme not in SERVER_SCHEMES:
        return
    import requests

    answer = requests.get(location.uri.rstrip("/") + "/health", timeout=CONNECT_SECONDS)
    if answer.status_code >= 500:
        raise ServerUnreachableError(
            f"MLflow at {location.label} answers {answer.status_code}. Try again when it is up"
        )


def experiment_id(client: MlflowClient, location: StoreLocation, name: str = DEFAULT_EXPERIMENT) -> str:
    """Return the id of the experiment `name`; create it with an absolute artifact location when it is missing.

    Raises:
        ConfigurationError: an experiment of that name was deleted.
        ServerUnreachableError: the store does not answer.
    """
    with mlflow_errors(location, f"open experiment {name!r}"), store_lock(location):
        found = client.get_experiment_by_name(name)
        if found is None:
            return str(client.create_experiment(name, artifact_location=location.artifact_location))
        if found.lifecycle_stage != "active":
            raise ConfigurationError(
                f"experiment {name!r} in {location.label} is deleted. Restore it "
                f"(mlflow experiments restore --experiment-id {found.experiment_id}), or name another in "
                "tracking.experiment"
            )
        return str(found.experiment_id)


@contextlib.contextmanager
def mlflow_errors(location: StoreLocation, doing: str) -> Iterator[None]:
    """Turn what MLflow and its transports raise into Tidegate's errors, without credentials in the message."""
    try:
        yield
    except TidegateError:
        raise
    except Exception as error:
        translated = translate_error(error, location, doing)
        if translated is None:
            raise
        raise translated from None


def translate_error(error: Exception, location: StoreLocation, doing: str) -> TidegateError | None:
    """Return the Tidegate error for an exception of MLflow, requests or SQLAlchemy; None for anything else."""
    origin = type(error).__module__.split(".")[0]
    text = redact(str(error)).strip()
    short = text.splitlines()[0][:400] if text else type(error).__name__
    database = _database_path(location)
    if (known := as_tidegate_error(error, database.parent if database else None)) is not None:
        return known
    if _DISK_FULL_TEXT.search(text):
        return DiskFullError(
            f"MLflow at {location.label} could not {doing}: its disk is full ({short}). Free some space there and run "
            "the same command again"
        )
    if _NO_DATABASE_TEXT.search(text):
        return ArtifactError(
            f"MLflow's store {location.label} is damaged or no database ({short}). Restore it, or name another in "
            "tracking.uri"
        )
    if origin == "mlflow":
        code = str(getattr(error, "error_code", ""))
        if code in _NOT_ALLOWED_CODES:
            return ConfigurationError(
                f"MLflow at {location.label} does not let us {doing}: {short}. Set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            )
        if code not in _UNREACHABLE_CODES and not _UNREACHABLE_TEXT.search(text):
            return ArtifactError(f"MLflow at {location.label} could not {doing}: {short}")
    elif origin not in ("requests", "urllib3", "sqlalchemy", "sqlite3"):
        return None
    return ServerUnreachableError(
        f"MLflow at {location.label} does not answer ({doing}): {short}. Start it, or check tracking.uri, and run the "
        "same command again: what is done stays done"
    )
