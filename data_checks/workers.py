"""Blocks of files to chunks of examples, on as many processes as pay."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from data_checks.examine import Chunk, FileTask, Judge
from data_checks.processes import process_context, start_worker
from data_checks.sampling import SampleCandidates
from data_checks.tokens import load_tokenizer
from training_core.errors import TemporaryError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from data_checks.reading import Block
    from data_checks.runner import ReportProgress

WAITING_BLOCKS = 2
"""Blocks a worker may have waiting: more would only fill memory."""

_judge: Judge | None = None
"""The worker process's own."""


def examine_all(
    judge: Judge, tasks: Sequence[FileTask], sample: SampleCandidates, num_workers: int, progress: ReportProgress
) -> Iterator[Chunk]:
    """Yield what each block became, in the order of files and rows.

    Args:
        judge: the work folder, config and limits.
        tasks: the files.
        sample: collects the examples that may be in the sample.
        num_workers: processes; 1: this one.
        progress: called with (blocks done, 0, phase) as the number of blocks is not known before.
    """
    blocks = ((number, block, task) for number, (block, task) in enumerate(_blocks(tasks)))
    if num_workers == 1:
        loaded = judge.with_tokenizer(_tokenizer(judge))
        for number, block, task in blocks:
            with no_collection():
                chunk = loaded.examine(number, block, task, sample.limit(task))
            yield sample.add(chunk)
            progress(number + 1, 0, "reading")
        return
    with ProcessPoolExecutor(num_workers, process_context(), _start_judging, (judge,)) as pool:
        waiting: deque[Future[Chunk]] = deque()
        try:
            for number, block, task in blocks:
                waiting.append(pool.submit(_examine, number, block, task, sample.limit(task)))
                while len(waiting) > num_workers * WAITING_BLOCKS:
                    yield sample.add(waiting.popleft().result())
                    progress(number + 1 - len(waiting), 0, "reading")
            while waiting:
                yield sample.add(waiting.popleft().result())
        except BrokenProcessPool as error:
            raise TemporaryError(
                "a process that reads the data was killed, most often by the system for want of memory: free memory "
                "(about 1 GiB a core is needed) and run the same command again"
            ) from error
        except BaseException:
            # Also for SIGTERM: what waits is dropped, and what runs ends with its block.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _blocks(tasks: Sequence[FileTask]) -> Iterator[tuple[Block, FileTask]]:
    from data_checks.reading import blocks

    for task in tasks:
        for block in blocks(task.path, task.name, task.label):
            yield block, task


def _tokenizer(judge: Judge) -> PreTrainedTokenizerBase | None:
    return None if judge.tokenizer_folder is None else load_tokenizer(judge.tokenizer_folder)


def _start_judging(judge: Judge) -> None:
    global _judge
    start_worker()
    _judge = judge.with_tokenizer(_tokenizer(judge))


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Switch the search for reference cycles off: a block makes a hundred thousand objects and no cycle among them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _examine(number: int, block: Block, task: FileTask, sample_limit: int) -> Chunk:
    assert _judge is not None
    with no_collection():
        return _judge.examine(number, block, task, sample_limit)
