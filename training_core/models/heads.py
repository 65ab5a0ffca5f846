"""A scalar head on a language model's backbone: the reward model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from training_core.data.batching import batches_by_tokens, pad_sequences
from training_core.errors import ArtifactError, DataError, EvaluationError
from training_core.models.loading import (
    DTYPES,
    cast_state_dict,
    check_loading_report,
    copy_tokenizer_files,
    load_causal_lm,
    update_json,
)
from training_core.protocol.atomic import read_json, write_json
from training_core.seeding import derive_seed

HEAD_NAME = "score.weight"
REWARD_CONFIG = "reward_config.json"


class RewardModel(nn.Module):
    """Backbone hidden states at the last real token, times a float32 vector: one score a row.

    Args:
        backbone: a decoder without its language-model head.
        base_prefix: prefix of the backbone's weights in a causal model's checkpoint, e.g. "model".

    Attributes:
        score_mean, score_std: over the validation answers, set by training; used to bring scores to a known scale.
    """

    def __init__(self, backbone: PreTrainedModel, base_prefix: str) -> None:
        super().__init__()
        self.backbone = backbone
        self.base_prefix = base_prefix
        self.head = nn.Linear(backbone.config.hidden_size, 1, bias=False, dtype=torch.float32)
        self.score_mean = 0.0
        self.score_std = 1.0
        self.requires_grad_(True)
        self.train(False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return float32 scores [batch], read at each row's last real token.

        Args:
            input_ids: int64 [batch, time].
            attention_mask: bool [batch, time], true at real tokens, which are contiguous; padding may be on either
                side. Padding ids change nothing.

        Raises:
            DataError: a row has no real token.
        """
        if not bool(attention_mask.any(dim=1).all()):
            raise DataError("a row without any real token has no score")
        inputs: dict[str, Any] = {}
        if not bool(attention_mask[:, 0].all()):
            positions = attention_mask.long().cumsum(dim=1) - 1
            inputs = {"attention_mask": attention_mask, "position_ids": positions.clamp(min=0)}
        # With padding on the right only, causal attention never shows it to a real token: no mask, a faster kernel.
        hidden = self.backbone(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
        last = hidden[torch.arange(len(hidden), device=hidden.device), last_positions(attention_mask)]
        with torch.autocast(hidden.device.type, enabled=False):
            scores: torch.Tensor = self.head(last.float()).squeeze(-1)
        return scores

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the backbone; the head is float32 whatever this is."""
        return self.backbone.dtype

    def normalise(self, score: float) -> float:
        """Return the score in standard deviations above the mean of the validation answers."""
        return (score - self.score_mean) / self.score_std


def last_positions(mask: torch.Tensor) -> torch.Tensor:
    """Return the index [batch] of the last true value of each row of a bool mask [batch, time].

    >>> last_positions(torch.tensor([[True, True, False], [False, True, True]])).tolist()
    [1, 2]
    """
    return mask.shape[1] - 1 - mask.flip(1).long().argmax(dim=1)


def num_positions(model_directory: Path) -> int:
    """Return how many tokens a checkpoint's model has positions for, without loading it.

    Raises:
        ArtifactError: config.json is missing, damaged, or does not say.
    """
    try:
        config = AutoConfig.from_pretrained(str(model_directory), local_files_only=True, trust_remote_code=False)
        return int(config.max_position_embeddings)
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ArtifactError(f"{model_directory}/config.json gives no number of positions: {error}") from error


def new_reward_model(model_directory: Path, seed: int) -> RewardModel:
    """Return a reward model over a causal model's float32 backbone, with a fresh head.

    The head is normal with standard deviation 1 / (hidden_size + 1) (Stiennon et al. 2020, arXiv 2009.01325).
    """
    causal = load_causal_lm(model_directory, dtype=torch.float32)
    backbone: Any = causal.base_model
    model = RewardModel(backbone, causal.base_model_prefix)
    generator = torch.Generator().manual_seed(derive_seed(seed, "reward_head"))
    with torch.no_grad():
        width = model.head.in_features
        model.head.weight.copy_(torch.randn(1, width, generator=generator) / (width + 1))
    return model


def save_reward_model(
    model: RewardModel,
    source_directory: Path,
    out_directory: Path,
    report: dict[str, Any],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a folder that `load_reward_model` and Hugging Face's sequence classification read.

    Args:
        model: with `score_mean` and `score_std` set, or with `save_score_scale` to follow.
        source_directory: the causal model's folder, for its config and tokenizer.
        out_directory: made if missing.
        report: further entries of reward_config.json.
        dtype: of the backbone in the file and wherever the model is used from then on; the head stays float32.
    """
    out_directory.mkdir(parents=True, exist_ok=True)
    prefix = f"{model.base_prefix}." if model.base_prefix else ""
    state = {f"{prefix}{name}": value for name, value in cast_state_dict(model.backbone, dtype).items()}
    state[HEAD_NAME] = model.head.weight.detach().cpu()
    save_file(state, out_directory / "model.safetensors", metadata={"format": "pt"})
    config = read_json(source_directory / "config.json")
    config["architectures"] = [
        name.replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]
    ]
    config.update(id2label={"0": "score"}, label2id={"score": 0}, dtype=str(dtype).removeprefix("torch."))
    write_json(out_directory / "config.json", dict(sorted(config.items())))
    copy_tokenizer_files(source_directory, out_directory)
    write_json(out_directory / REWARD_CONFIG, {"base_prefix": model.base_prefix})
    save_score_scale(model, out_directory, report)


