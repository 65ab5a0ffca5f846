"""The contract of a rollout engine: what goes in, what comes out, and which weights it was sampled with."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from training_core.errors import WeightVersionError
from training_core.records import StopReason

Poll = Callable[[], None]
NamedTensors = Sequence[tuple[str, torch.Tensor]]


def no_poll() -> None:
    """Nobody asks whether to stop."""


class LogprobsKind(StrEnum):
    """What a rollout's log-probabilities are of. Natural logarithm in any case."""

    SAMPLED = "sampled"
    """The distribution that the token was drawn from: logits divided by the temperature, then top-p renormalised. At
    temperature 0 (greedy) it is the raw model's."""
    RAW = "raw"
    """The model's own distribution at temperature 1."""


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn.

    Args:
        max_new_tokens: longest answer in tokens, the end-of-turn token included.
        temperature: divides the logits; 0 takes the most probable token.
        top_p: smallest probability mass that is kept, in (0, 1]; 1 keeps all. Training uses 1.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.temperature < 0.0 or not 0.0 < self.top_p <= 1.0:
            raise ValueError(
                f"max_new_tokens ({self.max_new_tokens}) must be at least 1, temperature ({self.temperature}) at least "
                f"0 and top_p ({self.top_p}) in (0, 1]"
            )


@dataclass(frozen=True)
class RolloutRequest:
    """One answer to sample. `seed` alone decides its randomness, whatever else is in the batch."""

    prompt_id: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Rollout:
    """One sampled answer.

    `token_ids` ends with an end-of-turn token when `stop_reason` is EOS. `logprobs` are natural-log, one a token, of
    the kind that `logprobs_kind` says.
    """

    prompt_id: str
    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    logprobs_kind: LogprobsKind
    stop_reason: StopReason
    weight_version: int
    weights_sha256: str

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The answer's tokens without the end-of-turn token, special to the tokenizer or not."""
        return self.token_ids[:-1] if self.stop_reason == StopReason.EOS else self.token_ids


@dataclass(frozen=True)
class WeightReport:
    """Which weights an engine says it holds, from the tensors that reached it."""

    version: int
    sha256: str
    num_tensors: int
    num_changed_tensors: int
    """Tensors that differ from the ones before; all of them after the first load."""


class RolloutEngine(Protocol):
    """Samples answers with weights that it can name."""

    def load_weights(self, tensors: NamedTensors, version: int) -> WeightReport:
        """Replace all weights; report what arrived. Tensors are named as in the checkpoint, of any float dtype."""
        ...

    def reported_weights(self) -> WeightReport | None:
        """Return what the engine holds; None before the first load (then it holds the checkpoint it was built from)."""
        ...

    def weights_digest_of(self, tensors: NamedTensors) -> str:
        """Return the digest the engine must report after loading `tensors`: they count in the engine's dtype."""
        ...

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingSettings, poll: Poll = no_poll
    ) -> list[Rollout]:
        """Return one rollout a request, in the order of the requests.

        `poll` is called between tokens; what it raises ends the call (the engine must then not be used again).
        """
        ...

    def close(self) -> None:
        """Free the engine's memory. Safe to call twice."""
        ...


MAX_WAITING_DIGESTS = 4
"""Tensors that wait for their digest at a time: merged or cast ones exist for this only, and must not add up to a
second model."""


