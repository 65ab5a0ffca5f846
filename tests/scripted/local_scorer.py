"""A real HTTP server on this machine that scores answers as a test says."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], bytes]
"""Status, headers, body."""


def scores(values: list[Any]) -> Reply:
    return 200, {}, json.dumps({"scores": values}).encode()


def by_length(items: list[dict[str, Any]]) -> Reply:
    return scores([float(len(item["answer"])) for item in items])


@dataclass
class LocalScorer:
    """What a server was asked, and how it replies."""

    reply: Callable[[list[dict[str, Any]]], Reply]
    """Called with the items of a request."""
    url: str = ""
    requests: list[list[dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextlib.contextmanager
def local_scorer(
    reply: Callable[[list[dict[str, Any]]], Reply] = by_length, tls: ssl.SSLContext | None = None
) -> Iterator[LocalScorer]:
    """Serve until the block ends."""
    scorer = LocalScorer(reply)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
            scorer.requests.append(items)
            scorer.headers.append(dict(self.headers.items()))
            status, headers, body = scorer.reply(items)
            with contextlib.suppress(ConnectionError):  # Whoever asked may have lost patience.
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        def handle(self) -> None:
            with contextlib.suppress(ssl.SSLError):  # Whoever asked may not trust this server.
                super().handle()

        def log_message(self, *arguments: Any) -> None:
            """Write nothing to the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    scorer.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}/score"
    try:
        yield scorer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
