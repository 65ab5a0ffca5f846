"""Same inputs, same bits: what torch has to be told for it."""

from __future__ import annotations

import torch


def make_deterministic() -> None:
    """Choose deterministic kernels in this process, for good.

    The gradient of indexing with repeated indices (an answer's prompt, say) is otherwise summed by threads in the order
    in which they arrive, on CPU too: two runs then differ in the last bits of their first gradient. On an accelerator
    an operation that has no deterministic kernel warns; on CPU it is an error, since none is known to be needed.
    """
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    # Filling fresh memory costs time and changes no result that does not read memory before writing it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
