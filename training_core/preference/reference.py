"""Log-probabilities of the frozen reference, computed once before the first step and kept in the stage directory.

The reference is the checkpoint that the policy starts from, so the untrained policy gives them and no second model is
ever in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from training_core.data.batching import micro_batches
from training_core.errors import ArtifactError
from training_core.preference.forward import AnswerScorer
from training_core.preference.items import Items
from training_core.protocol.atomic import atomic_path

logger = logging.getLogger(__name__)

REFERENCE_FILE = "reference_logprobs.safetensors"
FORMAT_VERSION = "1"


@dataclass
class ItemCount:
    """Tells how many of all items are done."""

    total: int
    on_progress: Callable[[int, int], None]
    done: int = 0

    def add(self, num_items: int) -> None:
        self.done += num_items
        self.on_progress(self.done, self.total)


def reference_logprobs(
    path: Path,
    scorer: AnswerScorer,
    splits: Mapping[str, Items],
    identity: Mapping[str, str],
    size: int,
    on_progress: Callable[[int, int], None],
) -> dict[str, Tensor]:
    """Return the log-probabilities of every answer, from the file at `path` or computed and written to it.

    Args:
        path: `reference_logprobs.safetensors`.
        scorer: the untrained policy.
        splits: training and validation items by name.
        identity: what the numbers are of: digests of weights and data.
        size: items a forward pass.
        on_progress: told (items done, items in all).

    Returns:
        For each split [2, items] float64 in nats, on the CPU: of the first and of the second answer of each item.

    Raises:
        ArtifactError: the file is damaged, or of other weights or data.
    """
    identity = {"version": FORMAT_VERSION, **identity}
    if path.exists():
        found = read_reference(path, identity)
        if {name: values.shape[1] for name, values in found.items()} != {n: len(i) for n, i in splits.items()}:
            raise ArtifactError(f"{path} holds other rows than the data. Delete it to compute it again")
        return found
    count = ItemCount(sum(map(len, splits.values())), on_progress)
    logger.info("computing the reference's log-probabilities of %d items", count.total)
    computed = {name: score_items(scorer, items, size, count.add) for name, items in splits.items()}
    with atomic_path(path) as temporary:
        save_file(computed, temporary, metadata=identity)
    return computed


@torch.no_grad()
def score_items(scorer: AnswerScorer, items: Items, size: int, on_items: Callable[[int], None]) -> Tensor:
    """Return [2, items] float64: the log-probabilities of both answers of each item, without gradient.

    Micro-batches and forward passes are those of a validation, so that an untrained policy gets the same bits there.
    """
    values = torch.zeros(2, len(items), dtype=torch.float64)
    for indices in micro_batches(range(len(items)), items.lengths, size):
        logprobs = torch.cat([scorer.logprobs(answers) for answers in items.forwards(indices)])
        values[:, indices] = logprobs.view(2, len(indices)).cpu()
        on_items(len(indices))
    return values


def read_reference(path: Path, identity: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors of the file.

    Raises:
        ArtifactError: it is damaged, or its metadata are not `identity`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = dict(file.metadata() or {})
            names: list[str] = file.keys()  # The handle is no dict.
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}. Delete it to compute it again") from error
    if differing := sorted(key for key in {*found, *identity} if found.get(key) != identity.get(key)):
        raise ArtifactError(
            f"{path} was computed from another reference or other data; it differs in {', '.join(differing)}. Restore "
            "the inputs, or delete the stage directory to train again from the start"
        )
    return tensors
