"""Ways to lay a step's answers out for a forward pass. All give the same log-probabilities up to rounding.

Every layout is a `MicroBatch` whose plain fields stay valid, so losses see [B, t] tensors whatever the layout.

Shapes: B answers, t the longest of them, S sum of all prompts' and answers' tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training_core.config.online import OnlineConfig
from training_core.models.layers import has_only_full_attention, has_recurrent_layers
from training_core.rl.shared_prompt import split_by_prompt
from training_core.rollout.batch import MicroBatch, TrajectoryBatch, build_micro_batch, by_size, chunks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedBatch(MicroBatch):
    """Answers one after another in a single row, without padding; positions begin anew with each."""

    packed_ids: Tensor
    """[1, S] int64."""
    packed_positions: Tensor
    """[1, S] int64: position of each token in its own sequence. The model's mask keeps sequences apart by them."""
    packed_predict: Tensor
    """[tokens] int64: index in `packed_ids` that predicts each answer token, in row-major order of `mask`."""


@dataclass(frozen=True)
class Layout:
    """How the rows of an update are cut and laid out."""

    name: str
    """"shared_prompt", "packed" or "padded"."""
    max_rows: int
    max_tokens: int | None
    """Bound on the tokens of a pass, padding included; None for none."""

    def split(
        self, batch: TrajectoryBatch, rows: Sequence[int], pad_token_id: int, device: torch.device
    ) -> list[MicroBatch]:
        """Return the rows in micro-batches, those that need most memory first."""
        if self.name == "shared_prompt":
            return split_by_prompt(batch, rows, self.max_rows, self.max_tokens, pad_token_id, device)
        build = pack if self.name == "packed" else build_micro_batch
        is_padded = self.name == "padded"
        ordered = by_size(batch, rows)
        cut = chunks(ordered, batch.total_length, self.max_rows, self.max_tokens, is_padded=is_padded)
        return [build(batch, chunk, pad_token_id, device) for chunk in cut]


def choose_layout(config: OnlineConfig, model: PreTrainedModel) -> Layout:
    """Return the layout that the config asks for, as far as the model's layers give the same result in it."""
    name = config.layout
    why = _why_not_shared(config, model)
    if name == "auto":
        name = "padded" if why else "shared_prompt"
    elif name == "shared_prompt" and why:
        logger.warning("layout shared_prompt is left off: %s", why)
        name = "padded"
    elif name == "packed" and has_recurrent_layers(model):
        logger.warning(
            "layout packed is left off: %s carries a state from one answer to the next", type(model).__name__
        )
        name = "padded"
    return Layout(name, config.micro_batch_size, config.max_tokens_per_micro_batch)


def _why_not_shared(config: OnlineConfig, model: PreTrainedModel) -> str | None:
    if config.gradient_checkpointing:
        return "gradient checkpointing keeps no cache"
    if not has_only_full_attention(model):
        return f"{type(model).__name__} has layers other than full attention, whose result would change"
    return None


def pack(batch: TrajectoryBatch, rows: Sequence[int], pad_token_id: int, device: torch.device) -> PackedBatch:
    """Return rows of a step laid end to end."""
    plain = build_micro_batch(batch, rows, pad_token_id, device)
    sequences = [batch.prompts[row] + batch.answers[row] for row in rows]
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    starts = (lengths.cumsum(0) - lengths).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    return PackedBatch(
        **vars(plain),
        packed_ids=torch.tensor([token for sequence in sequences for token in sequence])[None].to(device),
        packed_positions=positions[None].to(device),
        packed_predict=starts[plain.predict_rows] + plain.predict_positions,
    )


def packed_hidden(model: PreTrainedModel, micro: PackedBatch) -> Tensor:
    """Return [tokens, width]: the last hidden states that predict the answer tokens, in row-major order of the mask."""
    hidden: Tensor = model.base_model(
        input_ids=micro.packed_ids, position_ids=micro.packed_positions, use_cache=False
    ).last_hidden_state[0]
    return hidden[micro.packed_predict]