def save_score_scale(model: RewardModel, directory: Path, report: dict[str, Any]) -> None:
    """Write `score_mean` and `score_std` of `model`, and further entries, into a saved model's reward_config.json."""
    scale = {"score_mean": model.score_mean, "score_std": model.score_std}
    update_json(directory / REWARD_CONFIG, **{**report, **scale})


def load_reward_model(directory: Path) -> RewardModel:
    """Return a saved reward model in evaluation mode, in the dtype it was saved in: there is one function that scores.

    Args:
        directory: written by `save_reward_model`. What may be an ensemble is read by `load_reward_ensemble`.

    Raises:
        ArtifactError: a file is missing or damaged, weights do not fit the config, or it is an ensemble.
    """
    try:
        reward_config = read_json(directory / REWARD_CONFIG)
        if "num_members" in reward_config:
            raise ArtifactError(f"it holds an ensemble; one of its reward models lies in {directory / 'member_0'}")
        mean, std = float(reward_config["score_mean"]), float(reward_config["score_std"])
        base_prefix = str(reward_config["base_prefix"])
        loaded: Any = AutoModel.from_pretrained(
            str(directory),
            dtype=DTYPES[read_json(directory / "config.json")["dtype"]],
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        with safe_open(directory / "model.safetensors", framework="pt") as weights:
            head = weights.get_tensor(HEAD_NAME)
    except Exception as error:  # Each library has its own errors for a damaged file; all mean the same to the user.
        raise ArtifactError(f"no reward model can be loaded from {directory}: {error!r}") from error
    backbone, report = loaded
    leftover = {name for name in report["unexpected_keys"] if name != HEAD_NAME}
    check_loading_report({**report, "unexpected_keys": leftover}, directory)
    model = RewardModel(backbone, base_prefix)
    with torch.no_grad():
        model.head.weight.copy_(head)
    model.score_mean, model.score_std = mean, std
    return model


def score_token_ids(
    model: RewardModel,
    sequences: Sequence[Sequence[int]],
    pad_token_id: int,
    max_tokens_per_batch: int = 4096,
    *,
    side: Literal["left", "right"] = "right",
) -> list[float]:
    """Return one score a sequence, in the order of the input.

    Batches are made by length, so a score depends on the other sequences through rounding. Equal sequences get the same
    score to the last bit: each is scored once.

    Args:
        model: scores at the last id of each sequence.
        sequences: token ids, each at least one.
        pad_token_id: any id of the vocabulary.
        max_tokens_per_batch: bound on rows x width of a batch.
        side: where the padding goes.

    Raises:
        DataError: a sequence is empty or longer than the model's limit.
        EvaluationError: a score is not finite.
    """
    first_of: dict[bytes, int] = {}
    keys, lengths = [], []
    # One sequence at a time: they may lie in a file, and there may be more of them than memory holds.
    for index, sequence in enumerate(sequences):
        keys.append(hashlib.sha256(numpy.asarray(sequence, numpy.int64).tobytes()).digest())
        lengths.append(len(sequence))
        first_of.setdefault(keys[-1], index)
    check_lengths(lengths, model.backbone.config.max_position_embeddings)
    distinct = list(first_of.values())
    score_of: dict[int, float] = {}
    with torch.no_grad():
        for batch in batches_by_tokens([lengths[index] for index in distinct], max_tokens_per_batch):
            rows = [distinct[i] for i in batch]
            input_ids, mask = pad_sequences([sequences[index] for index in rows], pad_token_id, side)
            values = model(input_ids.to(model.device), mask.to(model.device)).tolist()
            score_of.update(zip(rows, values, strict=True))
    scores = [score_of[first_of[key]] for key in keys]
    bad = [index for index, score in enumerate(scores) if not math.isfinite(score)]
    if bad:
        raise EvaluationError(f"the reward model's score of sequence {bad[0]} is {scores[bad[0]]} ({len(bad)} in all)")
    return scores


def check_lengths(lengths: Sequence[int], limit: int) -> None:
    """Refuse sequences that the model has no positions for.

    Raises:
        DataError: names the first one.
    """
    for index, length in enumerate(lengths):
        if length > limit:
            raise DataError(
                f"sequence {index} has {length} tokens, the model's limit is {limit}. Nothing is cut in silence: lower "
                "the length limit of the data checks"
            )
