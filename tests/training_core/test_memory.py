"""Freed heap pages go back to the system."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
import torch

from training_core.memory import release_free_memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has malloc_trim")
def test_freed_blocks_between_blocks_in_use_are_released() -> None:
    # 64 KiB is below any threshold at which glibc returns a block by itself.
    blocks = [torch.ones(16384) for _ in range(2000)]
    kept = blocks[::20]
    del blocks
    before = resident_bytes()
    assert release_free_memory()
    assert before - resident_bytes() > 60e6
    assert all(float(block[0]) == 1.0 for block in kept)
