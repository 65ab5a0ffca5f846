"""Work in threads that a stop request reaches within a second, whatever it waits for."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

POLL_SECONDS = 0.25
"""Longest wait between two looks at whether to stop."""
SLEEP_SECONDS = 1.0
"""Longest sleep between two looks at whether to stop."""


class StoppedError(Exception):
    """Work was given up because the stop event is set; nobody waits for its result."""


def map_polled(
    function: Callable[[Item, Event], Result],
    items: Sequence[Item],
    num_threads: int,
    poll: Callable[[], None],
    name: str,
) -> list[Result]:
    """Return `function(item, stop)` of each item, in order, computed by threads while this one polls.

    Args:
        function: may raise `StoppedError` once `stop` is set; it must look at that every `POLL_SECONDS` or so.
        items: what to compute it of.
        num_threads: at the same time.
        poll: called about every `POLL_SECONDS`. What it raises ends the work.
        name: of the threads.

    Raises:
        What `poll` or the first item that failed raises, after all threads have ended.
    """
    if not items:
        return []
    stop = Event()
    with ThreadPoolExecutor(min(num_threads, len(items)), name) as threads:
        try:
            futures = [threads.submit(function, item, stop) for item in items]
            for future in futures:
                poll()
                while not concurrent.futures.wait([future], POLL_SECONDS).done:
                    poll()
                if future.exception() is not None:
                    break
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def sleep_polled(seconds: float, poll: Callable[[], None], sleep: Callable[[float], None] = time.sleep) -> None:
    """Sleep in slices of at most `SLEEP_SECONDS`, with a `poll` after each.

    >>> slices = []
    >>> sleep_polled(2.5, lambda: None, slices.append)
    >>> slices
    [1.0, 1.0, 0.5]
    """
    while seconds > 0.0:
        sleep(min(seconds, SLEEP_SECONDS))
        seconds -= SLEEP_SECONDS
        poll()
