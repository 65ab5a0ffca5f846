"""An engine whose answers come from a function: for tests, and for dry runs of a loop without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from training_core.records import StopReason
from training_core.rollout.base import (
    LogprobsKind,
    NamedTensors,
    Poll,
    Rollout,
    RolloutRequest,
    SamplingSettings,
    WeightReport,
    build_report,
    combine_digests,
    no_poll,
    tensor_digests,
)

Script = Callable[[RolloutRequest], tuple[Sequence[int], Sequence[float]]]
"""Request -> (token ids, log-probabilities)."""


class ScriptedEngine:
    """Answers by script and keeps the weight handshake like a real engine.

    Args:
        script: what to answer.
        eos_token_ids: an answer that ends in one of them was not truncated.
        num_prompt_and_answer_tokens: longest prompt plus answer.
        misreport: changes the report of a load, to play an engine whose weights are not the trainer's.
    """

    def __init__(
        self,
        script: Script,
        eos_token_ids: Sequence[int],
        *,
        num_prompt_and_answer_tokens: int = 1 << 20,
        misreport: Callable[[WeightReport], WeightReport] | None = None,
    ) -> None:
        self.num_prompt_and_answer_tokens = num_prompt_and_answer_tokens
        self._script = script
        self._eos_token_ids = set(eos_token_ids)
        self._misreport = misreport or (lambda report: report)
        self._digests: dict[str, str] | None = None
        self._report: WeightReport | None = None

    def load_weights(self, tensors: NamedTensors, version: int) -> WeightReport:
        digests = tensor_digests(tensors, torch.float32)
        self._report = self._misreport(build_report(version, digests, self._digests))
        self._digests = digests
        return self._report

    def reported_weights(self) -> WeightReport | None:
        return self._report

    def weights_digest_of(self, tensors: NamedTensors) -> str:
        return combine_digests(tensor_digests(tensors, torch.float32))

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingSettings, poll: Poll = no_poll
    ) -> list[Rollout]:
        poll()
        return [self._answer(request, sampling.max_new_tokens) for request in requests]

    def _answer(self, request: RolloutRequest, max_new_tokens: int) -> Rollout:
        token_ids, logprobs = self._script(request)
        rollout = Rollout(
            prompt_id=request.prompt_id,
            sample_index=request.sample_index,
            token_ids=tuple(token_ids[:max_new_tokens]),
            logprobs=tuple(logprobs[:max_new_tokens]),
            logprobs_kind=LogprobsKind.SAMPLED,
            stop_reason=StopReason.LENGTH,
            weight_version=self._report.version if self._report else 0,
            weights_sha256=self._report.sha256 if self._report else "",
        )
        ended = rollout.token_ids[-1] in self._eos_token_ids
        return replace(rollout, stop_reason=StopReason.EOS if ended else StopReason.LENGTH)

    def close(self) -> None:
        return
