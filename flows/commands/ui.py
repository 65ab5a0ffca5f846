"""`tidegate ui`: MLflow and Prefect on loopback over one root."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from flows.config import resolve_root
from tasks.prefect_home import API_URL_VARIABLE, prefect_server, use_home
from tasks.servers import Server, free_port, running_server
from training_core.errors import ServerUnreachableError

POLL_SECONDS = 1.0


def serve(root: Path | None, mlflow_port: int, prefect_port: int) -> None:
    """Serve until Ctrl-C (exit 130) or until a server ends by itself.

    Raises:
        ServerUnreachableError: a server did not come up, or ended.
    """
    where = resolve_root(root)
    where.mkdir(parents=True, exist_ok=True)
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
                raise ServerUnreachableError(f"{server.name} ended; its output is in {server.log_path}")
        time.sleep(POLL_SECONDS)


def _mlflow(root: Path, port: int) -> contextlib.AbstractContextManager[Server]:
    command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(root / "mlflow-artifacts")]
    health_url = f"http://127.0.0.1:{port}/health"
    return running_server("MLflow", command, health_url, root / "mlflow-ui.log", {"MLFLOW_DISABLE_TELEMETRY": "true"})
