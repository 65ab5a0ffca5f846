"""Seeds as a function of what they are for.

Every source of randomness takes its seed from `(seed, purpose, step, item)`. Nothing depends on how often a
generator was used before, so a resumed run needs no generator state.
"""

from __future__ import annotations

import hashlib
import random


def derive_seed(seed: int, purpose: str, *indices: int) -> int:
    """Return a seed in [0, 2**31) for one use of randomness.

    Args:
        seed: the run's seed.
        purpose: what the randomness is for, e.g. "rollout" or "data_order".
        indices: step, item and so on.

    >>> derive_seed(1, "rollout", 0, 3) == derive_seed(1, "rollout", 0, 3)
    True
    >>> derive_seed(1, "rollout", 0, 3) == derive_seed(1, "rollout", 3, 0)
    False
    """
    text = "/".join([str(seed), purpose, *map(str, indices)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 2**31


def permutation(length: int, seed: int, purpose: str, *indices: int) -> list[int]:
    """Return a permutation of range(length) that depends on the arguments only."""
    order = list(range(length))
    random.Random(derive_seed(seed, purpose, *indices)).shuffle(order)
    return order


def batch_indices(step: int, batch_size: int, length: int, seed: int, purpose: str) -> list[int]:
    """Return the item indices of optimizer step `step` (from 0): epochs of fresh permutations, laid end to end.

    A batch may span two epochs; every item is used once per epoch.

    Raises:
        ValueError: `length` or `batch_size` is not positive.
    """
    if length <= 0 or batch_size <= 0:
        raise ValueError(f"length ({length}) and batch_size ({batch_size}) must be positive")
    orders: dict[int, list[int]] = {}
    indices = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, offset = divmod(position, length)
        if epoch not in orders:
            orders[epoch] = permutation(length, seed, purpose, epoch)
        indices.append(orders[epoch][offset])
    return indices
