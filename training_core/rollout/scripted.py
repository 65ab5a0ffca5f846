"""An engine whose answers come from a function: for tests, and for dry runs of a loop without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from training_core.rollout.base import (
    NamedTensors,
    Poll,
    Rollout,
    RolloutRequest,
    SamplingSettings,
    WeightReport,
    no_poll,
    tensor_digests,
)
from training_core.rollout.weights import WeightKeeper

Script = Callable[[RolloutRequest], tuple[Sequence[int], Sequence[float]]]
"""Request -> (token ids, log-probabilities)."""


class ScriptedEngine(WeightKeeper):
    """Answers by script and keeps the weight handshake like a real engine.

    Args:
        script: what to answer.
        eos_token_ids: an answer that ends in one of them was not truncated.
        misreport: changes the report of a load, to play an engine whose weights are not the trainer's.
    """

    def __init__(
        self,
        script: Script,
        eos_token_ids: Sequence[int],
        *,
        misreport: Callable[[WeightReport], WeightReport] | None = None,
    ) -> None:
        super().__init__(torch.float32, eos_token_ids, model_directory=None)
        self._script = script
        self._misreport = misreport or (lambda report: report)

    def replace_weights(self, tensors: NamedTensors) -> dict[str, str]:
        return tensor_digests(tensors, self._dtype)

    def load_weights(self, tensors: NamedTensors, version: int) -> WeightReport:
        self._report = self._misreport(super().load_weights(tensors, version))
        return self._report

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingSettings, poll: Poll = no_poll
    ) -> list[Rollout]:
        poll()
        return [self._answer(request, sampling.max_new_tokens) for request in requests]

    def _answer(self, request: RolloutRequest, max_new_tokens: int) -> Rollout:
        token_ids, logprobs = self._script(request)
        return self.make_rollout(request, token_ids[:max_new_tokens], logprobs[:max_new_tokens])

    def close(self) -> None:
        return
