"""The frozen start of the policy, which KL terms measure the distance to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from transformers import PreTrainedModel

from training_core.config.kl import NoKl
from training_core.config.online import OnlineConfig
from training_core.models.lora import is_lora, reference_pass
from training_core.rl.forward import Precision, frozen_copy

Reference = Callable[[], AbstractContextManager[PreTrainedModel]]
"""Gives the reference model for a forward pass, as a context."""


def build_reference(config: OnlineConfig, policy: PreTrainedModel) -> Reference | None:
    """Return the frozen reference, or None when nothing asks for a KL.

    An adapter's base weights never change: the policy with its adapter off is the reference, without a second copy.

    Args:
        config: the algorithm.
        policy: as it starts: before a checkpoint of the training is loaded into it.
    """
    if isinstance(config.kl, NoKl) and not config.kl.measure:
        return None
    if is_lora(policy):
        return lambda: _adapter_off(policy)
    copied = frozen_copy(policy, Precision(config.autocast, policy.device))
    return lambda: nullcontext(copied)


@contextmanager
def _adapter_off(policy: PreTrainedModel) -> Iterator[PreTrainedModel]:
    with reference_pass(policy):
        yield policy
