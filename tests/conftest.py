"""Fixtures shared by all tests. No test reaches a network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models are quicker on one thread, and threads that wait for each other crawl where tests run in parallel.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama chat checkpoint (2 layers, head size 64, 512 tokens). Treat it as read-only."""
    from training_core.models.tiny import build_tiny_checkpoint

    return build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")
