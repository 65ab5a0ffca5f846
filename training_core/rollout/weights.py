"""The part that every rollout engine shares: which weights it holds, and answers that say so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch

from training_core.protocol.digests import weights_digest
from training_core.records import StopReason
from training_core.rollout.base import (
    LogprobsKind,
    NamedTensors,
    Rollout,
    RolloutRequest,
    WeightReport,
    build_report,
    combine_digests,
    tensor_digests,
)


class WeightKeeper(ABC):
    """Base of the engines: keeps the report of the last load and puts it on every answer.

    Until the first load an engine holds the checkpoint that it was built from: no report, version 0, and the digest of
    that checkpoint's files.

    Args:
        dtype: of the engine's weights; tensors count as their values in it.
        eos_token_ids: tokens that end an answer.
        model_directory: the checkpoint that the engine was built from; None for an engine without a model.
    """

    def __init__(self, dtype: torch.dtype, eos_token_ids: Sequence[int], model_directory: Path | None) -> None:
        self._dtype = dtype
        self._eos_token_ids = sorted(set(eos_token_ids))
        self._model_directory = model_directory
        self._digests: dict[str, str] | None = None
        self._report: WeightReport | None = None

    @abstractmethod
    def replace_weights(self, tensors: NamedTensors) -> dict[str, str]:
        """Replace all weights; return the digest of each tensor that arrived, by name."""

    def load_weights(self, tensors: NamedTensors, version: int) -> WeightReport:
        digests = self.replace_weights(tensors)
        self._report = build_report(version, digests, self._digests)
        self._digests = digests
        return self._report

    def reported_weights(self) -> WeightReport | None:
        return self._report

    def weights_digest_of(self, tensors: NamedTensors) -> str:
        return combine_digests(tensor_digests(tensors, self._dtype))

    @cached_property
    def _checkpoint_sha256(self) -> str:
        return weights_digest(self._model_directory) if self._model_directory else ""

    def make_rollout(self, request: RolloutRequest, token_ids: Sequence[int], logprobs: Sequence[float]) -> Rollout:
        """Return an answer sampled with the weights that the engine holds now.

        Args:
            request: what was asked for.
            token_ids: of the answer, at least one, the end-of-turn token included.
            logprobs: of the distribution that was sampled, one a token.
        """
        report = self._report
        return Rollout(
            prompt_id=request.prompt_id,
            sample_index=request.sample_index,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            logprobs_kind=LogprobsKind.SAMPLED,
            stop_reason=StopReason.EOS if token_ids[-1] in self._eos_token_ids else StopReason.LENGTH,
            weight_version=report.version if report else 0,
            weights_sha256=report.sha256 if report else self._checkpoint_sha256,
        )
