"""vLLM in the training process: fast sampling, weights replaced in memory before each rollout."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from training_core.config.rollout import VllmRolloutConfig
from training_core.errors import ConfigurationError
from training_core.models.loading import DTYPES
from training_core.rollout.base import (
    DigestQueue,
    NamedTensors,
    Poll,
    Rollout,
    RolloutRequest,
    SamplingSettings,
    digest_pool,
    no_poll,
)
from training_core.rollout.weights import WeightKeeper

MIN_BATCHED_TOKENS = 4096

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # The engine stays in this process.
    "VLLM_LOGGING_LEVEL": "ERROR",  # Its warnings are about CPU binding and tied weights; neither is a fault here.
    "VLLM_NO_USAGE_STATS": "1",
}


def receive_weights(worker: Any, tensors: NamedTensors, dtype: torch.dtype) -> dict[str, str]:
    """Load `tensors` on a vLLM worker; return the digest of each tensor that vLLM took from the iterator.

    Runs on the engine's side. vLLM repacks linear weights after loading, so what it holds afterwards has no
    checkpoint form; the digests are taken of the values it is given, cast to its dtype, as it asks for them. Only a few
    cast tensors exist at a time, never a second model.
    """
    with digest_pool() as pool:
        queue = DigestQueue(pool, dtype)

        def hand_out() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                value = tensor.detach().to(dtype)
                queue.add(name, value)
                yield name, value

        worker.reload_weights(weights_iterator=hand_out())
        model = worker.model_runner.get_model()
        repack_output_heads(model)
        repack_experts(model)
        return queue.results()


def repack_output_heads(model: torch.nn.Module) -> None:
    """Renew vLLM's packed copy of each output head from its weight.

    The CPU build multiplies by a packed copy. For a head tied to the embedding `reload_weights` replaces the weight and
    leaves that copy: the engine would sample with the new body and the old head. No digest of what was handed over can
    see this; the sampler-trainer mismatch of log-probabilities does.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def repack_experts(model: torch.nn.Module) -> None:
    """Pack each layer's experts of a mixture again.

    The CPU build packs them at the first load only: after a hand-over it would read the new weights as packed ones, and
    sample with experts that are none.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts):
            experts.process_weights_after_loading(module)


def is_refused_setting(error: Exception) -> bool:
    """Return whether an error of the engine's start is about the model or the settings, and not a fault of its own.

    vLLM refuses a config, a model or a cache too small for one answer with ValueError or NotImplementedError; a cache
    too large for the machine is torch's error about memory, which on the CPU has no type of its own.
    """
    if isinstance(error, ValueError | NotImplementedError | torch.OutOfMemoryError):
        return True
    return "can't allocate memory" in str(error)


@contextlib.contextmanager
def torch_threads_kept() -> Iterator[None]:
    """Restore torch's thread count and its setter: vLLM's CPU worker sets one thread and disables the setter."""
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)


class VllmEngine(WeightKeeper):
    """A vLLM engine that says which weights it samples with.

    Args:
        config: the engine's knobs.
        model_directory: the checkpoint that gives architecture and first weights.
        max_prompt_tokens: longest prompt it must take.
        max_new_tokens: longest answer it must give.
        eos_token_ids: tokens that end an answer.

    Raises:
        ConfigurationError: vLLM is not installed, or cannot run this model with these settings.
    """

    def __init__(
        self,
        config: VllmRolloutConfig,
        model_directory: Path,
        *,
        max_prompt_tokens: int,
        max_new_tokens: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        super().__init__(DTYPES[config.dtype], eos_token_ids, model_directory)
        self._num_prompt_and_answer_tokens = max_prompt_tokens + max_new_tokens
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with torch_threads_kept():
            self._llm: Any = self._start(config)

    def _start(self, config: VllmRolloutConfig) -> Any:
        try:
            from vllm import LLM
        except ImportError as error:
            raise ConfigurationError(
                f"rollout.engine is vllm, but vllm cannot be imported: {error}. Install the extra `cpu` or `gpu`, or "
                "use `engine: transformers`"
            ) from error
        try:
            return LLM(
                model=str(self._model_directory),
                dtype=config.dtype,
                seed=0,  # Each request brings its own seed.
                max_model_len=self._num_prompt_and_answer_tokens,
                max_num_seqs=config.max_num_sequences,
                max_num_batched_tokens=max(
                    MIN_BATCHED_TOKENS, self._num_prompt_and_answer_tokens, config.max_num_sequences
                ),
                kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
                # A seeded request whose prefill is cut in two fails on CPU: its generator has no offset.
                enable_chunked_prefill=False,
                # A cached prefix would be of older weights.
                enable_prefix_caching=False,
                enforce_eager=True,
                distributed_executor_backend="uni",
                logprobs_mode="processed_logprobs",
                skip_tokenizer_init=True,
                disable_log_stats=True,
                trust_remote_code=False,
            )
        except (ValueError, RuntimeError) as error:
            if not is_refused_setting(error):
                raise
            raise ConfigurationError(
                f"vLLM cannot run {self._model_directory} with these settings: {error}. Change rollout.kv_cache_gib, "
                "rollout.dtype or rollout.max_new_tokens, or use `engine: transformers`"
            ) from error

    def replace_weights(self, tensors: NamedTensors) -> dict[str, str]:
        digests: dict[str, str] = self._llm.collective_rpc(receive_weights, args=(tensors, self._dtype))[0]
        self._llm.reset_prefix_cache()
        return digests

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingSettings, poll: Poll = no_poll
    ) -> list[Rollout]:
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        for index, request in enumerate(requests):
            parameters = SamplingParams(
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=request.seed,
                logprobs=0,
                stop_token_ids=self._eos_token_ids,
                ignore_eos=True,  # The ids above are all there are; nothing else ends an answer.
                detokenize=False,
            )
            engine.add_request(str(index), {"prompt_token_ids": list(request.prompt_ids)}, parameters)
        finished: dict[int, Any] = {}
        with torch_threads_kept():
            while engine.has_unfinished_requests():
                poll()
                for output in engine.step():
                    if output.finished:
                        finished[int(output.request_id)] = output.outputs[0]
        return [self._rollout(request, finished[index]) for index, request in enumerate(requests)]

    def _rollout(self, request: RolloutRequest, output: Any) -> Rollout:
        token_ids = list(output.token_ids)
        logprobs = [float(entry[token].logprob) for entry, token in zip(output.logprobs, token_ids, strict=True)]
        return self.make_rollout(request, token_ids, logprobs)

    def close(self) -> None:
        if self._llm is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm = None
        gc.collect()
        cleanup_dist_env_and_memory()
