"""`tidegate ui`: MLflow and Prefect on loopback over one root."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from flows.config import resolve_root
from tasks.prefect_home import API_URL_VARIABLE, prefect_server, use_home
from tasks.roots import prepare_root
from tasks.runs import missing_root
from tasks.servers import Server, free_port, running_server
from training_core.errors import ConfigurationError

POLL_SECONDS = 1.0


def serve(root: str | Path | None, mlflow_port: int, prefect_port: int) -> None:
    """Serve until Ctrl-C (exit 130) or until a server ends by itself.

    Raises:
        ConfigurationError: the root does not exist or may not be written, or both ports are the same.
        DiskFullError: there is no room for the servers' databases.
        ServerUnreachableError: a server did not come up, or ended.
    """
    if mlflow_port == prefect_port:
        raise ConfigurationError(
            f"--mlflow-port and --prefect-port are both {mlflow_port}. Give each server a port of its own"
        )
    where = resolve_root(root)
    if not where.exists():
        raise ConfigurationError(missing_root(where))
    prepare_root(where)
    use_home(where)
    # `ui` shows this root; a server of someone else has a user interface of its own.
    os.environ.pop(API_URL_VARIABLE, None)
    os.environ.setdefault("PREFECT_HOME", str(where / "prefect"))
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(_mlflow(where, free_port(mlflow_port)))]
        prefect = stack.enter_context(prefect_server(where, port=prefect_port, with_ui=True))
        assert prefect is not None
        servers.append(prefect)
        for server in servers:
            server.wait_until_ready()
            print(f"{server.name}: {server.health_url.removesuffix('/health').removesuffix('/api')}", flush=True)
        print("Ctrl-C ends both", flush=True)
        _watch(servers)


def _watch(servers: list[Server]) -> None:
    while True:
        for server in servers:
            if server.process.poll() is not None:
                raise server.failure("ended")
        time.sleep(POLL_SECONDS)


def _mlflow(root: Path, port: int) -> contextlib.AbstractContextManager[Server]:
    command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(root / "mlflow-artifacts")]
    health_url = f"http://127.0.0.1:{port}/health"
    return running_server("MLflow", command, health_url, root / "mlflow-ui.log", {"MLFLOW_DISABLE_TELEMETRY": "true"})
