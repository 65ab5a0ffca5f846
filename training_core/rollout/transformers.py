"""A plain sampling loop over a transformers model, with a cache of keys and values.

Each answer draws from its own generator, so what it becomes depends on its prompt, its seed and the weights, not on
what else is in the batch or in which order. (Sums over another batch size may round differently in the last bit.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from training_core.config.rollout import TransformersRolloutConfig
from training_core.data.batching import pad_sequences
from training_core.errors import ConfigurationError
from training_core.models.checkpoint_names import checkpoint_tensors
from training_core.models.layers import has_recurrent_layers
from training_core.models.loading import DTYPES, load_causal_lm, training_device
from training_core.rollout.base import (
    NamedTensors,
    Poll,
    Rollout,
    RolloutRequest,
    SamplingSettings,
    no_poll,
    tensor_digests,
)
from training_core.rollout.weights import WeightKeeper


class TransformersEngine(WeightKeeper):
    """Samples with a model of its own, whose weights are replaced before each rollout.

    Args:
        config: the engine's knobs.
        model_directory: the checkpoint that gives architecture and first weights.
        max_prompt_tokens: longest prompt it must take; not needed, memory grows with what comes.
        max_new_tokens: longest answer it must give; not needed either.
        eos_token_ids: tokens that end an answer.
        device: where the model lives; None takes the one that training runs on.

    Raises:
        ConfigurationError: the model has layers that carry a state from token to token.
    """

    def __init__(
        self,
        config: TransformersRolloutConfig,
        model_directory: Path,
        *,
        max_prompt_tokens: int,
        max_new_tokens: int,
        eos_token_ids: Sequence[int],
        device: torch.device | None = None,
    ) -> None:
        super().__init__(DTYPES[config.dtype], eos_token_ids, model_directory)
        self._max_num_sequences = config.max_num_sequences
        self._device = device or training_device()
        self._eos = torch.tensor(self._eos_token_ids, device=self._device)
        model = load_causal_lm(model_directory, self._dtype)
        if has_recurrent_layers(model):
            # They would take padding on the left for tokens, and finished answers cannot be taken out of the batch.
            raise ConfigurationError(
                f"rollout.engine transformers cannot sample from {type(model).__name__}, whose layers carry a state "
                "from token to token. Set rollout.engine: vllm"
            )
        self._model: PreTrainedModel | None = model.to(self._device)  # type: ignore[arg-type]

    @property
    def model(self) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError("this rollout engine was closed")
        return self._model

    @torch.no_grad()
    def replace_weights(self, tensors: NamedTensors) -> dict[str, str]:
        held = checkpoint_tensors(self.model)
        names = []
        for name, tensor in tensors:
            held[name].copy_(tensor)
            names.append(name)
        # Read back from the model: the report is about what the engine holds.
        return tensor_digests([(name, held[name]) for name in names], self._dtype)

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingSettings, poll: Poll = no_poll
    ) -> list[Rollout]:
        rollouts = []
        for start in range(0, len(requests), self._max_num_sequences):
            rollouts += self._generate_batch(requests[start : start + self._max_num_sequences], sampling, poll)
        return rollouts

    @torch.no_grad()
    def _generate_batch(
        self, requests: Sequence[RolloutRequest], sampling: SamplingSettings, poll: Poll
    ) -> list[Rollout]:
        input_ids, is_real = pad_sequences([request.prompt_ids for request in requests], pad_token_id=0, side="left")
        input_ids, attention_mask = input_ids.to(self._device), is_real.long().to(self._device)
        uniforms = request_uniforms(requests, sampling.max_new_tokens).to(self._device)
        cache = DynamicCache(config=self.model.config)
        positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        active = torch.arange(len(requests), device=self._device)
        tokens: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        for step in range(sampling.max_new_tokens):
            poll()
            output = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            chosen, chosen_logprobs = draw_tokens(output.logits[:, -1], uniforms[active, step], sampling)
            for row, token, logprob in zip(active.tolist(), chosen.tolist(), chosen_logprobs.tolist(), strict=True):
                tokens[row].append(token)
                logprobs[row].append(logprob)
            going_on = ~torch.isin(chosen, self._eos)
            if not bool(going_on.any()):
                break
            if not bool(going_on.all()):
                keep = going_on.nonzero()[:, 0]
                cache.batch_select_indices(keep)
                active, chosen, attention_mask, positions = (
                    x[keep] for x in (active, chosen, attention_mask, positions)
                )
            input_ids = chosen[:, None]
            attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(active), 1)], dim=1)
            positions = positions[:, -1:] + 1
        return [self.make_rollout(*row) for row in zip(requests, tokens, logprobs, strict=True)]

    def close(self) -> None:
        self._model = None


def request_uniforms(requests: Sequence[RolloutRequest], num_tokens: int) -> Tensor:
    """Return [requests, num_tokens] float64 in [0, 1): row i comes from the seed of request i alone."""
    rows = []
    for request in requests:
        generator = torch.Generator().manual_seed(request.seed)
        rows.append(torch.rand(num_tokens, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def draw_tokens(logits: Tensor, uniforms: Tensor, sampling: SamplingSettings) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution.

    Args:
        logits: [batch, vocabulary].
        uniforms: [batch] float64 in [0, 1).
        sampling: temperature 0 takes the largest logit.

    Returns:
        ([batch] token ids, [batch] float32 natural-log probabilities under the distribution drawn from).
    """
    if sampling.temperature == 0.0:
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        tokens = logprobs.argmax(dim=-1)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
    if sampling.top_p < 1.0:
        logprobs = keep_top_p(logprobs, sampling.top_p)
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    # Scaled by the total, which rounding leaves a little off 1: a draw can then never pass the last possible token.
    targets = (uniforms * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def keep_top_p(logprobs: Tensor, top_p: float) -> Tensor:
    """Keep the fewest tokens whose probabilities reach `top_p`, renormalised; the others get -inf."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.double().exp().cumsum(dim=-1) - ordered.double().exp()
    kept = torch.zeros_like(logprobs, dtype=torch.bool).scatter_(1, order, mass_before < top_p)
    return torch.log_softmax(logprobs.masked_fill(~kept, -float("inf")), dim=-1)
