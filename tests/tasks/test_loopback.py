"""Proxies in the environment, and servers on this machine."""

from __future__ import annotations

import pytest

from tasks.loopback import bypass_proxies

PROXY = {"http_proxy": "http://proxy:1"}
ADDED = "127.0.0.1,localhost"


@pytest.mark.parametrize(
    ("environment", "lower", "upper"),
    [
        ({}, None, None),
        ({"http_proxy": ""}, None, None),
        ({"no_proxy": "a"}, "a", None),
        (PROXY, ADDED, ADDED),
        ({"ALL_PROXY": "socks5://proxy:1"}, ADDED, ADDED),
        ({**PROXY, "NO_PROXY": "a, .b"}, f"a,.b,{ADDED}", f"a,.b,{ADDED}"),
        ({**PROXY, "no_proxy": "a", "NO_PROXY": "b"}, f"a,{ADDED}", f"b,{ADDED}"),
        ({**PROXY, "no_proxy": "localhost"}, "localhost,127.0.0.1", "localhost,127.0.0.1"),
        ({**PROXY, "no_proxy": "*"}, "*", None),
    ],
)
def test_loopback_is_added_where_a_proxy_is_set(environment, lower, upper) -> None:  # type: ignore[no-untyped-def]
    found = dict(environment)
    for _ in range(2):
        bypass_proxies(found)
        assert (found.get("no_proxy"), found.get("NO_PROXY")) == (lower, upper)
