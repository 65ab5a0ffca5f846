"""Servers on this machine are reached directly, whatever proxy the environment names for the world outside."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

LOOPBACK = ("127.0.0.1", "localhost")
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
NO_PROXY_VARIABLES = ("no_proxy", "NO_PROXY")
EVERY_HOST = "*"


def bypass_proxies(environment: MutableMapping[str, str] = os.environ) -> None:
    """Add loopback to NO_PROXY and no_proxy when a proxy is set; what is there stays. Children inherit it."""
    if not any(environment.get(name) or environment.get(name.upper()) for name in PROXY_VARIABLES):
        return
    known = {name: environment.get(name, "") for name in NO_PROXY_VARIABLES}
    for name in NO_PROXY_VARIABLES:
        # Libraries read one or the other: one that was not set takes over what the other says.
        hosts = [host.strip() for host in (known[name] or "".join(known.values())).split(",") if host.strip()]
        if EVERY_HOST not in hosts:
            environment[name] = ",".join(dict.fromkeys([*hosts, *LOOPBACK]))
