"""Prefect for one command: its home below the root, and a server of our own that ends with us.

Prefect can start a temporary server itself, but that one shares our terminal's process group (Ctrl-C kills it before
the run's last state is written) and outlives a killed parent. Ours runs in a session of its own and watches a pipe.
With PREFECT_API_URL set, the server named there is used and nothing is started.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from tasks.loopback import bypass_proxies
from tasks.servers import Server, answers, free_port, running_server
from training_core.errors import ServerUnreachableError

API_URL_VARIABLE = "PREFECT_API_URL"


def use_home(root: Path) -> None:
    """Point Prefect at the root, quietly. Call it before anything imports Prefect: settings are read at import.

    What the user's environment sets is left alone. With PREFECT_API_URL the user's own profile counts: it may hold
    that server's credentials.
    """
    bypass_proxies()
    settings = {
        "PREFECT_HOME": str(root.absolute() / "prefect"),
        # Ours is the only server: Prefect's own temporary one would be started in silence and outlive a kill.
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_FLOW_RUNS_LEVEL": "CRITICAL",
        "DO_NOT_TRACK": "1",
    }
    if API_URL_VARIABLE in os.environ:
        del settings["PREFECT_HOME"]
    else:
        Path(settings["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    for name, value in settings.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def prefect_server(root: Path, *, port: int = 0, with_ui: bool = False) -> Iterator[Server | None]:
    """Have a Prefect API for the duration: start a server, or take the one of PREFECT_API_URL (None is yielded).

    A started server may not be ready yet: call `wait_until_ready` after doing something useful.

    Raises:
        ServerUnreachableError: PREFECT_API_URL names a server that does not answer.
    """
    if (url := os.environ.get(API_URL_VARIABLE)) is not None:
        if not answers(f"{url.rstrip('/')}/health"):
            raise ServerUnreachableError(
                f"no Prefect server answers at PREFECT_API_URL = {url}. Start it, or unset the variable to run with a "
                "local one"
            )
        yield None
        return
    home = Path(os.environ.get("PREFECT_HOME", str(root / "prefect")))
    home.mkdir(parents=True, exist_ok=True)
    port = free_port(port)
    url = f"http://127.0.0.1:{port}/api"
    with contextlib.ExitStack() as stack:
        with FileLock(str(home / "server.lock")):  # Two servers must not create one database at the same time.
            server = stack.enter_context(_server(home, port, url, with_ui))
            if not (home / "prefect.db").exists():
                server.wait_until_ready()
        os.environ[API_URL_VARIABLE] = url
        try:
            yield server
        finally:
            os.environ.pop(API_URL_VARIABLE, None)
            flush_logs()


def flush_logs() -> None:
    """Send what Prefect's log handler still holds, while the server is there to take it."""
    if "prefect.logging.handlers" in sys.modules:
        sys.modules["prefect.logging.handlers"].APILogHandler().flush()


def _server(home: Path, port: int, url: str, with_ui: bool) -> contextlib.AbstractContextManager[Server]:
    command = ["uvicorn", "--factory", "prefect.server.api.server:create_app", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--log-level", "error", "--lifespan", "on"]
    # What Prefect sets for its own temporary server: no scheduler, no late-run service.
    environment = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    if with_ui:
        environment = {"PREFECT_UI_API_URL": url}
    log_path = home / f"server-{'ui' if with_ui else 'run'}.log"
    return running_server("Prefect's local server", command, f"{url}/health", log_path, environment)