class DigestQueue:
    """Takes the digests of named tensors in threads, while the caller prepares the next ones.

    Args:
        pool: the threads.
        dtype: in which values count.
    """

    def __init__(self, pool: ThreadPoolExecutor, dtype: torch.dtype) -> None:
        self._pool = pool
        self._dtype = dtype
        self._waiting: deque[Future[str]] = deque()
        self._digests: dict[str, Future[str]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a digest; waits for the oldest one when too many tensors wait."""
        future = self._pool.submit(tensor_digest, name, tensor, self._dtype)
        self._digests[name] = future
        self._waiting.append(future)
        if len(self._waiting) > MAX_WAITING_DIGESTS:
            self._waiting.popleft().result()

    def results(self) -> dict[str, str]:
        """Return all digests by name."""
        return {name: digest.result() for name, digest in self._digests.items()}


def tensor_digests(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> dict[str, str]:
    """Return the SHA-256 of each tensor's name, shape and values as `dtype`."""
    with digest_pool() as pool:
        queue = DigestQueue(pool, dtype)
        for name, tensor in tensors:
            queue.add(name, tensor)
        return queue.results()


def tensor_digest(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """Return the SHA-256 of one tensor's name, shape and values as `dtype`."""
    values = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    hasher = hashlib.sha256(f"{name}\0{dtype}\0{tuple(values.shape)}\0".encode())
    hasher.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def digest_pool() -> ThreadPoolExecutor:
    """Return threads to take digests in: hashlib releases the interpreter lock for large buffers."""
    return ThreadPoolExecutor(max_workers=2)


def combine_digests(digests: dict[str, str]) -> str:
    """Return one digest over named digests, whatever their order."""
    lines = "".join(f"{name}\0{digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def build_report(version: int, digests: dict[str, str], before: dict[str, str] | None) -> WeightReport:
    """Return the report of a load: `digests` by tensor now, and by tensor before (None at the first load)."""
    old = before or {}
    changed = sum(1 for name, digest in digests.items() if old.get(name) != digest)
    return WeightReport(version, combine_digests(digests), len(digests), changed)


def hand_over_weights(engine: RolloutEngine, tensors: NamedTensors, version: int) -> WeightReport:
    """Load `tensors` into `engine` and check its own report of what it received.

    Raises:
        WeightVersionError: the engine reports another version or digest, or a new digest without a changed tensor.
    """
    expected = engine.weights_digest_of(tensors)
    before = engine.reported_weights()
    report = engine.load_weights(tensors, version)
    if report.num_tensors != len(tensors):
        raise WeightVersionError(
            f"the rollout engine received {report.num_tensors} of {len(tensors)} weight tensors at version {version}. "
            "Nothing was sampled; this is a fault of the weight transfer, not of the config"
        )
    if before is not None and before.sha256 != expected and report.num_changed_tensors == 0:
        raise WeightVersionError(
            f"no tensor changed in the rollout engine, but the trainer handed over version {version}"
        )
    check_report(engine.reported_weights(), version, expected)
    return report


def check_report(report: WeightReport | None, version: int, sha256: str) -> None:
    """Raise WeightVersionError unless `report` names the weights that the trainer expects."""
    if report is None or report.version != version or report.sha256 != sha256:
        held = (
            "the checkpoint it was built from"
            if report is None
            else f"version {report.version} ({report.sha256[:16]}…)"
        )
        raise WeightVersionError(
            f"the rollout engine holds {held}, the trainer expects version {version} ({sha256[:16]}…). Nothing was "
            "trained on its answers; this is a fault of the weight transfer, not of the config"
        )


def check_rollouts(rollouts: Sequence[Rollout], requests: Sequence[RolloutRequest], version: int, sha256: str) -> None:
    """Check that rollouts answer the requests in order and were sampled with the expected weights.

    Raises:
        WeightVersionError: another version or digest.
        RuntimeError: a fault of the engine: another count or order, an empty answer, log-probabilities missing.
    """
    if [(r.prompt_id, r.sample_index) for r in rollouts] != [(r.prompt_id, r.sample_index) for r in requests]:
        raise RuntimeError("the rollout engine returned other answers than were asked for")
    for rollout in rollouts:
        if rollout.weight_version != version or rollout.weights_sha256 != sha256:
            raise WeightVersionError(
                f"answer {rollout.sample_index} to prompt {rollout.prompt_id} was sampled with weight version "
                f"{rollout.weight_version} ({rollout.weights_sha256[:16]}…), the trainer expects {version} "
                f"({sha256[:16]}…)"
            )
        if not rollout.token_ids or len(rollout.token_ids) != len(rollout.logprobs):
            raise RuntimeError(f"answer {rollout.sample_index} to prompt {rollout.prompt_id} has no token or log-prob")
        if rollout.logprobs_kind != LogprobsKind.SAMPLED:
            raise RuntimeError("training needs log-probs of the distribution that was sampled, not of the raw model")
